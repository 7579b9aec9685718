"""The model that a command line works with, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.cli.context import CliContext
from localllm.cli.options import setting_flags
from localllm.config import ResolvedSettings, load_settings
from localllm.errors import AdapterError, Fix, ModelNotFoundError, UsageError
from localllm.runtime.engine_loader import refuse_idle, refuse_idle_vram
from localllm.runtime.presets import choose
from localllm.runtime.selection import Selection, is_model, locate, require_weights, with_defaults
from localllm.settings import OF_KV

if TYPE_CHECKING:
    from localllm.chat.recorder import Resumed


def select(cli: CliContext, word: str | None, flags: Mapping[str, Any]) -> Selection:
    """The model `word`, a preset's or the one that the settings name, and the settings under these flags; `cli` keeps
    both.

    Raises ModelNotFoundError, UnsupportedModelError, SettingsError, CheckpointError. Uses no network, but for adapters
    that --pull or the user wants.
    """
    resolved, preset = choose(read_settings(cli, flags), word)
    cli.resolved = resolved
    try:
        cli.model = locate(resolved)
    except ModelNotFoundError as error:
        _tell_adapter_apart(resolved.settings.model, error)
        raise
    require_weights(cli.model)
    selection = replace(with_defaults(resolved, cli.model), preset=preset)
    if any(flags.get(name) is not None for name in OF_KV):
        from localllm.models.families import load_config

        refuse_idle(resolved, load_config(cli.model.directory), cli.model.name)
    if "pull" in flags:
        _pull_adapters(cli, selection, unasked=flags["pull"])
    return selection


def _tell_adapter_apart(word: str, error: ModelNotFoundError) -> None:
    """Give the error of MODEL:ADAPTER, as requests name it, the line that a command takes."""
    from localllm.hub.adapters import is_here, split_scale

    base, _, adapter = word.partition(":")
    with suppress(UsageError):
        if adapter and is_model(base) and is_here(split_scale(adapter)[0]):
            error.why = f"{adapter[:80]} is an adapter, and is named beside the model"
            error.fix = Fix.adapter(word, base, adapter)


def _pull_adapters(cli: CliContext, selection: Selection, *, unasked: bool) -> None:
    """Pull the adapters that are named and not here, where `pull_absent_adapter` may. Raises what a pull does."""
    from localllm.cli.pulling import pull_absent_adapter
    from localllm.hub.adapters import locate_adapter, split_scale

    for name, _ in map(split_scale, selection.settings.adapter):
        try:
            locate_adapter(name)
        except AdapterError as error:
            pull_absent_adapter(cli, name, selection.resolved, error, unasked=unasked)


def select_or_pull(cli: CliContext, word: str | None, flags: Mapping[str, Any]) -> Selection:
    """Select a model, pulled before where it is not here and `pull_absent` may. Raises what both do."""
    try:
        return select(cli, word, flags)
    except ModelNotFoundError as error:
        _pull_absent(cli, flags, error)
        return select(cli, word, flags)


def select_text_only(cli: CliContext, word: str | None, flags: Mapping[str, Any]) -> Selection:
    """Select a model of which only tokenizer and template are needed: a folder with these will do."""
    cli.resolved, preset = choose(read_settings(cli, flags), word)
    cli.model = locate(cli.resolved, needs_config=False)
    return Selection(cli.model, cli.resolved, preset)


def select_resumed(
    cli: CliContext, word: str | None, flags: Mapping[str, Any], resumed: Resumed | None, again: Fix | None
) -> Selection:
    """Select the model `word`, also by a name that the server alone has for it where its engine may be used, or
    the one that the resumed chat was held with.

    again: the line that would go on with the chat by the built-in model. Raises what `select` does.
    """
    held_with = resumed.session.model if resumed is not None and word is None else None
    selection = _select_resumed(cli, word, held_with, flags, again)
    if resumed is None:
        return selection
    selection = resumed.under_its_adapters(selection, cli.output.warn)
    cli.resolved = selection.resolved
    return selection


def _select_resumed(
    cli: CliContext, word: str | None, held_with: str | None, flags: Mapping[str, Any], again: Fix | None
) -> Selection:
    try:
        return select(cli, held_with or word, flags)
    except ModelNotFoundError as error:
        if held_with is not None:
            error.why = f"the chat was held with it; {error.why}"
            error.fix = [*error.fixes, *([again] if again else [])]
        from localllm.runtime.server_client import named_at_server

        there = None if word is None or flags["no_attach"] else named_at_server(word)
        if there is not None:
            return select(cli, there, flags)
        _pull_absent(cli, flags, error)
        return select(cli, held_with or word, flags)


def _pull_absent(cli: CliContext, flags: Mapping[str, Any], error: ModelNotFoundError) -> None:
    from localllm.cli.pulling import pull_absent

    assert cli.resolved is not None
    pull_absent(cli, cli.resolved, flags, error)


def read_settings(cli: CliContext, flags: Mapping[str, Any]) -> ResolvedSettings:
    """The settings under the flags of a command; `cli` keeps them. Raises SettingsError, UsageError."""
    cli.resolved = load_settings(setting_flags(flags))
    _warn_of_idle_drafts(cli, flags)
    if cli.resolved.settings.device == "cpu":  # whether there is a GPU is known when torch is there
        refuse_idle_vram(cli.resolved)
    return cli.resolved


def _warn_of_idle_drafts(cli: CliContext, flags: Mapping[str, Any]) -> None:
    """Warn of a flag without effect beside one that turns drafting off. No error: both mean plain decoding."""
    who, count = flags.get("speculate"), flags.get("draft_tokens")
    if who is None or count is None or (who == "off") == (count == 0):
        return
    off, idle = f"--speculate {who}", f"--draft-tokens {count}"
    if count == 0:
        off, idle = idle, off
    cli.output.warn(f"{idle} has no effect: with {off} nothing is drafted")
