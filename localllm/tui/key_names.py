"""What a hint calls a key: as the user has set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from textual.keys import format_key

# Of the bindings that hints name, by their ids. Here beside the bindings, as those of a screen come with its import,
# and hints name screens that were never opened.
DEFAULTS: Mapping[str, str] = {
    "app.help": "f1",
    "app.plan": "f2",
    "app.models": "f3",
    "app.chats": "f4",
    "chat.stop": "escape",
    "chat.close": "escape",
    "chat.earlier": "ctrl+up",
    "chat.regenerate": "f5",
    "chat.continue": "f6",
    "composer.send": "enter",
    "composer.find": "ctrl+r",
    "message.edit": "e",
    "chats.undo": "u",
    "models.pull": "p",
}


@dataclass(frozen=True)
class KeyNames:
    """own: the user's keys, by a binding's id, several of one with commas between."""

    own: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        """The first key of a binding, as `F6` or `ctrl+y`. Raises KeyError for one that no hint names."""
        *modifiers, key = self.own.get(name, DEFAULTS[name]).split(",")[0].split("+")
        if key[0] == "f" and key[1:].isdecimal():
            key = key.upper()
        return "+".join([*modifiers, key if key == "enter" else format_key(key)])
