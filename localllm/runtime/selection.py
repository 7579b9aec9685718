"""The model that is worked with: its files, and its settings. Here a word becomes both, a preset's name among them."""

from __future__ import annotations

import contextlib
import difflib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localllm.config import DEFAULT, ResolvedSettings
from localllm.errors import BugError, Fix, LocalLLMError, ModelNotFoundError, UnsupportedModelError
from localllm.registry import BUILT_IN, SAMPLING_KEYS, with_model_defaults
from localllm.runtime.error_origins import named, with_origins
from localllm.runtime.presets import Preset, choose, is_preset, preset_names
from localllm.settings import SamplingSettings, Settings

if TYPE_CHECKING:
    from localllm.engine.request import AdapterRef, SamplingParams
    from localllm.hub import ModelFiles
    from localllm.hub.adapters import AdapterFiles
    from localllm.registry import ModelEntry

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Selection:
    """A model on this disk, and the settings with the model's own defaults filled in.

    preset: by whose name it was chosen, and whose settings are among these.
    """

    files: ModelFiles
    resolved: ResolvedSettings
    preset: Preset | None = None

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

    @property
    def word(self) -> str:
        """What was named: the preset, or the model."""
        return self.preset.name if self.preset is not None else self.model_name

    def adapters(self) -> tuple[AdapterRef, ...]:
        """Return the adapters that answers are computed with. Raises as `adapter_files`."""
        if not self.settings.adapter:
            return ()
        from localllm.engine.request import AdapterRef

        return tuple(AdapterRef(str(files.path), scale, files.name) for files, scale in self.adapter_files())

    def adapter_files(self) -> list[tuple[AdapterFiles, float]]:
        """Return the adapters that the settings name, each with its scale. Uses no network. Raises AdapterError,
        UsageError."""
        from localllm.hub.adapters import locate_adapter, split_scale

        pairs = map(split_scale, self.settings.adapter)
        return [(locate_adapter(name, offline=self.settings.offline), scale) for name, scale in pairs]

    def sampling(self, extra: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the sampling parameters: the settings and `extra`, with a random seed where none is set.

        Raises UsageError.
        """
        from localllm.engine.request import SamplingParams

        chosen = {each.name: getattr(self.settings, each.name) for each in fields(SamplingSettings)}
        chosen = {"seed": secrets.randbits(31)} | {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams(**chosen, **extra)


def selected(resolved: ResolvedSettings, word: str | None) -> Selection:
    """The model `word`, or the one that the settings name, and what it or its preset adds to these settings. Uses no
    network. Raises ModelNotFoundError, SettingsError, CheckpointError."""
    chosen, preset = choose(resolved, word)
    return replace(with_defaults(chosen, locate(chosen)), preset=preset)


def locate(resolved: ResolvedSettings, *, needs_config: bool = True) -> ModelFiles:
    """The files of the model that the settings name. Uses no network.

    needs_config: as `hub.locate` has it. Raises ModelNotFoundError.
    """
    from localllm import hub

    settings = resolved.settings
    try:
        return hub.locate(settings.model, offline=settings.offline, needs_config=needs_config)
    except ModelNotFoundError as error:
        origin = resolved.origins["model"]
        if origin.kind not in ("default", "flag"):
            error.why = f"the setting `model` in {origin.where} names it; {error.why}"
            if not any(fix.runs("pull") for fix in error.fixes):
                error.fix = f"write another name there, or on the line: localllm run {BUILT_IN} -p TEXT"
        if near := difflib.get_close_matches(settings.model, preset_names(), n=1):
            error.fix = [Fix.model(settings.model, near[0]), *error.fixes]
        raise


def within_context(selection: Selection, note: Callable[[str], None]) -> Selection:
    """Return it with its own context where the one that is asked for is longer than the model takes."""
    from localllm.models.families import load_config

    with contextlib.suppress(LocalLLMError):  # of which its load tells
        longest, asked = load_config(selection.files.directory).longest_context, selection.settings.ctx
        if asked is not None and asked > longest:
            note(f"{selection.model_name} takes {longest} tokens of context, not {asked}")
            return replace(selection, resolved=selection.resolved.overlaid({"ctx": (None, DEFAULT)}))
    return selection


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
    """Return whether the word names a model: a preset, one of the registry, ORG/REPOSITORY, or a folder."""
    from localllm.hub.names import understand
    from localllm.registry import load_registry

    if is_preset(word):
        return True
    try:
        understand(word, load_registry())
    except ModelNotFoundError:
        return False
    return True


def with_defaults(resolved: ResolvedSettings, files: ModelFiles) -> Selection:
    """The model with what it recommends where the settings say nothing. Raises CheckpointError."""
    return Selection(files, _with_model_defaults(resolved, files.entry, files))


def renewed(selection: Selection, files: ModelFiles) -> Selection:
    """The same with what the model's files recommend now. Raises CheckpointError."""
    old = [name for name, origin in selection.resolved.origins.items() if origin.kind in ("registry", "checkpoint")]
    unset = {name: (getattr(Settings(), name), DEFAULT) for name in old}
    return replace(with_defaults(selection.resolved.overlaid(unset), files), preset=selection.preset)


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
