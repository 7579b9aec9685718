"""What is going on now, and how far it is."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localllm.chat.text import one_line
from localllm.tui.bars import bar

_BAR = 24  # columns


class Activity(Widget):
    """One line; hidden where nothing goes on."""

    DEFAULT_CSS = """
    Activity { height: 1; padding: 0 1; color: $text-muted; display: none; }
    """
    text = reactive("")
    share: reactive[float | None] = reactive(None)

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """`done` of `total`; 0 where that is not known."""
        self.text = one_line(text)
        self.share = done / total if total else None
        self.display = True

    def clear(self) -> None:
        self.display = False

    def render(self) -> Content:
        if self.share is None:
            return Content(f"{self.text} …")
        return bar(self.share, _BAR) + Content(f" {self.share:4.0%}  {self.text}")
