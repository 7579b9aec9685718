"""The layout of Markdown blocks: lines with hanging indents, and tables. Knows widths, no widgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, starmap, takewhile, zip_longest
from typing import Literal

from rich.segment import Segment
from textual.content import Content
from textual.css.styles import RulesMap
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual

_GAP = 2  # columns between two of a table
_NARROWEST = 3  # column of a table; a terminal that has no room for that cuts
_TAB = 4  # columns

Alignment = Literal["left", "center", "right"]


@dataclass(frozen=True)
class TextPiece:
    """Text wrapped behind prefixes: `first` for its first line, `rest` for the others. is_code: blanks are kept, and
    the background reaches to the end of the line."""

    content: Content
    first: Content = field(default_factory=Content)
    rest: Content = field(default_factory=Content)
    is_code: bool = False

    def is_same(self, other: Piece) -> bool:
        """Return whether it looks the same: equal content may not."""
        if not isinstance(other, TextPiece) or self.is_code != other.is_code:
            return False
        mine, its = (self.content, self.first, self.rest), (other.content, other.first, other.rest)
        return all(map(Content.is_same, mine, its))

    def lines(self, width: int) -> Iterator[Content]:
        prefix, rest, room = _prefixes(self.first, self.rest, width)
        for line in self.content.expand_tabs(_TAB).split(allow_blank=True):
            wrapped = line.fold(room) if self.is_code else line.wrap(room)
            for part in wrapped or [Content()]:
                if self.is_code:
                    part = part.pad_right(room - part.cell_length).stylize_before(".code_block")
                yield prefix + part
                prefix = rest


def _prefixes(first: Content, rest: Content, width: int) -> tuple[Content, Content, int]:
    """The prefixes of the first line and the others, and the room behind them: at least half the columns."""
    first, rest = (each.truncate(width // 2) for each in (first, rest))
    return first, rest, max(1, width - max(first.cell_length, rest.cell_length))


@dataclass(frozen=True)
class TablePiece:
    """Rows of cells, the header first. The columns share the room, and cells are wrapped. alignments: of the columns,
    "left" for those that have none."""

    rows: Sequence[Sequence[Content]]
    alignments: Sequence[Alignment] = ()
    first: Content = field(default_factory=Content)
    rest: Content = field(default_factory=Content)

    def lines(self, width: int) -> Iterator[Content]:
        count = max(map(len, self.rows), default=0)
        wanted = [max((row[i].cell_length for row in self.rows if i < len(row)), default=0) for i in range(count)]
        prefix, rest, room = _prefixes(self.first, self.rest, width)
        widths = _shared_out(wanted, room - _GAP * (count - 1))
        for number, row in enumerate(self.rows):
            for line in _row_lines(row, widths, self.alignments):
                yield prefix + (line.stylize_before(".strong") if number == 0 else line)
                prefix = rest
            if number == 0:
                rule = "  ".join("─" * column for column in widths)
                yield prefix + Content(rule).stylize(".dim")


Piece = TextPiece | TablePiece


def indented(piece: Piece, first: Content, rest: Content) -> Piece:
    return replace(piece, first=first + piece.first, rest=rest + piece.rest)


def _shared_out(wanted: Sequence[int], room: int) -> list[int]:
    """Widths of the columns: the wanted ones, as far as there is room; the widest shrink first."""
    widths = [max(1, column) for column in wanted]
    excess = sum(widths) - room
    while excess > 0 and max(widths, default=0) > _NARROWEST:
        widest = max(widths)
        second = max((column for column in widths if column < widest), default=_NARROWEST)
        at = [index for index, column in enumerate(widths) if column == widest]
        cut = max(1, min(widest - max(second, _NARROWEST), -(-excess // len(at))))
        for index in at:
            taken = min(cut, excess)
            widths[index] -= taken
            excess -= taken
    return widths


def _row_lines(row: Sequence[Content], widths: Sequence[int], alignments: Sequence[Alignment]) -> Iterator[Content]:
    cells = [cell.wrap(width) or [Content()] for cell, width in zip(row, widths, strict=False)]
    for number in range(max(map(len, cells), default=0)):
        parts = [cell[number] if number < len(cell) else Content() for cell in cells]
        columns = zip_longest(parts, widths[: len(parts)], alignments[: len(parts)], fillvalue="left")
        yield Content("  ").join(starmap(_aligned, columns)).rstrip()


def _aligned(cell: Content, width: int, alignment: Alignment) -> Content:
    room = max(0, width - cell.cell_length)
    left = {"left": 0, "center": room // 2, "right": room}[alignment]
    return cell.pad_left(left).pad_right(room - left)


@dataclass
class MarkdownLayout(Visual):
    """Pieces one below the other; selected by the lines shown."""

    pieces: Sequence[Piece]
    shown: list[Content] = field(default_factory=list)  # the lines shown last
    _by_piece: list[list[Content]] = field(default_factory=list)
    _width: int = -1
    _strips: list[Strip] = field(default_factory=list)  # of the first lines, in `_style`
    _style: Style | None = None

    def grow_from(self, earlier: MarkdownLayout) -> None:
        """Replace `earlier`: lines that look the same are not drawn again."""
        if earlier._width < 0:
            return
        pairs = zip(self.pieces, earlier.pieces, strict=False)
        same_pieces = takewhile(lambda pair: isinstance(pair[0], TextPiece) and pair[0].is_same(pair[1]), pairs)
        num_same = sum(1 for _ in same_pieces)
        self._lay_out(earlier._width, earlier._by_piece[:num_same])
        drawn = zip(self.shown, earlier.shown, earlier._strips, strict=False)
        same = takewhile(lambda row: row[0].is_same(row[1]), drawn)
        self._strips, self._style = [strip for _, _, strip in same], earlier._style

    def forget(self) -> None:
        """Drop what was drawn: the colours have changed."""
        self._strips = []

    def lines(self, width: int) -> list[Content]:
        if width != self._width:
            self._lay_out(width, [])
        return self.shown

    def _lay_out(self, width: int, known: list[list[Content]]) -> None:
        self._by_piece = known + [list(piece.lines(width)) for piece in self.pieces[len(known) :]]
        self.shown = list(chain.from_iterable(self._by_piece))
        self._width, self._strips = width, []

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return container_width

    def get_height(self, rules: RulesMap, width: int) -> int:
        return len(self.lines(width))

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        lines = self.lines(width)
        if options.selection is not None:
            return [_strip(y, _selected(y, line, options), style, options) for y, line in enumerate(lines[:height])]
        if style != self._style:
            self._strips, self._style = [], style
        self._strips += [_strip(y, lines[y], style, options) for y in range(len(self._strips), len(lines))]
        return self._strips[:height]


def _selected(y: int, line: Content, options: RenderOptions) -> Content:
    span = options.selection.get_span(y) if options.selection is not None else None
    if span is None or options.selection_style is None:
        return line
    start, end = span
    return line.stylize(options.selection_style, start, len(line.plain) if end == -1 else end)


def _strip(y: int, line: Content, style: Style, options: RenderOptions) -> Strip:
    x, segments = 0, []
    for text, text_style in line.render(style, end="", parse_style=options.get_style):
        segments.append(Segment(text, (style + text_style).rich_style_with_offset(x, y)))
        x += len(text)
    return Strip(segments, line.cell_length)
