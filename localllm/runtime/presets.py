"""Presets: a model, a system message and settings under one name. Each is a TOML file that may be edited by hand."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from localllm.config import Origin, ResolvedSettings, accepted, shown_setting, unknown_key, user_directories
from localllm.errors import Fix, ModelNotFoundError, SettingsError, UsageError
from localllm.present import is_there
from localllm.registry import BUILT_IN, load_registry
from localllm.settings import SETTINGS, EngineConfig
from localllm.toml_file import TomlFile

# What is about a machine or a user, not about the answers of a model, stays in config.toml.
PRESET_SETTINGS = tuple(
    name for name in SETTINGS if name not in ("offline", "private", "show_thoughts", "theme", "keys")
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII | re.IGNORECASE)
_TAG = ":latest"  # Ollama's, of any name without another


@dataclass(frozen=True)
class Preset:
    """values: by setting; `model` is among them. origins: the line of each."""

    name: str
    path: Path
    values: Mapping[str, Any]
    origins: Mapping[str, Origin]

    @property
    def model(self) -> str:
        return str(self.values["model"])

    def over(self, resolved: ResolvedSettings, names: Mapping[str, Any] = SETTINGS) -> ResolvedSettings:
        """Return the settings with the preset's in place of all but those that were typed. names: of those it sets."""
        return resolved.overlaid(
            {
                name: (value, self.origins[name])
                for name, value in self.values.items()
                if name in names and (resolved.origins[name].kind != "flag" or name == "model")
            }
        )

    def shown(self) -> dict[str, str]:
        """Return the settings but for the model, for a person."""
        return {name: _shown(name, value) for name, value in self.values.items() if name != "model"}


def presets_folder() -> Path:
    return user_directories().config / "presets"


def preset_names() -> list[str]:
    """Return the names of all presets, in order; whether their files can be read is not looked at."""
    return sorted(_files().values(), key=str.casefold)


def is_preset(word: str) -> bool:
    return _file(word) is not None


def find_preset(name: str) -> Preset | None:
    """Return the preset of that name, in letters of either case; None where there is none. Raises SettingsError for a
    file that cannot be understood, or has the name of a model."""
    path = _file(name)
    if path is None:
        return None
    if reason := _refusal(path.stem):
        fix = f"mv {shlex.quote(str(path))} {shlex.quote(str(path.with_stem(f'my-{path.stem}')))}"
        raise SettingsError(f"{path} cannot be used", why=reason, fix=fix)
    return _read(path)


def get_preset(name: str) -> Preset:
    """Return the preset of that name. Raises ModelNotFoundError where there is none, and as `find_preset`."""
    found = find_preset(name)
    if found is None:
        raise _absent(name)
    return found


def delete_preset(name: str) -> None:
    """Delete a preset, also one that cannot be understood. Raises ModelNotFoundError where there is none, SettingsError
    where it cannot be deleted."""
    path = _file(name)
    if path is None:
        raise _absent(name)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error, "deleted") from None


def choose(resolved: ResolvedSettings, word: str | None) -> tuple[ResolvedSettings, Preset | None]:
    """Return the settings for `word`, and its preset if it names one. Without a word the setting `model` is looked up.

    Of the settings, `model` then names the model itself. A flag beats the preset, which beats variables and files.
    """
    preset = find_preset(resolved.settings.model if word is None else word)
    if preset is not None:
        return preset.over(resolved), preset
    return resolved if word is None else resolved.overlaid({"model": (word, Origin("flag", "MODEL"))}), None


def model_of(word: str) -> str:
    """Return the model that a word names: a preset's, or itself."""
    preset = find_preset(word)
    return word if preset is None else preset.model


