"""The theme and the keys of a user's config.toml, checked against those that there are."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from textual.binding import Binding
from textual.keys import KEY_NAME_REPLACEMENTS, Keys
from textual.theme import BUILTIN_THEMES
from textual.widgets import TextArea

from localllm.config import ResolvedSettings, unknown_key
from localllm.errors import SettingsError
from localllm.toml_file import TomlFile

_MODIFIERS = ("ctrl", "alt", "shift", "super", "hyper", "meta")
_EVERYWHERE = "Everywhere"
_TOGETHER = frozenset({_EVERYWHERE, "Chat", "Writing", "A message"})  # rooms of one screen
_FIELD_KEYS = frozenset(
    key for binding in TextArea.BINDINGS if isinstance(binding, Binding) for key in binding.key.split(",")
)
_NAMED = frozenset(name for key in Keys for name in key.value.split("+"))


def checked_keys(resolved: ResolvedSettings) -> Mapping[str, str]:
    """The keys by a binding's id. Raises SettingsError, naming the nearest, for an id or a key that there is not, and
    for one that does something else already."""
    keys = resolved.settings.keys
    if not keys:
        return keys
    bindings = _bindings()
    for name, pressed in keys.items():
        if name not in bindings:
            raise unknown_key(name, _where(resolved, name), list(bindings))
        for key in _keys_of(pressed):
            if (why := _why_no_key(key, bindings[name][0])) is not None:
                what = f"the key of {name!r} is {pressed[:40]!r} in {_where(resolved, name)}"
                raise SettingsError(what, why=why, fix=f'"{name}" = "ctrl+y"')
    for name in keys:
        _check_is_free(name, keys, resolved)
    return {name: ",".join(_keys_of(pressed)) for name, pressed in keys.items()}


def _check_is_free(name: str, keys: Mapping[str, str], resolved: ResolvedSettings) -> None:
    """Raises SettingsError where one of its keys is another's on the same screen."""
    bindings = _bindings()
    room, by_default = bindings[name]
    own = set(_keys_of(keys[name]))
    for other, (other_room, binding) in bindings.items():
        both = set(_keys_of(by_default.key)) & set(_keys_of(binding.key))  # esc stops an answer, and closes a notice
        shared = sorted((own & set(_keys_of(keys.get(other, binding.key)))) - both)
        if other != name and shared and _meet(room, other_room):
            what = f"{shared[0]!r} is the key of two: {name!r} ({_where(resolved, name)}) and {other!r}"
            why = f"{other} is {binding.description!r}"
            raise SettingsError(what, why=why, fix=f'another key for one of them: "{other}" = "ctrl+y"')


def _meet(one: str, other: str) -> bool:
    """Whether the keys of two rooms are waited for at once."""
    return one == other or _EVERYWHERE in (one, other) or {one, other} <= _TOGETHER


def _keys_of(pressed: str) -> list[str]:
    """As Textual names them: F7 is f7."""
    return ["+".join(map(_named, key.strip().split("+"))) for key in pressed.split(",")]


def _named(part: str) -> str:
    return part.lower() if len(part) > 1 else part


def _why_no_key(key: str, room: str) -> str | None:
    """Why this can be no key of a binding of the room; None where it can."""
    *modifiers, last = key.split("+")
    if not key:
        return "a name is empty"
    if wrong := next((name for name in modifiers if name not in _MODIFIERS), None):
        return f"{wrong!r} is not one of {', '.join(_MODIFIERS)}"
    if len(last) != 1 and last not in _NAMED and not _is_character(last):
        nearest = difflib.get_close_matches(last, _NAMED, n=1, cutoff=0.0)[0]
        return f"there is no key {last[:40]!r}; the nearest is {nearest!r}"
    if room == _EVERYWHERE and key in _FIELD_KEYS:
        return f"{key!r} is the key of a text field"
    is_written = not modifiers and (len(last) == 1 or last == "space" or _is_character(last))
    if is_written and room in _TOGETHER - {"A message"}:
        return f"{key!r} is written in messages"
    return None


def _is_character(name: str) -> bool:
    """Whether it is a sign by its name in Unicode: "question_mark"."""
    originals = {short: long for long, short in KEY_NAME_REPLACEMENTS.items()}
    try:
        return unicodedata.lookup(originals.get(name, name).replace("_", " ")).isprintable()
    except KeyError:
        return name == "minus"


def checked_theme(resolved: ResolvedSettings) -> str | None:
    """The theme; None where the terminal is to say. Raises SettingsError, naming the nearest, for one that there is
    not."""
    name, where = resolved.settings.theme, resolved.origins["theme"].where
    if name == "auto":
        return None
    if name not in BUILTIN_THEMES:
        error = unknown_key(name, where, ["auto", *BUILTIN_THEMES])
        raise SettingsError(f"there is no theme {name[:80]!r} ({where})", why=error.why, fix='theme = "auto"')
    return name


def _where(resolved: ResolvedSettings, name: str) -> str:
    """Where the key was set: the line of the file, or the variable."""
    origin = resolved.origins["keys"]
    if origin.kind != "file":
        return origin.where
    file = TomlFile.read(Path(origin.where.rpartition(":")[0]))
    is_quoted = name in file.data.get("keys", {})
    return file.where("keys", *([name] if is_quoted else name.split(".")))


def _bindings() -> Mapping[str, tuple[str, Binding]]:
    """All that have an id, each with the title of its room."""
    from localllm.tui.key_scopes import rooms

    return {
        binding.id: (title, binding)
        for title, room in rooms().items()
        for binding in room.BINDINGS
        if isinstance(binding, Binding) and binding.id is not None
    }
