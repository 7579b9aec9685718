"""The code blocks of an answer: one is copied, or saved into a file."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.highlight import highlight
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.chat.text import one_line, visible
from localllm.tui.code_blocks import CodeBlock

Picked = tuple[int, str | None] | None


class CodePicker(ModalScreen[Picked]):
    """Returns the block's number and the file it goes into, None for the clipboard."""

    CSS = """
    CodePicker {
        align: center middle;
        & > Vertical {
            width: 90%; max-width: 110; height: auto; max-height: 80%; border: round $border; background: $surface;
        }
        & OptionList { height: auto; max-height: 8; border: none; }
        & VerticalScroll { height: auto; max-height: 24; border-top: solid $border-blurred; }
        & Input { display: none; }
        & #hint { color: $text-muted; height: 1; }
    }
    """
    BINDINGS = [
        Binding("escape", "close", "close"),
        Binding("s", "save", "save into a file"),
    ]

    def __init__(self, blocks: Sequence[CodeBlock]) -> None:
        super().__init__()
        self._blocks = blocks

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "code blocks"
            yield OptionList(
                *(Option(_label(number, block)) for number, block in enumerate(self._blocks, 1)), markup=False
            )
            with VerticalScroll(can_focus=False):
                yield Static("", id="code", markup=False)
            yield Input(placeholder="a file's path")
            yield Static(Content("enter copy  s save into a file  esc close"), id="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        block = self._blocks[event.option_index]
        self.query_one("#code", Static).update(highlight(visible(block.code), language=block.language or None))

    @on(OptionList.OptionSelected)
    def _copy(self, event: OptionList.OptionSelected) -> None:
        self.dismiss((event.option_index, None))

    @on(Input.Submitted)
    def _saved(self, event: Input.Submitted) -> None:
        number = self.query_one(OptionList).highlighted
        if not event.value.strip():
            self.query_one("#hint", Static).update(Content("a file's path, as example.py; esc closes"))
        elif number is not None:
            self.dismiss((number, event.value.strip()))

    def action_save(self) -> None:
        path = self.query_one(Input)
        path.display = True
        path.focus()

    def action_close(self) -> None:
        self.dismiss(None)


def _label(number: int, block: CodeBlock) -> Content:
    lines = block.code.splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    count = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    return Content(f"{number}  {one_line(visible(block.language or 'text'))}, {count}: {one_line(visible(first))[:80]}")