def save_preset(name: str, values: Mapping[str, Any], *, replaces: bool) -> Path:
    """Write a preset of these settings, `model` among them; those that are None, or empty texts, are left out. Returns
    its file.

    replaces: also where there is one of that name. Raises UsageError for a name that cannot be used or is taken, and
    for settings that contradict each other; SettingsError where the file cannot be written.
    """
    from localllm.engine.model_options import require_agreement

    name = name.removesuffix(_TAG)
    if reason := _refusal(name):
        raise UsageError(f"a preset cannot be called {name[:80]!r}", why=reason, fix=Fix.command("preset", "list"))
    there = _file(name)
    if there is not None and not replaces:
        why = f"it is in {there}"
        raise UsageError(f"there is a preset {there.stem!r} already", why=why, fix=Fix.flag("--replace"))
    path = there or presets_folder() / f"{name}.toml"
    given = {key.name: values[key.name] for key in fields(EngineConfig) if values.get(key.name) is not None}
    require_agreement(EngineConfig(**given))
    lines = [f"{key} = {_toml(key, values[key])}\n" for key in PRESET_SETTINGS if values.get(key) not in (None, (), "")]
    from localllm.whole_file import write_whole

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, "".join(lines))
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def based_on(word: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a new preset of the model `word`. If `word` is a preset, these replace its settings.

    A folder or a file stands there by its whole path. Raises ModelNotFoundError for an unknown name.
    """
    base = find_preset(word)
    if base is not None:
        return {**base.values, **values}
    return {"model": _lasting_name(word), **values}


def _lasting_name(word: str) -> str:
    """Return a name by which the model is found from any folder; where only Ollama has one of this name here, that is
    meant."""
    from localllm import hub
    from localllm.hub.names import OLLAMA, understand
    from localllm.hub.stores import names_in_stores

    registry = load_registry()
    try:
        hub.locate(word, registry=registry)
    except ModelNotFoundError as absent:
        kept = [name for name in names_in_stores(word) if name.startswith(f"{OLLAMA}:")]
        if len(kept) == 1:
            return kept[0]
        try:
            understand(word, registry)
        except ModelNotFoundError:
            raise absent from None
    reference = understand(word, registry)
    is_folder = reference.directory is not None and reference.name != BUILT_IN
    return str(reference.place) if is_folder else reference.name


def _refusal(name: str) -> str:
    """Return why a preset cannot have this name; "" where it can."""
    if not _NAME.fullmatch(name):
        return (
            "it must be 1 to 64 letters, digits, dots, dashes or underscores, the first and the last a letter or digit"
        )
    if name.casefold().endswith(".gguf"):
        return "it would be taken for a file"
    if name.casefold() == BUILT_IN or load_registry().find(name) is not None:
        return "it is a model's name, and a preset may not hide a model"
    return ""


def _absent(name: str) -> ModelNotFoundError:
    names = preset_names()
    why = f"known are {', '.join(names)}" if names else "none has been saved"
    fix = Fix.command("preset", "list") if names else Fix.command("preset", "save", "NAME", "--system", "TEXT")
    return ModelNotFoundError(f"there is no preset {name[:80]!r}", why=why, fix=fix)


def _file(name: str) -> Path | None:
    """Return the file of the preset of that name; None where there is none."""
    wanted = name.removesuffix(_TAG).casefold()
    return next((path for path, stem in _files().items() if stem.casefold() == wanted), None)


def _files() -> dict[Path, str]:
    """The files of all presets, and their names."""
    with contextlib.suppress(OSError):
        return {
            path: path.stem for path in presets_folder().iterdir() if path.suffix == ".toml" and path.stem[0] != "."
        }
    return {}


def _read(path: Path) -> Preset:
    file = TomlFile.read(path)
    if not file.data and not is_there(path):  # it has just gone
        raise SettingsError(f"{path} is gone", why="it was there a moment ago")
    values, origins = {}, {}
    for key, value in file.data.items():
        where = file.where(key)
        if key not in PRESET_SETTINGS:
            raise unknown_key(key, where, PRESET_SETTINGS)
        values[key], origins[key] = accepted(key, value, where), Origin("preset", where)
    if "model" not in values:
        raise SettingsError(f"{path} names no model", why="a preset is of one", fix=f'add model = "{BUILT_IN}" there')
    return Preset(path.stem, path, values, origins)


def _unwritable(path: Path, error: OSError, verb: str = "written") -> SettingsError:
    why = error.strerror or str(error)
    return SettingsError(f"{path} cannot be {verb}", why=why, fix=f"ls -ld {shlex.quote(str(path.parent))}")


# As TOML has it


def _toml(key: str, value: Any) -> str:
    """The value of a setting as it is accepted in a file."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    if SETTINGS[key].accepts.kind.startswith("bytes"):
        return _quoted(_amount(value))
    if isinstance(value, str) and "\n" in value:
        return '"""\n' + "\n".join(_quoted(line)[1:-1] for line in value.split("\n")) + '"""'
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _shown(key: str, value: Any) -> str:
    return _amount(value) if SETTINGS[key].accepts.kind.startswith("bytes") else shown_setting(value)


def _amount(count: int) -> str:
    """An amount of memory without loss: "8GiB", "7812500KiB"; 0 is "off"."""
    if not count:
        return "off"
    unit = next((unit for unit in (3, 2) if count % (1 << 10 * unit) == 0), 1)
    return f"{count >> 10 * unit}{' KMG'[unit]}iB"


def _quoted(text: str) -> str:
    """A text as TOML has it, which is as JSON has it but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
