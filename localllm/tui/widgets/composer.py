"""Where a message is written: several lines, large pastes folded, what was asked before, commands completed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea

from localllm.chat.text import printable
from localllm.tui.keys import KeyNames

_FOLDED_LINES = 12  # of a paste, from which on it is folded
_FOLDED_CHARACTERS = 1500
_MOST_EDITED = 20_000  # characters of an earlier question; a megabyte on a line takes the field a second to draw
_FOLD = re.compile(r"\[pasted text (\d+): [^\]\n]*\]")


class Composer(TextArea):
    DEFAULT_CSS = """
    Composer {
        height: auto; max-height: 10; min-height: 3;
        border: round $border-blurred; padding: 0 1; background: transparent;
        &:focus { border: round $border; background: transparent; }
        & .text-area--cursor-line { background: transparent; }
    }
    """
    BINDINGS = [
        Binding("enter", "want('send')", "send", id="composer.send"),
        Binding("shift+enter,alt+enter,ctrl+j", "newline", "new line", id="composer.newline", show=False),
        Binding("ctrl+r", "want('find')", "search what was asked", id="composer.find", show=False),
        Binding("ctrl+g", "want('edit')", "write it in $EDITOR", id="composer.editor", show=False),
        Binding("tab", "want('complete')", "complete", show=False),
    ]

    @dataclass
    class Wanted(Message):
        """what: "send", "find" an earlier question, "edit" in an editor, "complete" the text."""

        what: str

    @dataclass
    class Step(Message):
        """Choose the suggestion `step` further down."""

        step: int

    def __init__(self, draft: str, key_names: KeyNames) -> None:
        super().__init__(
            soft_wrap=True, show_line_numbers=False, compact=False, tab_behavior="focus", highlight_cursor_line=False,
            placeholder=f"Write a message. / for commands, {key_names['app.help']} for help",
        )  # fmt: skip
        self.write(draft)
        self.is_suggesting = False  # the arrows move in what is suggested
        self.cursor_blink = False  # each blink is a picture more over ssh
        self.asked: Sequence[str] = ()  # before, the latest first
        self._at = -1  # of those that is shown; -1: what is being written
        self._draft = ""
        self._pasted: list[str] = []

    @property
    def whole(self) -> str:
        """The text with its folded pastes unfolded."""
        return self.unfolded(self.text)

    def unfolded(self, text: str) -> str:
        """A text of this composer with its pastes in place of their signs; valid until the composer is emptied."""

        def paste(match: re.Match[str]) -> str:
            number = int(match[1])
            return self._pasted[number - 1] if 0 < number <= len(self._pasted) else match[0]

        return _FOLD.sub(paste, text)

    def write(self, text: str) -> None:
        """Replace the text; the cursor is at its end. Control characters, which a terminal would obey, are dropped."""
        self.text = printable(text)
        self.move_cursor(self.document.end)

    def rewrite(self, text: str) -> None:
        """`write` for an earlier question: folded where it is too long to be edited here."""
        text = printable(text)
        self.write(self._folded(text) if len(text) > _MOST_EDITED else text)

    def clear_all(self) -> None:
        """Remove the text and the pastes."""
        self.write("")
        self._pasted.clear()
        self._at, self._draft = -1, ""

    @property
    def unsent(self) -> str:
        """The text being written, also while earlier questions are looked through."""
        is_recalled = self._at >= 0 and self.text == self.asked[self._at]
        return self.unfolded(self._draft) if is_recalled else self.whole

    def put_away(self) -> None:
        """Remove the text; the arrow up brings it back."""
        drafts = [self.whole, self.unfolded(self._draft)] if self._at >= 0 else [self.whole]
        self.remember([*(text for text in drafts if text.strip()), *self.asked])
        self.clear_all()

    def remember(self, asked: Sequence[str]) -> None:
        """Set the earlier questions, the latest first."""
        self.asked = list(dict.fromkeys(asked))
        self._at = -1

    def action_want(self, what: str) -> None:
        self.post_message(self.Wanted(what))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_delete_left(self) -> None:
        """Delete a folded paste as a whole: the rest of its sign would be sent in its place."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        fold = next((found for found in _FOLD.finditer(before) if found.end() == column), None)
        if fold is not None and self.selection.is_empty:
            self.delete((row, fold.start()), (row, column))
        else:
            super().action_delete_left()

    def action_cursor_up(self, select: bool = False) -> None:
        if self.is_suggesting and not select:
            self.post_message(self.Step(-1))
        elif not select and self.cursor_at_first_line:
            self._recall(self._at + 1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self.is_suggesting and not select:
            self.post_message(self.Step(1))
        elif not select and self.cursor_at_last_line and self._at >= 0:
            self._recall(self._at - 1)
        else:
            super().action_cursor_down(select)

    def _recall(self, at: int) -> None:
        if at >= len(self.asked):
            return
        if self._at < 0:
            self._draft = self.text
        self._at = at
        self.write(self.asked[at] if at >= 0 else self._draft)

    async def _on_key(self, event: events.Key) -> None:
        # Enter sends and tab completes: the area's own handler would insert them before a binding is asked.
        if event.key in ("enter", "tab"):
            event.prevent_default()
            return
        await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        text = printable(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        if text.count("\n") + 1 > _FOLDED_LINES or len(text) > _FOLDED_CHARACTERS:
            text = self._folded(text)
        self.insert(text)

    def _folded(self, text: str) -> str:
        lines = len(text.splitlines())
        self._pasted.append(text)
        size = f"{lines} lines" if lines > _FOLDED_LINES else f"{len(text):,} characters"
        return f"[pasted text {len(self._pasted)}: {size}]"
