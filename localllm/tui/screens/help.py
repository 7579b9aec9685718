"""The keys and commands, read from the bindings themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm.tui.commands import COMMANDS
from localllm.tui.keys import KeyNames

_COLUMN = 26
_UNBOUND = {  # keys of a text field, which no config.toml changes
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

    def __init__(self, scopes: Mapping[str, Sequence[Binding]], keymap: Mapping[str, str]) -> None:
        """scopes: the bindings by their title. keymap: the user's keys by a binding's id."""
        super().__init__()
        self._scopes = scopes
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "help"
            box.border_subtitle = "esc closes"
            hint = "In brackets: what a key is called under [keys] in config.toml."
            yield Static(Content("\n").join([Content.styled(hint, "$foreground-muted"), *self._keys(), *_commands()]))

    def _keys(self) -> Iterator[Content]:
        key_names = KeyNames(self._keymap)
        for title, bindings in self._scopes.items():
            opened_by = f" ({key_names[_OPENED_BY[title]]})" if title in _OPENED_BY else ""
            yield Content.styled(f"{title}{opened_by}", "bold")
            for binding in bindings:
                keys = self._keymap.get(str(binding.id), binding.key).split(",")
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
