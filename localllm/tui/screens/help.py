"""The keys and commands that work here, read from the bindings themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm.tui.commands import COMMANDS
from localllm.tui.key_names import KeyNames

_COLUMN = 26
_UNBOUND = {  # what a text field does by itself, which no config.toml changes
    "Writing": [
        ("up, down", "what was asked before, from the first and the last line on"),
        ("tab", "complete a command"),
    ],
    "Chat": [("esc, esc", "close what is open, and back to the writing")],
}
_OPENED_BY = {"A message": "chat.earlier", "Chats": "app.chats", "Models": "app.models", "Plan": "app.plan"}


class HelpScreen(ModalScreen[None]):
    CSS = """
    HelpScreen {
        align: center middle;
        & > VerticalScroll { width: 90%; max-width: 100; height: 90%; border: round $border; background: $surface; }
        & Static { padding: 0 1; }
    }
    """
    BINDINGS = [
        Binding("escape,q", "close", "close"),
        Binding("f1", "close", "close", id="app.help"),  # whichever key opened it
    ]

    def __init__(self, rooms: Mapping[str, type[DOMNode]], keymap: Mapping[str, str]) -> None:
        """rooms: what has keys, by the title under which they are told. keymap: the user's own, by a binding's id."""
        super().__init__()
        self._rooms = rooms
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "help"
            box.border_subtitle = "esc closes"
            hint = "In brackets: what a key is called under [keys] in config.toml."
            yield Static(Content("\n").join([Content.styled(hint, "$foreground-muted"), *self._keys(), *_commands()]))

    def _keys(self) -> Iterator[Content]:
        key_names = KeyNames(self._keymap)
        for title, room in self._rooms.items():
            opened_by = f" ({key_names[_OPENED_BY[title]]})" if title in _OPENED_BY else ""
            yield Content.styled(f"{title}{opened_by}", "bold")
            for binding in room.BINDINGS:
                if isinstance(binding, Binding) and binding.id is not None:
                    keys = self._keymap.get(binding.id, binding.key).split(",")
                    shown = ", ".join(self.app.get_key_display(binding.with_key(key.strip())) for key in keys)
                    name = Content.styled(f"  ({binding.id})", "$foreground-muted")
                    yield Content.styled(shown.ljust(_COLUMN), "$text-accent") + Content(binding.description) + name
            for pressed, what in _UNBOUND.get(title, ()):
                yield Content.styled(pressed.ljust(_COLUMN), "$text-accent") + Content(what)
            yield Content()

    def action_close(self) -> None:
        self.dismiss(None)


def _commands() -> Iterator[Content]:
    yield Content.styled("Commands", "bold")
    for name, command in COMMANDS.items():
        line = f"/{name} {command.parameters}".ljust(_COLUMN)
        yield Content.styled(line, "$text-accent") + Content(command.summary)
