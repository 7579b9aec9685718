"""A question with a few replies, over the screen that asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localllm.chat.text import one_line, visible


@dataclass(frozen=True)
class Reply:
    """value: what the question returns. note: beside it."""

    value: str
    text: str
    note: str = ""


class Choice(ModalScreen[str | None]):
    """Returns the answer's value; None where it was left."""

    CSS = """
    Choice {
        align: center middle; background: $background 60%;
        & > Vertical {
            width: 90%; max-width: 88; height: auto; max-height: 90%;
            border: round $border; background: $surface; padding: 0 1;
        }
        & OptionList { height: auto; max-height: 8; border: none; margin-top: 1; background: $surface; }
        & OptionList:focus { background-tint: $foreground 0%; }
        & #hint { color: $text-muted; height: 1; margin-top: 1; }
    }
    """
    BINDINGS = [Binding("escape", "close", "close")]

    def __init__(self, title: str, lines: Sequence[Content], replies: Sequence[Reply], chosen: int = 0) -> None:
        """chosen: which of the replies is highlighted."""
        super().__init__()
        self._title = title
        self._lines = lines
        self._replies = replies
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content(visible(one_line(self._title)))
            yield Static(Content("\n").join(self._lines), markup=False)
            width = max(len(reply.text) for reply in self._replies)
            drawn = (Content(f"{reply.text.ljust(width)}  {reply.note}") for reply in self._replies)
            yield OptionList(*map(Option, drawn), markup=False, compact=True)
            yield Static(Content("enter choose  esc close"), id="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = self._chosen

    @on(OptionList.OptionSelected)
    def _on_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._replies[event.option_index].value)

    def action_close(self) -> None:
        self.dismiss(None)
