"""What is known about the model that is highlighted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localllm.chat.text import one_line, visible
from localllm.runtime.fit_check import Verdict

_LABEL = 16  # columns; "attention heads" has room


class ModelDetails(VerticalScroll, can_focus=False):
    """The name of the model that it tells of is `model`."""

    DEFAULT_CSS = """
    ModelDetails { padding: 0 1; border-left: solid $border-blurred; display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = ""
        self._told: list[tuple[str, str]] = []

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self._redraw()

    def tell(self, name: str, facts: Sequence[tuple[str, str]], verdict: Verdict | None) -> None:
        """facts: (label, text)."""
        if name != self.model:
            self.model = name
            self.scroll_home(animate=False)
        here = [] if verdict is None else [("on this machine", verdict.text), ("", verdict.details)]
        self._told = [*facts, *(line for line in here if line[1])]
        self._redraw()

    def _redraw(self) -> None:
        columns = self.scrollable_content_region.width
        lines = (line for label, text in self._told for line in _lines(label, text, columns))
        self.query_one(Static).update(Content("\n").join(lines))


def _lines(label: str, text: str, columns: int) -> Iterator[Content]:
    """The text beside its label, as many lines as it takes."""
    for piece in textwrap.wrap(visible(one_line(text)), max(10, columns - _LABEL)) or [""]:
        yield Content.styled(f"{label:<{_LABEL}}", "$foreground-muted") + Content(piece)
        label = ""
