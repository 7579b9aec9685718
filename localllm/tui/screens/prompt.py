"""One line of text is asked for."""

from __future__ import annotations

from pathlib import PurePath

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from localllm.chat.text import one_line, printable, visible
from localllm.tui.widgets.key_bar import KeyBar


class Prompt(ModalScreen[str | None]):
    """Returns the line, None where it was closed or left empty."""

    CSS = """
    Prompt {
        align: center middle;
        background: $background 60%;
        & > Vertical { width: 90%; max-width: 90; height: auto; border: round $border; background: $surface; }
        & Static { padding: 0 1; height: auto; }
        & #hint { color: $text-muted; }
        & Input { height: 1; border: none; padding: 0 1; margin: 1 0; background: $boost; }
        & Input:focus { border: none; }
    }
    """
    BINDINGS = [
        Binding("escape", "close", "close", id="prompt.close"),
        Binding("ctrl+t", "swap", "another ending", id="prompt.ending"),
        Binding("enter", "accept", "accept", id="prompt.accept"),
    ]

    def __init__(self, title: str, value: str, hint: str = "", *, endings: tuple[str, ...] = ()) -> None:
        """endings: that a file's name may have; a key goes through them."""
        super().__init__()
        self._title = title
        self._value = printable(value)
        self._hint = hint
        self._endings = endings

    def compose(self) -> ComposeResult:
        swaps = {"prompt.ending": " / ".join(self._endings)} if self._endings else {}
        with Vertical():
            yield Static(Content.styled(visible(one_line(self._title)), "bold"))
            yield Input(self._value)
            if self._hint:
                yield Static(Content(visible(one_line(self._hint))), id="hint")
            yield KeyBar({"prompt.accept": "accept", "prompt.close": "leave it", **swaps})

    @on(Input.Submitted)
    def action_accept(self) -> None:
        self.dismiss(self.query_one(Input).value.strip() or None)

    def action_swap(self) -> None:
        if not self._endings:
            return
        field = self.query_one(Input)
        path = PurePath(field.value)
        if not path.name or path.name == "..":
            path /= "chat"
        at = self._endings.index(path.suffix) if path.suffix in self._endings else -1
        field.value = str(path.with_suffix(self._endings[(at + 1) % len(self._endings)]))

    def action_close(self) -> None:
        self.dismiss(None)
