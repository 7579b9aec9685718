"""The model that is worked with: its files, and its settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localllm.config import ResolvedSettings
from localllm.errors import BugError, LocalLLMError, ModelNotFoundError, UnsupportedModelError
from localllm.registry import BUILT_IN, SAMPLING_KEYS, with_model_defaults
from localllm.runtime.error_origins import with_origins
from localllm.settings import SamplingSettings, Settings

if TYPE_CHECKING:
    from localllm.engine.request import SamplingParams
    from localllm.hub import ModelFiles
    from localllm.registry import ModelEntry

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


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
        """True where nothing of the conversation may be saved."""
        return self.settings.private

    @property
    def model_name(self) -> str:
        """A name under which the model is found again, from any folder."""
        is_folder = self.files.repo is None and self.files.gguf is None and self.files.name != BUILT_IN
        return str(self.files.directory.absolute()) if is_folder else self.files.name

    def sampling(self, extra: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the sampling parameters: the settings and `extra`, with a random seed where none is set.

        Raises UsageError.
        """
        from localllm.engine.request import SamplingParams

        chosen = {each.name: getattr(self.settings, each.name) for each in fields(SamplingSettings)}
        chosen = {"seed": secrets.randbits(31)} | {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams(**chosen, **extra)


def locate(resolved: ResolvedSettings, word: str | None, *, needs_config: bool = True) -> ModelFiles:
    """The files of the model `word`, or of the one that the settings name. Uses no network.

    needs_config: as `hub.locate` has it. Raises ModelNotFoundError.
    """
    from localllm import hub

    settings = resolved.settings
    try:
        return hub.locate(settings.model if word is None else word, offline=settings.offline, needs_config=needs_config)
    except ModelNotFoundError as error:
        origin = resolved.origins["model"]
        if word is None and origin.kind != "default":
            error.why = f"the setting `model` in {origin.where} names it; {error.why}"
            if not any(fix.runs("pull") for fix in error.fixes):
                error.fix = f"write another name there, or on the line: localllm run {BUILT_IN} -p TEXT"
        raise


def require_weights(files: ModelFiles) -> None:
    """Raise UnsupportedModelError where a folder of the user's has a config.json and no weights that are read."""
    folder = files.directory
    if files.gguf is not None or files.repo is not None or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for suffix in _PICKLES for path in folder.glob(f"*{suffix}"))
    if pickles:
        what, why = f"the weights of {folder} are pickles", f"{pickles[0]} could run code when it is read, so it is not"
    else:
        what, why = f"{folder} has no weights", "it has a config.json, and no .safetensors and no .gguf file"
    raise UnsupportedModelError(what, why=why, fix="copy the model's .safetensors files, or a .gguf file, into it")


def is_model(word: str) -> bool:
    """Return whether the word names a model: one of the registry, ORG/REPOSITORY, or a folder that is there."""
    from localllm.hub.names import understand
    from localllm.registry import load_registry

    try:
        understand(word, load_registry())
    except ModelNotFoundError:
        return False
    return True


def with_defaults(resolved: ResolvedSettings, files: ModelFiles) -> Selection:
    """The model with what it recommends where the settings say nothing. Raises CheckpointError."""
    return Selection(files, _with_model_defaults(resolved, files.entry, files))


def named(error: LocalLLMError, files: ModelFiles | None) -> LocalLLMError:
    """The error with the model's name where its fix says MODEL. What was not fetched cannot be fetched anew."""
    if files is None:
        return error
    copy = "reinstall localllm" if files.name == BUILT_IN else files.copied_anew
    error.fix = [
        copy if fix.kind == "refetch" and files.repo is None else fix.with_model(files.name) for fix in error.fixes
    ]
    return error


def told_of(error: Exception, files: ModelFiles | None, resolved: ResolvedSettings) -> LocalLLMError:
    """The error with the model's name and the places of its settings, as it is shown to the user."""
    if not isinstance(error, LocalLLMError):
        return BugError(f"this is a bug in localllm: {type(error).__name__}", why=str(error))
    error = named(error, files)
    with_origins(error, resolved)
    return error


def sampling_defaults(entry: ModelEntry | None, files: ModelFiles | None) -> dict[str, float]:
    """Return what the registry and a checkpoint on this disk recommend. Raises CheckpointError."""
    settings = _with_model_defaults(ResolvedSettings(), entry, files).settings
    values = {name: getattr(settings, name) for name in SAMPLING_KEYS}
    return {name: value for name, value in values.items() if value is not None}


def _with_model_defaults(
    resolved: ResolvedSettings, entry: ModelEntry | None, files: ModelFiles | None
) -> ResolvedSettings:
    from localllm.models.strict_json import JsonLimits, read_json_object

    path = files.directory / "generation_config.json" if files else None
    recommended = read_json_object(path, JsonLimits()) if path is not None and path.exists() else {}
    return with_model_defaults(resolved, entry, recommended, str(path))
