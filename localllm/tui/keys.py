"""The keys that work on every screen, and the names of keys in hints. Knows no screens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from textual.binding import Binding
from textual.keys import format_key

EVERYWHERE = [
    Binding("f1,question_mark", "help", "help", id="app.help", show=False),
    Binding("f2", "plan", "plan", id="app.plan"),
    Binding("f3", "models", "models", id="app.models"),
    Binding("f4", "chats", "chats", id="app.chats"),
    Binding("ctrl+q", "leave", "quit", id="app.leave", show=False, priority=True),
]
# The keys that hints name, by a binding's id: hints name screens that were never imported.
DEFAULTS: Mapping[str, str] = {
    **{str(binding.id): binding.key for binding in EVERYWHERE},
    "chat.stop": "escape",
    "chat.close": "escape",
    "chat.earlier": "ctrl+up",
    "chat.new": "ctrl+n",
    "chat.list": "ctrl+s",
    "chat.latest": "ctrl+o",
    "chat.regenerate": "f5",
    "chat.continue": "f6",
    "chat.code": "f7",
    "composer.send": "enter",
    "composer.newline": "shift+enter,alt+enter,ctrl+j",
    "composer.find": "ctrl+r",
    "message.edit": "e",
    "chats.undo": "u",
    "models.pull": "p",
    "plan.apply": "enter,a",
}


@dataclass(frozen=True)
class KeyNames:
    """own: the user's keys, by a binding's id; several of one are separated by commas."""

    own: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        """The first key of a binding, as `F6` or `ctrl+y`. Raises KeyError for one that no hint names."""
        *modifiers, key = self.own.get(name, DEFAULTS[name]).split(",")[0].split("+")
        if key[0] == "f" and key[1:].isdecimal():
            key = key.upper()
        return "+".join([*modifiers, key if key == "enter" else format_key(key)])
