"""The help: what the status line says at present and the keys that matter most, then every key and command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localllm.tui.commands import COMMANDS
from localllm.tui.keys import KeyNames
from localllm.tui.screens.dialogs import Dialog
from localllm.tui.widgets.status import StatusPart

_COLUMN = 26
_PAIR = 39  # columns of a key and its word, where two are side by side
_MOST_STATUS = 24  # columns of a part of the status line before its meaning; one that is longer pushes that
_MAIN_KEYS = {  # by a binding's id
    "composer.send": "send", "composer.newline": "new line", "chat.stop": "stop the answer",
    "chat.regenerate": "answer anew", "chat.continue": "continue the answer", "chat.code": "copy code by its number",
    "chat.earlier": "choose a message", "chat.new": "new chat", "chat.latest": "the latest other chat",
    "chat.list": "chats beside this one", "app.plan": "plan: memory and speed", "app.models": "models",
    "app.chats": "all chats, search", "app.leave": "quit",
}  # fmt: skip
_UNBOUND = {  # keys of a text field, which no config.toml changes
    "Writing": [
        ("up, down", "what was asked before, from the first and the last line on"),
        ("tab", "complete a command"),
    ],
    "Chat": [("esc, esc", "close what is open, and back to the writing"), ("ctrl+p", "search all commands by name")],
}
_OPENED_BY = {"A message": "chat.earlier", "Chats": "app.chats", "Models": "app.models", "Plan": "app.plan"}


class HelpScreen(Dialog, inherit_bindings=False):
    VERTICAL_BREAKPOINTS = [(0, "-low"), (40, "-high")]
    BINDINGS = [
        Binding("escape,q", "close", "close"),
        Binding("f1,question_mark", "close", "close", id="app.help"),  # whichever key opened it
    ]

    def __init__(
        self, scopes: Mapping[str, Sequence[Binding]], keymap: Mapping[str, str], status: Sequence[StatusPart]
    ) -> None:
        """scopes: the bindings by their title. keymap: the user's keys by a binding's id. status: the line's parts."""
        super().__init__()
        self._scopes = scopes
        self._keymap = keymap
        self._status = status

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "help"
            box.border_subtitle = "page down: every key and command    esc: close"
            yield Static(Content("\n").join(self._first_page()), id="first")
            yield Static(Content("\n").join([*self._keys(), *_commands()]))

    def _first_page(self) -> Iterator[Content]:
        yield Content.styled("On the status line now", "bold")
        lengths = [part.shown.cell_length for part in self._status]
        width = max((length for length in lengths if length <= _MOST_STATUS), default=0)
        for part, length in zip(self._status, lengths, strict=True):
            shown = part.shown.pad_right(max(0, width - length))
            yield shown + Content.styled(f"  {part.meaning}", "$foreground-muted")
        yield Content()
        yield Content.styled("Keys", "bold") + Content("    / lists the commands")
        key_names = KeyNames(self._keymap)
        pairs = [_key(key_names[name], 13) + Content(word) for name, word in _MAIN_KEYS.items()]
        half = -(-len(pairs) // 2)
        for number in range(half):
            left = pairs[number].truncate(_PAIR, pad=True)
            yield left + pairs[number + half] if number + half < len(pairs) else left

    def _keys(self) -> Iterator[Content]:
        yield Content.styled("In parentheses: the name of a key under [keys] in config.toml.", "$foreground-muted")
        key_names = KeyNames(self._keymap)
        for title, bindings in self._scopes.items():
            opened_by = f" ({key_names[_OPENED_BY[title]]})" if title in _OPENED_BY else ""
            yield Content.styled(f"{title}{opened_by}", "bold")
            for binding in bindings:
                keys = self._keymap.get(str(binding.id), binding.key).split(",")
                shown = ", ".join(self.app.get_key_display(binding.with_key(key.strip())) for key in keys)
                name = Content.styled(f"  ({binding.id})", "$foreground-muted")
                yield _key(shown) + Content(binding.description) + name
            for pressed, what in _UNBOUND.get(title, ()):
                yield _key(pressed) + Content(what)
            yield Content()


def _commands() -> Iterator[Content]:
    yield Content.styled("Commands", "bold")
    for name, command in COMMANDS.items():
        yield _key(f"/{name} {command.parameters}") + Content(command.summary)


def _key(text: str, columns: int = _COLUMN) -> Content:
    return Content.styled(text.ljust(columns), "$text-accent")
