"""Which model a command works with, where its files are, and what the settings say about it."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.front import Front
from localllm.cli.options import SAMPLING_SETTING_NAMES, extra_sampling
from localllm.cli.origins import read_settings
from localllm.config import ResolvedSettings, Settings
from localllm.errors import FETCH_ANEW, LocalLLMError, ModelNotFoundError
from localllm.registry import BUILT_IN, SAMPLING_KEYS, with_model_defaults

if TYPE_CHECKING:
    from localllm.engine.request import SamplingParams
    from localllm.hub import ModelFiles
    from localllm.registry import ModelEntry


@dataclass(frozen=True)
class Selection:
    """A model on this disk, and the settings with the model's own defaults filled in."""

    files: ModelFiles
    resolved: ResolvedSettings

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    @property
    def private(self) -> bool:
        """Whether nothing of what is said may be kept."""
        return self.settings.private

    @property
    def model_name(self) -> str:
        """A name under which the model is found again, from any folder."""
        is_folder = self.files.repo is None and self.files.name != BUILT_IN
        return str(self.files.directory.absolute()) if is_folder else self.files.name

    def sampling(self, flags: Mapping[str, Any]) -> SamplingParams:
        """How tokens are drawn: the settings, and the flags that are no settings; a seed where none is set.

        Raises UsageError.
        """
        from localllm.engine.request import SamplingParams

        chosen = {name: getattr(self.settings, name) for name in SAMPLING_SETTING_NAMES}
        chosen = {"seed": secrets.randbits(31)} | {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams(**chosen, **extra_sampling(flags))


def select(front: Front, word: str | None, flags: Mapping[str, Any]) -> Selection:
    """The model `word`, or the one that the settings name, and the settings under these flags; `front` hears of it.

    Raises ModelNotFoundError, SettingsError, CheckpointError. Uses no network.
    """
    selection = _located(front, word, flags, needs_config=True)
    files = selection.files
    return Selection(files, _with_model_defaults(selection.resolved, files.entry, files))


def select_text_only(front: Front, word: str | None, flags: Mapping[str, Any]) -> Selection:
    """As `select`, for what needs a tokenizer and a template but no model: a folder with only those will do."""
    return _located(front, word, flags, needs_config=False)


def named(error: LocalLLMError, files: ModelFiles | None) -> LocalLLMError:
    """The error with the model's name where its fix says MODEL. What was not fetched cannot be fetched anew."""
    if files is None:
        return error
    if files.repo is None:
        copy = f"copy the model's files into {files.directory} anew"
        error.fix = error.fix.replace(FETCH_ANEW, "reinstall localllm" if files.name == BUILT_IN else copy)
    error.fix = re.sub(r"(?<!\S)MODEL(?![^\s,)])", lambda _: shlex.quote(files.name), error.fix)
    return error


def _located(front: Front, word: str | None, flags: Mapping[str, Any], *, needs_config: bool) -> Selection:
    from localllm import hub

    resolved = read_settings(front, flags)
    settings = resolved.settings
    name = settings.model if word is None else word
    try:
        files = hub.locate(name, offline=settings.offline, needs_config=needs_config)
    except ModelNotFoundError as error:
        origin = resolved.origins["model"]
        if word is None and origin.kind != "default":
            error.why = f"the setting `model` in {origin.where} names it; {error.why}"
            if "localllm pull" not in error.fix:
                error.fix = f"write another name there, or on the line: localllm run {BUILT_IN} -p TEXT"
        raise
    front.model = files
    return Selection(files, resolved)


def sampling_defaults(entry: ModelEntry | None, files: ModelFiles | None) -> dict[str, float]:
    """What the registry and, where it is on this disk, the checkpoint recommend. Raises CheckpointError."""
    settings = _with_model_defaults(ResolvedSettings(), entry, files).settings
    values = {name: getattr(settings, name) for name in SAMPLING_KEYS}
    return {name: value for name, value in values.items() if value is not None}


def _with_model_defaults(
    resolved: ResolvedSettings, entry: ModelEntry | None, files: ModelFiles | None
) -> ResolvedSettings:
    path = files.directory / "generation_config.json" if files else None
    return with_model_defaults(resolved, entry, _generation_config(path) if path else {}, str(path))


def _generation_config(path: Path) -> Mapping[str, Any]:
    """What the checkpoint says about sampling; empty where it says nothing. Raises CheckpointError."""
    from localllm.models.strict_json import JsonLimits, read_json_object

    return read_json_object(path, JsonLimits()) if path.exists() else {}
