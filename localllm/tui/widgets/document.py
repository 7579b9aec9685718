"""Markdown that grows while it is shown: one widget for each block of the top level.

Textual's own has a widget for each item and bullet of a list: 120 on a screen, whose layout takes 38 ms at each change
where this takes 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markdown_it.token import Token
from textual import events
from textual.app import ComposeResult
from textual.reactive import reactive
from textual.selection import Selection
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock
from textual.widgets.markdown import MarkdownStream

from localllm.tui import rendering
from localllm.tui.highlighting import Highlighter
from localllm.tui.pieces import Block
from localllm.tui.widgets.clear import Clear
from localllm.tui.widgets.settled import Settled


class DocumentBlock(Settled, MarkdownBlock):
    """A paragraph, a heading, a list, a table or code: one block of the top level."""

    COMPONENT_CLASSES = set()
    DEFAULT_CSS = """
    DocumentBlock { width: 1fr; height: auto; margin: 0 0 1 0; }
    """

    auto_links = reactive(False)  # nothing can be clicked, and looking for it took a fifth of the drawing

    def __init__(self, document: Markdown, tokens: Sequence[Token], highlighter: Highlighter | None = None) -> None:
        super().__init__(document, tokens[0])
        self.block = Block(rendering.pieces(tokens, highlighter))
        self.update(self.block)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        assert isinstance(block, DocumentBlock)
        self._copy_context(block)
        block.block.grow_from(self.block)
        self.block = block.block
        self.update(self.block)

    def notify_style_update(self) -> None:
        self.block.forget()
        super().notify_style_update()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(line.plain.rstrip() for line in self.block.shown)), "\n"


class Document(Clear, Markdown):
    """A model's Markdown: whole, or without a text at first and then written by its stream."""

    COMPONENT_CLASSES = {
        "em", "strong", "s", "code_inline", "code_block", "link", "dim", "quote", "bullet", "h1", "h2", "h3", "h4",
        "h5", "h6",
    }  # fmt: skip
    DEFAULT_CSS = """
    Document {
        padding: 0;
        & > .em { text-style: italic; }
        & > .strong { text-style: bold; }
        & > .s { text-style: strike; }
        & > .code_inline { background: $boost; color: $text-warning; }
        & > .link { text-style: underline; color: $text-primary; }
        & > .dim { color: $foreground-muted; }
        & > .code_block { background: $foreground 7%; }
        & > .bullet { color: $text-primary; }
        & > .quote { color: $text-secondary; }
        & > .h1 { text-style: bold underline; color: $markdown-h1-color; }
        & > .h2 { text-style: bold; color: $markdown-h2-color; }
        & > .h3, & > .h4, & > .h5, & > .h6 { text-style: bold; color: $text; }
    }
    """

    def __init__(self, text: str = "", *, classes: str | None = None) -> None:
        super().__init__(classes=classes, parser_factory=rendering.parser, open_links=False)
        self._text = text
        self._stream: MarkdownStream | None = None
        self._highlighter: Highlighter | None = None

    async def write(self, text: str) -> None:
        """What comes next."""
        if self._stream is None:
            self._stream, self._highlighter = Markdown.get_stream(self), Highlighter()
        await self._stream.write(text)

    async def end(self) -> None:
        """Nothing more is written; all is shown when this returns."""
        if self._stream is not None:
            stream, self._stream, self._highlighter = self._stream, None, None
            await stream.stop()
            await self.append("")

    def compose(self) -> ComposeResult:
        # What is whole is one block: a conversation that is scrolled through mounts a third of the widgets.
        self._markdown = self._text
        if tokens := rendering.parser().parse(self._text):  # of blanks there are none
            yield DocumentBlock(self, tokens)

    async def _on_mount(self, event: events.Mount) -> None:  # type: ignore[override]
        event.prevent_default()

    def _parse_markdown(self, tokens: Iterable[Token]) -> Iterable[MarkdownBlock]:
        *before, last = list(rendering.groups(list(tokens))) or [[]]
        for group in before:
            yield DocumentBlock(self, group)
        if last:
            yield DocumentBlock(self, last, self._highlighter)
