"""Dialogs over a screen: a choice, a line of text, a code block of the chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.highlight import highlight
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.chat.text import one_line, printable, visible
from localllm.tui.markdown_render import CodeBlock
from localllm.tui.widgets.bars import KeyBar


@dataclass(frozen=True)
class DialogReply:
    """value: returned by the dialog. note: shown beside the text."""

    value: str
    text: str
    note: str = ""


class Dialog(ModalScreen[Any]):
    """Esc closes it, and returns None."""

    BINDINGS = [Binding("escape", "close", "close")]

    def action_close(self) -> None:
        self.dismiss(None)


class ChoiceDialog(Dialog):
    """Returns the value of the chosen reply. y and n answer it where the replies are one and "no"."""

    BINDINGS = [Binding("y", "answer(0)", "yes", show=False), Binding("n", "answer(-1)", "no", show=False)]

    def __init__(self, title: str, lines: Sequence[Content], replies: Sequence[DialogReply], chosen: int = 0) -> None:
        """chosen: the number of the highlighted reply."""
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

    def action_answer(self, number: int) -> None:
        if len(self._replies) == 2 and self._replies[-1].text == "no":
            self.dismiss(self._replies[number].value)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._replies[event.option_index].value)


class LineDialog(Dialog, inherit_bindings=False):
    """Returns the line, None where it is empty."""

    BINDINGS = [
        Binding("escape", "close", "close", id="prompt.close"),
        Binding("ctrl+t", "swap", "another ending", id="prompt.ending"),
        Binding("enter", "accept", "accept", id="prompt.accept"),
    ]

    def __init__(self, title: str, value: str, hint: str = "", *, endings: tuple[str, ...] = ()) -> None:
        """endings: of a file's name; a key goes through them."""
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


class CodeDialog(Dialog):
    """Returns the block's number and the file to write, None for the clipboard."""

    BINDINGS = [Binding("s", "save", "save to a file")]

    def __init__(self, blocks: Sequence[CodeBlock], first: int) -> None:
        """first: the index of the block that is chosen at first."""
        super().__init__()
        self._blocks = blocks
        self._first = first
        self._digits = ""  # of the number that is typed

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "code blocks"
            yield OptionList(*map(_option, range(1, len(self._blocks) + 1), self._blocks), markup=False)
            with VerticalScroll(can_focus=False):
                yield Static("", id="code", markup=False)
            yield Input(placeholder="a file's path")
            yield Static(Content("a number or enter copies  s saves into a file  esc closes"), id="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = self._first

    def on_key(self, event: events.Key) -> None:
        """Choose a block by its number, and copy it once no other number begins so."""
        if self.query_one(Input).has_focus or not (event.character or "").isdecimal():
            return
        event.stop()
        numbers = [str(number + 1) for number in range(len(self._blocks))]
        self._digits += str(event.character)
        if self._digits not in numbers:
            self._digits = str(event.character)
        if self._digits in numbers:
            at = numbers.index(self._digits)
            self.query_one(OptionList).highlighted = at
            if not any(number.startswith(self._digits) for number in numbers if number != self._digits):
                self.dismiss((at, None))

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        block = self._blocks[event.option_index]
        self.query_one("#code", Static).update(highlight(visible(block.code), language=block.language or None))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss((event.option_index, None))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        number = self.query_one(OptionList).highlighted
        if not event.value.strip():
            self.query_one("#hint", Static).update(Content("a file's path, as example.py; esc closes"))
        elif number is not None:
            self.dismiss((number, event.value.strip()))

    def action_save(self) -> None:
        path = self.query_one(Input)
        path.display = True
        path.focus()


def _option(number: int, block: CodeBlock) -> Option:
    lines = block.code.splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    count = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    language = one_line(visible(block.language or "text"))
    return Option(Content(f"{number}  {language}, {count}: {one_line(visible(first))[:80]}"))
