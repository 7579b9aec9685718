"""What a model thought before it answered: a line that unfolds."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from localllm.chat.text import visible
from localllm.tui.widgets.clear import Clear
from localllm.tui.widgets.document import Document


class Thought(Clear, Vertical):
    """Open while it is being written, and after that where it is to stay so; else folded."""

    DEFAULT_CSS = """
    Thought {
        height: auto;
        margin: 0 0 1 0;
        color: $text-muted;
        & > .fold { width: auto; color: $text-muted; }
        & > .fold:hover { text-style: underline; }
        & > .fold:focus { text-style: reverse; }
        & > Document { padding: 0 0 0 2; display: none; color: $text-muted; }
        &.-open > Document { display: block; }
    }
    """
    is_open = reactive(False)

    def __init__(self, text: str = "", *, is_live: bool = False, stays_open: bool = False) -> None:
        super().__init__()
        self._fold = _Fold()
        self._document = Document(visible(text))
        self._num_words = len(text.split())
        self._is_thinking, self._stays_open = is_live, stays_open
        self.set_reactive(Thought.is_open, is_live or stays_open)

    def compose(self) -> ComposeResult:
        yield self._fold
        yield self._document

    def on_mount(self) -> None:
        self._refold()

    async def hear(self, text: str) -> None:
        """More of it came."""
        self._is_thinking = True
        self._num_words += len(text.split())
        self._refold()
        await self._document.write(visible(text))

    async def end(self) -> None:
        """The answer begins, or goes on."""
        if self._is_thinking:
            self._is_thinking, self.is_open = False, self._stays_open
            self._refold()
            await self._document.end()

    def watch_is_open(self) -> None:
        if self.is_mounted:
            self._refold()

    def _refold(self) -> None:
        self.set_class(self.is_open, "-open")
        sign = "▾" if self.is_open else "▸"
        self._fold.update(Content(f"{sign} {'thinking' if self._is_thinking else 'thought'}: {self._num_words} words"))


class _Fold(Static, can_focus=True):
    BINDINGS = [Binding("enter,space", "refold", "unfold or fold", show=False)]

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.action_refold()

    def action_refold(self) -> None:
        thought = self.query_ancestor(Thought)
        thought.is_open = not thought.is_open
