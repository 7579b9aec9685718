"""Which model a command works with, where its files are, and what the settings say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.options import SAMPLING_SETTING_NAMES, extra_sampling, setting_flags
from localllm.config import ResolvedSettings, Settings, load_settings

if TYPE_CHECKING:
    from localllm.engine.request import SamplingParams
    from localllm.hub import ModelFiles


@dataclass(frozen=True)
class Selection:
    """A model on this disk, and the settings with the model's own defaults filled in."""

    files: ModelFiles
    resolved: ResolvedSettings

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    def sampling(self, flags: Mapping[str, Any]) -> SamplingParams:
        """How tokens are drawn: the settings, and the flags that are no settings. Raises UsageError."""
        from localllm.engine.request import SamplingParams

        chosen = {name: getattr(self.settings, name) for name in SAMPLING_SETTING_NAMES}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams(**chosen, **extra_sampling(flags))


def select(word: str | None, flags: Mapping[str, Any]) -> Selection:
    """The model `word`, or the one that the settings name, and the settings under these flags.

    Raises ModelNotFoundError, SettingsError, CheckpointError. Uses no network.
    """
    from localllm.registry import with_model_defaults

    selection = _located(word, flags, needs_config=True)
    path = selection.files.directory / "generation_config.json"
    resolved = with_model_defaults(selection.resolved, selection.files.entry, _generation_config(path), str(path))
    return Selection(selection.files, resolved)


def select_text_only(word: str | None, flags: Mapping[str, Any]) -> Selection:
    """As `select`, for what needs a tokenizer and a template but no model: a folder with only those will do."""
    return _located(word, flags, needs_config=False)


def _located(word: str | None, flags: Mapping[str, Any], *, needs_config: bool) -> Selection:
    from localllm import hub

    resolved = load_settings(setting_flags(flags))
    settings = resolved.settings
    files = hub.locate(word or settings.model, offline=settings.offline, needs_config=needs_config)
    return Selection(files, resolved)


def _generation_config(path: Path) -> Mapping[str, Any]:
    """What the checkpoint says about sampling; empty where it says nothing. Raises CheckpointError."""
    from localllm.models.strict_json import JsonLimits, read_json_object

    return read_json_object(path, JsonLimits()) if path.exists() else {}
