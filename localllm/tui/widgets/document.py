"""Markdown that grows while it is shown: one widget for each block of the top level.

Textual's own has a widget for each item and bullet of a list: 120 on a screen, whose layout takes 38 ms at each change
where this takes 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markdown_it.token import Token
from textual import events
from textual.app import ComposeResult
from textual.selection import Selection
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock

from localllm.tui import rendering
from localllm.tui.pieces import Block
from localllm.tui.widgets.clear import Clear


class DocumentBlock(MarkdownBlock):
    """A paragraph, a heading, a list, a table or code: one block of the top level."""

    COMPONENT_CLASSES = set()
    DEFAULT_CSS = """
    DocumentBlock { width: 1fr; height: auto; margin: 0 0 1 0; }
    """

    def __init__(self, document: Markdown, tokens: Sequence[Token]) -> None:
        super().__init__(document, tokens[0])
        self.block = Block(rendering.pieces(tokens))
        self.update(self.block)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        assert isinstance(block, DocumentBlock)
        self._copy_context(block)
        self.block = block.block
        self.update(self.block)

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

    def compose(self) -> ComposeResult:
        # What is whole is one block: a conversation that is scrolled through mounts a third of the widgets.
        self._markdown = self._text
        if tokens := rendering.parser().parse(self._text):  # of blanks there are none
            yield DocumentBlock(self, tokens)

    async def _on_mount(self, event: events.Mount) -> None:  # type: ignore[override]
        event.prevent_default()

    def _parse_markdown(self, tokens: Iterable[Token]) -> Iterable[MarkdownBlock]:
        for group in rendering.groups(list(tokens)):
            yield DocumentBlock(self, group)
