"""The user's config.toml as `config set` and `config unset` change it: its comments and its order stay."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.chat.text_file import replace_file
from localllm.config import flat_table, nearest_key, unknown_key, user_directories
from localllm.errors import Fix, SettingsError
from localllm.settings import SETTINGS
from localllm.toml_file import TomlFile


def settings_path() -> Path:
    return user_directories().config / "config.toml"


@dataclass(frozen=True)
class SettingName:
    """A setting, or one entry of a setting that is a table: `keys.chat.stop` is `chat.stop` of `keys`."""

    key: str
    entry: str = ""

    @classmethod
    def of(cls, word: str) -> SettingName:
        """Return what a word names, with hyphens or capitals too. Raises SettingsError with the nearest one."""
        key, _, entry = word.strip().partition(".")
        key = key.replace("-", "_").lower()
        if key not in SETTINGS:
            nearest = nearest_key(word, SETTINGS)
            fix = Fix.word(word, nearest) if nearest else Fix.command("config", "show")
            raise unknown_key(word, "this command", SETTINGS, fix=fix)
        is_table = SETTINGS[key].accepts.kind == "table"
        if is_table and not entry:
            why = f"{key} is a table, of which this command changes one entry"
            raise SettingsError(f"{key} names no entry", why=why, fix=f"write {key}.NAME, such as keys.chat.stop")
        if entry and not is_table:
            raise SettingsError(f"{key} has no entry {entry[:40]!r}", why="it is one value", fix=f"write {key} alone")
        return cls(key, entry)

    def __str__(self) -> str:
        return f"{self.key}.{self.entry}" if self.entry else self.key

    def value_in(self, data: Mapping[str, Any]) -> Any:
        """Return what a parsed file has for it; None where it has nothing."""
        value = data.get(self.key)
        if not self.entry:
            return value
        return flat_table(value, "config.toml").get(self.entry) if isinstance(value, Mapping) else None


def write_setting(name: SettingName, value: Any) -> Any:
    """Write a value that the setting accepts into the file, and return what was there; None: nothing.

    Raises SettingsError where the file is not TOML, and UsageError where it cannot be written.
    """
    import tomlkit

    file = TomlFile.read(settings_path())
    before = name.value_in(file.data)
    if name.key not in file.data and not name.entry:
        _write(file.path, _with_line(file.text, f"{name.key} = {tomlkit.item(value).as_string()}"))
        return before
    document = tomlkit.parse(file.text)
    if not name.entry:
        document[name.key] = value
    else:
        table: Any = document.setdefault(name.key, tomlkit.table())
        if name.entry not in table:
            _remove(table, name.entry)  # as it may be written without quotes
        table[name.entry] = value
    _write(file.path, tomlkit.dumps(document))
    return before


def remove_setting(word: str) -> tuple[str, Any]:
    """Take a key out of the file, one too that is no setting. Return its name and its value; None: it was not there.

    Raises SettingsError for a key that is neither a setting nor in the file, and as `write_setting` does.
    """
    import tomlkit

    file = TomlFile.read(settings_path())
    name = SettingName(word) if word in file.data else SettingName.of(word)
    before = name.value_in(file.data)
    if before is not None:
        document = tomlkit.parse(file.text)
        if name.entry:
            _remove(document[name.key], name.entry)
        if not name.entry or not document[name.key]:
            del document[name.key]
        _write(file.path, tomlkit.dumps(document))
    return str(name), before


def _remove(table: Any, name: str) -> None:
    """Remove an entry, whether its name is written in quotes or as tables in tables."""
    if name in table:
        del table[name]
        return
    first, _, rest = name.partition(".")
    if rest and isinstance(inner := table.get(first), Mapping):
        _remove(inner, rest)
        if not inner:
            del table[first]


def _with_line(text: str, line: str) -> str:
    """Return the file with a line behind the last key that is in no table, so that comments stay with what follows."""
    lines = text.splitlines(keepends=True)
    end = len(lines)
    for number, content in enumerate(lines):
        if content.lstrip().startswith("["):
            with suppress(tomllib.TOMLDecodeError):  # the middle of an array
                tomllib.loads("".join(lines[:number]))
                end = number
                break
    while end < len(lines) and end > 0 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    head = "".join(lines[:end])
    separator = "" if not head or head.endswith("\n") else "\n"
    return f"{head}{separator}{line}\n{''.join(lines[end:])}"


def _write(path: Path, text: str) -> None:
    path = path.resolve()  # it may be a link into a folder of such files
    with suppress(OSError):  # the write tells
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, text)
