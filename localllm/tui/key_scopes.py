"""The parts of the program that have keys of their own, and the check of a user's keys and theme against them."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textual.binding import Binding
from textual.keys import KEY_NAME_REPLACEMENTS, Keys
from textual.widgets import TextArea

from localllm.config import ResolvedSettings, nearest_key, unknown_key
from localllm.errors import Fix, SettingsError
from localllm.toml_file import TomlFile
from localllm.tui.keys import EVERYWHERE
from localllm.tui.themes import THEMES

_MODIFIERS = ("ctrl", "alt", "shift", "super", "hyper", "meta")
_EVERYWHERE = "Everywhere"
_TOGETHER = frozenset({_EVERYWHERE, "Chat", "Writing", "A message"})  # scopes of one screen
_FIELD_KEYS = frozenset(
    key for binding in TextArea.BINDINGS if isinstance(binding, Binding) for key in binding.key.split(",")
)
_NAMED = frozenset(name for key in Keys for name in key.value.split("+"))


def key_scopes() -> Mapping[str, Sequence[Binding]]:
    """The bindings with an id, by the title under which the help shows them. Imports every screen."""
    from localllm.tui.screens.chat import ChatScreen
    from localllm.tui.screens.chats import ChatsScreen
    from localllm.tui.screens.dialogs import LineDialog
    from localllm.tui.screens.models import ModelsScreen
    from localllm.tui.screens.plan import PlanScreen
    from localllm.tui.widgets.composer import ComposerPanel
    from localllm.tui.widgets.message_view import MessageView

    bindings: dict[str, Sequence[Any]] = {
        _EVERYWHERE: EVERYWHERE,
        "Chat": ChatScreen.BINDINGS,
        "Writing": ComposerPanel.BINDINGS,
        "A message": MessageView.BINDINGS,
        "Chats": ChatsScreen.BINDINGS,
        "Asked for a line": LineDialog.BINDINGS,
        "Models": ModelsScreen.BINDINGS,
        "Plan": PlanScreen.BINDINGS,
    }
    return {
        title: [binding for binding in found if isinstance(binding, Binding) and binding.id is not None]
        for title, found in bindings.items()
    }


def checked_keys(resolved: ResolvedSettings) -> Mapping[str, str]:
    """The user's keys by a binding's id.

    Raises SettingsError for an unknown id or key, naming the nearest, and for a key that is another binding's.
    """
    keys = resolved.settings.keys
    if not keys:
        return keys
    bindings = {str(binding.id): (scope, binding) for scope, found in key_scopes().items() for binding in found}
    for name, pressed in keys.items():
        if name not in bindings:
            raise unknown_key(name, _where(resolved, name), list(bindings))
        for key in _split(pressed):
            if (why := _why_no_key(key, bindings[name][0])) is not None:
                what = f"the key of {name!r} is {pressed[:40]!r} in {_where(resolved, name)}"
                raise SettingsError(what, why=why, fix=f'"{name}" = "ctrl+y"')
    for name in keys:
        scope, by_default = bindings[name]
        for other, (other_scope, binding) in bindings.items():
            both = set(_split(by_default.key)) & set(_split(binding.key))  # esc stops an answer, and closes a notice
            shared = sorted((set(_split(keys[name])) & set(_split(keys.get(other, binding.key)))) - both)
            scopes = {scope, other_scope}
            are_together = len(scopes) == 1 or _EVERYWHERE in scopes or scopes <= _TOGETHER
            if other != name and shared and are_together:
                what = f"{shared[0]!r} is the key of two: {name!r} ({_where(resolved, name)}) and {other!r}"
                fix = f'another key for one of them: "{other}" = "ctrl+y"'
                raise SettingsError(what, why=f"{other} is {binding.description!r}", fix=fix)
    return {name: ",".join(_split(pressed)) for name, pressed in keys.items()}


def _split(pressed: str) -> list[str]:
    """The keys as Textual names them: F7 is f7."""
    return [
        "+".join(part.lower() if len(part) > 1 else part for part in key.strip().split("+"))
        for key in pressed.split(",")
    ]


def _why_no_key(key: str, scope: str) -> str | None:
    """Why this cannot be the key of a binding of the scope; None where it can."""
    *modifiers, last = key.split("+")
    if not key:
        return "a name is empty"
    if wrong := next((name for name in modifiers if name not in _MODIFIERS), None):
        return f"{wrong!r} is not one of {', '.join(_MODIFIERS)}"
    is_character = len(last) == 1 or last == "space" or _is_character(last)
    if not is_character and last not in _NAMED:
        nearest = difflib.get_close_matches(last, _NAMED, n=1, cutoff=0.0)[0]
        return f"there is no key {last[:40]!r}; the nearest is {nearest!r}"
    if scope == _EVERYWHERE and key in _FIELD_KEYS:
        return f"{key!r} is the key of a text field"
    if not modifiers and is_character and scope in _TOGETHER - {"A message"}:
        return f"{key!r} is written in messages"
    return None


def _is_character(name: str) -> bool:
    """Return whether it is the Unicode name of a character: "question_mark"."""
    originals = {short: long for long, short in KEY_NAME_REPLACEMENTS.items()}
    try:
        return unicodedata.lookup(originals.get(name, name).replace("_", " ")).isprintable()
    except KeyError:
        return name == "minus"


def checked_theme(resolved: ResolvedSettings) -> str | None:
    """The theme; None where it follows the terminal. Raises SettingsError for an unknown one, naming the nearest."""
    name, where = resolved.settings.theme, resolved.origins["theme"].where
    if name == "auto":
        return None
    if name not in THEMES:
        fix = Fix.command("config", "set", "theme", nearest_theme(name))
        why = unknown_key(name, where, ["auto", *THEMES]).why
        raise SettingsError(f"there is no theme {name[:80]!r} ({where})", why=why, fix=fix)
    return THEMES[name]


def nearest_theme(name: str) -> str:
    """Return the theme that a word names, or the one of the nearest name; the terminal's where none is near."""
    return name if name in ("auto", *THEMES) else nearest_key(name, ["auto", *THEMES]) or "auto"


def _where(resolved: ResolvedSettings, name: str) -> str:
    """Where the key was set: the line of the file, or the variable."""
    origin = resolved.origins["keys"]
    if origin.kind != "file":
        return origin.where
    file = TomlFile.read(Path(origin.where.rpartition(":")[0]))
    is_quoted = name in file.data.get("keys", {})
    return file.where("keys", *([name] if is_quoted else name.split(".")))
