"""Markdown that grows while it is shown: one widget for each block of the top level.

Textual's own has a widget for each item and bullet of a list: 120 on a screen, whose layout takes 38 ms at each change
where this takes 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markdown_it.token import Token
from textual import events
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.selection import Selection
from textual.strip import Strip
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock
from textual.widgets.markdown import MarkdownStream

from localllm.tui import markdown_render
from localllm.tui.markdown_blocks import MarkdownLayout
from localllm.tui.markdown_render import Highlighter

if TYPE_CHECKING:
    from textual.widget import Widget
else:  # a widget would stand before the widget among those whose styles are inherited
    Widget = object


class LaidOutOnce(Widget):
    """A container whose content depends on its width alone, or on its size where its height is given. Textual lays the
    screen out again whenever a size has changed: 27 times a second where 15 are enough, while an answer streams."""

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        old, new = self._size, size
        if self.styles.is_auto_height:
            old, new = old.with_height(0), new.with_height(0)
        return super()._size_updated(size, virtual_size, container_size, layout and old != new)


class Clear(LaidOutOnce):
    """A container that shows what is below it. Textual draws a background line by line under all that covers it, and
    again when its height changes: three nested containers took half of each picture of an answer that streams."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return super().render_lines(crop) if self.has_focus else []


class DocumentBlock(LaidOutOnce, MarkdownBlock):
    """One block of the top level: a paragraph, a heading, a list, a table or code."""

    COMPONENT_CLASSES = set()

    auto_links = reactive(False)  # nothing can be clicked, and looking for it took a fifth of the drawing

    def __init__(self, document: Markdown, tokens: Sequence[Token]) -> None:
        super().__init__(document, tokens[0])
        self._highlighters: list[Highlighter] = []
        self._shown: tuple[Sequence[str], int | None, bool] = (), None, False
        self.block = MarkdownLayout([])

    def show(
        self, tokens: Sequence[Token], lines: Sequence[str], num_codes: int | None, *, grows: bool = False
    ) -> None:
        """Draw the tokens, unless their source is unchanged. lines: the source. num_codes: as in `pieces`. grows: more
        may follow: nearly right colours of code will do."""
        if (lines, num_codes, grows) == self._shown:
            return
        self._shown = lines, num_codes, grows
        block = MarkdownLayout(markdown_render.pieces(tokens, self._highlighters if grows else None, num_codes))
        block.grow_from(self.block)
        self.block = block
        self.update(block)

    def notify_style_update(self) -> None:
        self.block.forget()
        super().notify_style_update()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(line.plain.rstrip() for line in self.block.shown)), "\n"


class Document(Clear, Markdown):
    """A model's Markdown: complete, or written piece by piece."""

    COMPONENT_CLASSES = {
        "em", "strong", "s", "code_inline", "code_block", "link", "dim", "quote", "bullet", "h1", "h2", "h3", "h4",
        "h5", "h6",
    }  # fmt: skip

    def __init__(self, text: str = "", num_codes: int | None = None) -> None:
        """num_codes: of the conversation's code blocks before; None for code without numbers."""
        super().__init__(parser_factory=markdown_render.parser, open_links=False)
        self._tail = self._markdown = text  # the tail: of the blocks that more text may change
        self._open: list[DocumentBlock] = []  # these blocks
        self._num_read = 0  # characters of the tail, up to the end of a line
        self._stream: MarkdownStream | None = None
        self._num_codes = num_codes  # before the tail

    async def write(self, text: str) -> None:
        if self._stream is None:
            self._stream = Markdown.get_stream(self)
        await self._stream.write(text)

    async def end(self) -> None:
        """End the document; all of it is shown when this returns."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.stop()
            await self._grow(is_whole=True)

    def append(self, markdown: str) -> AwaitComplete:
        """Append Markdown. Textual's own method starts a block as soon as a line looks like one; with the rest of it
        it may turn out to be none (`**` and `**bold**`, `2` and `2. an item`)."""
        self._markdown += markdown
        self._tail += markdown
        return AwaitComplete(self._grow())

    async def _grow(self, *, is_whole: bool = False) -> None:
        async with self.lock:
            text = self._tail
            groups = list(markdown_render.groups(markdown_render.parser().parse(text)))
            lines = text.split("\n")
            begins = [*map(markdown_render.first_line, groups), len(lines)]
            more = [DocumentBlock(self, group) for group in groups[len(self._open) :]]
            surplus = self._open[len(groups) :]
            self._open = [*self._open[: len(groups)], *more]
            num_codes = self._num_codes
            for number, (block, group) in enumerate(zip(self._open, groups, strict=True)):
                grows = number + 1 == len(groups) and not is_whole
                block.show(group, lines[begins[number] : begins[number + 1]], num_codes, grows=grows)
                num_codes = _counted_on(num_codes, group)
            with self.app.batch_update():
                for block in surplus:
                    await block.remove()
                await self.mount_all(more)
            self._close_blocks(text)

    def _close_blocks(self, text: str) -> None:
        """Close the blocks that no text can change any more: those before another that whole lines have begun."""
        whole = text[: text.rfind("\n") + 1]
        if len(whole) == self._num_read:
            return
        found = list(markdown_render.groups(markdown_render.parser(has_inline=False).parse(whole)))
        if len(found) > 1:
            num_lines = markdown_render.first_line(found[-1])
            num_closed = sum(len(line) + 1 for line in whole.split("\n")[:num_lines])
            for group in found[:-1]:
                self._num_codes = _counted_on(self._num_codes, group)
            self._tail = self._tail[num_closed:]
            whole = whole[num_closed:]
            del self._open[: len(found) - 1]
        self._num_read = len(whole)

    def compose(self) -> ComposeResult:
        # What is whole is one block: a conversation that is scrolled through mounts a third of the widgets.
        if tokens := markdown_render.parser().parse(self._tail):  # of blanks there are none
            self._open = [DocumentBlock(self, tokens)]
            self._open[0].show(tokens, [self._tail], self._num_codes)
        yield from self._open

    async def _on_mount(self, event: events.Mount) -> None:  # type: ignore[override]
        event.prevent_default()


def _counted_on(num_codes: int | None, tokens: Sequence[Token]) -> int | None:
    return None if num_codes is None else num_codes + markdown_render.num_codes(tokens)
