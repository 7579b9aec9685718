"""All models, one a line, the details of the one that is highlighted, and what is on its way."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localllm.chat.text import format_seconds, one_line, visible
from localllm.config import format_bytes
from localllm.runtime.fit_check import Verdict
from localllm.runtime.model_catalog import ModelRow, licence_text, packed_text
from localllm.runtime.model_choice import ModelChoice
from localllm.tui.download_worker import Download
from localllm.tui.widgets.bars import bar, fitting

_GAP = "  "
_SHORTEST_NAME, _LONGEST_NAME = 12, 44  # columns; a folder's path is cut
_SHORTEST_PACKED = 20  # columns; what has no room is cut
_VERDICT_STYLES = {"fits": "$text-success", "offloads": "$text-warning", "too large": "$text-error"}


@dataclass(frozen=True)
class ModelLine:
    """A model in the table."""

    row: ModelRow
    verdict: Verdict | None = None
    download: Download | None = None
    is_loaded: bool = False
    is_best: bool = False

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def choice(self) -> ModelChoice:
        return ModelChoice(self.row, self.verdict)


@dataclass(frozen=True)
class _Column:
    """rank: columns of the highest are dropped first. least: width in columns of the terminal, for later content.
    is_number: aligned at the right."""

    title: str
    rank: int
    cell: Callable[[ModelLine], Content]
    least: int = 0
    is_number: bool = False

    def width(self, lines: Sequence[ModelLine]) -> int:
        return max(len(self.title), self.least, *(self.cell(line).cell_length for line in lines), 0)

    def drawn(self, content: Content, width: int) -> Content:
        """Return a cell, or the title, in this width."""
        if self.is_number:
            content = Content(" " * max(0, width - content.cell_length)) + content
        return content.truncate(width, ellipsis=True, pad=True)


def _name(line: ModelLine) -> Content:
    star = Content.styled("* ", "$text-accent") if line.is_best else Content("  ")
    mark = Content.styled("● ", "$text-success") if line.is_loaded else star
    name = Content(visible(one_line(line.name)))
    return mark + (name.stylize("bold") if line.row.is_here else name)


def _download(line: ModelLine) -> Content:
    download = line.download
    if download is None:
        text = line.choice.download_text if line.row.state != "orphan" else "orphan"
        return Content.styled(text, "$text-success" if line.row.is_here else "$foreground-muted")
    share = "" if download.share is None else f" {download.share:.0%}"
    if download.state == "running":
        return Content.styled(f"{'pulling' if download.kind == 'pull' else 'packing'}{share}", "$text-accent")
    return Content.styled(f"{download.state}{share}", "$text-error" if download.state == "failed" else "$text-warning")


def _speed(line: ModelLine) -> Content:
    if (verdict := line.verdict) is None:
        return Content.styled("…", "$foreground-muted")
    return Content.styled(line.choice.speed_text, _VERDICT_STYLES.get(verdict.kind, "$foreground-muted"))


_NAME = _Column("  name", 0, _name, 22)
_DOWNLOAD = _Column("download", 2, _download, len("pulling 99%"), is_number=True)
_MEMORY = _Column("memory", 3, lambda line: Content(line.choice.memory_text), len("99.9 GiB"), is_number=True)
_SPEED = _Column("tok/s here", 1, _speed, is_number=True)
_CONTEXT = _Column("context", 4, lambda line: Content(line.choice.context_text), is_number=True)
_LICENCE = _Column("licence", 5, lambda line: Content(one_line(licence_text(line.row.licence, gated=line.row.gated))))
_PACKED = _Column(
    "packed", 6, lambda line: Content(", ".join(one_line(packed_text(packed)) for packed in line.row.packed))
)
_COLUMNS = (_NAME, _DOWNLOAD, _MEMORY, _SPEED, _CONTEXT, _LICENCE, _PACKED)


class ModelTable(OptionList):
    """A click highlights a line; a second one, or enter, chooses it."""

    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self.header = Static("", id="header", markup=False)  # the titles of the visible columns
        self._every: list[ModelLine] = []
        self._shown: list[ModelLine] = []
        self._words = ""
        self._columns: list[tuple[_Column, int]] = []
        self._marked: int | None = None  # the line that is drawn as the highlighted one

    @property
    def line(self) -> ModelLine | None:
        at = self.highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    @property
    def lines(self) -> tuple[ModelLine, ...]:
        """Those that are shown, from top to bottom."""
        return tuple(self._shown)

    @property
    def num_shown(self) -> int:
        return len(self._shown)

    def show(self, lines: Sequence[ModelLine], words: str = "") -> None:
        """Show the lines whose names match the words; the highlight stays with its model."""
        self._every = list(lines)
        self._words = words
        self._redraw()

    def change(self, line: ModelLine) -> None:
        self._every = [line if other.name == line.name else other for other in self._every]
        for index, other in enumerate(self._shown):
            if other.name == line.name and other != line:
                self._shown[index] = line
                self.replace_option_prompt_at_index(index, self._drawn(index))

    def highlight(self, name: str) -> None:
        names = [line.name for line in self._shown]
        if name in names:
            self.highlighted = names.index(name)

    def on_resize(self, event: events.Resize) -> None:
        self._redraw()

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()
        index = event.style.meta.get("option")
        if index is None:
            return
        if index == self.highlighted:
            self.action_select()
        else:
            self.highlighted = index

    def _redraw(self) -> None:
        name = self.line.name if self.line is not None else None
        self._columns = _fitting_columns(self._every, self.scrollable_content_region.width)
        self._shown = [line for line in self._every if line.row.matches(self._words.split())]
        self._marked = None
        self.clear_options()
        self.add_options([Option(self._drawn(index)) for index in range(len(self._shown))])
        names = [line.name for line in self._shown]
        self.highlighted = (names.index(name) if name in names else 0) if names else None
        titles = [column.drawn(Content(column.title), width) for column, width in self._columns]
        self.header.update(Content(_GAP).join(titles))

    def watch_highlighted(self, highlighted: int | None) -> None:
        before, self._marked = self._marked, highlighted
        for index in {before, highlighted} - {None}:
            if index is not None and index < len(self._shown):
                self.replace_option_prompt_at_index(index, self._drawn(index))
        super().watch_highlighted(highlighted)

    def _drawn(self, index: int) -> Content:
        """The line; without colours where it is highlighted: not all can be read there in every theme."""
        line = self._shown[index]
        cells = [column.drawn(column.cell(line), width) for column, width in self._columns]
        drawn = Content(_GAP).join(cells)
        return Content(drawn.plain) if index == self._marked else drawn


def _fitting_columns(lines: Sequence[ModelLine], columns: int) -> list[tuple[_Column, int]]:
    """The columns that fit, with their widths. The least important ones are dropped; the rest of the room goes to a
    long name, then to the packed formats."""
    widths = {column: column.least if column is _NAME else column.width(lines) for column in _COLUMNS}
    widths[_PACKED] = min(widths[_PACKED], _SHORTEST_PACKED)
    kept = list(_COLUMNS)
    while len(kept) > 1 and _total(kept, widths) > columns:
        if len(kept) == 2 and widths[_NAME] > _SHORTEST_NAME:
            widths[_NAME] = _SHORTEST_NAME
        else:
            kept.remove(max(kept, key=lambda column: column.rank))
    for column, longest in ((_NAME, min(_NAME.width(lines), _LONGEST_NAME)), (_PACKED, _PACKED.width(lines))):
        widths[column] = max(1, min(longest, widths[column] + columns - _total(kept, widths)))
    return [(column, widths[column]) for column in kept]


def _total(columns: Sequence[_Column], widths: Mapping[_Column, int]) -> int:
    return sum(widths[column] + len(_GAP) for column in columns) - len(_GAP)


_LABEL = 16  # columns; "attention heads" has room


class ModelDetails(VerticalScroll, can_focus=False):
    """Facts about the model named `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ""
        self._facts: list[tuple[str, str]] = []

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self._redraw()

    def show(self, name: str, facts: Sequence[tuple[str, str]], verdict: Verdict | None) -> None:
        """Show facts, each (label, text), and the verdict."""
        if name != self.model:
            self.model = name
            self.scroll_home(animate=False)
        here = [] if verdict is None else [("on this machine", verdict.text), ("", verdict.details)]
        self._facts = [*facts, *(line for line in here if line[1])]
        self._redraw()

    def _redraw(self) -> None:
        columns = max(10, self.scrollable_content_region.width - _LABEL)
        lines = [
            Content.styled(f"{'' if number else label:<{_LABEL}}", "$foreground-muted") + Content(piece)
            for label, text in self._facts
            for number, piece in enumerate(textwrap.wrap(visible(one_line(text)), columns) or [""])
        ]
        self.query_one(Static).update(Content("\n").join(lines))


_BAR_COLUMNS = 20  # columns


class DownloadView(Widget):
    """Two lines: the whole download, and its current file."""

    download: reactive[Download] = reactive(Download("", "pull"))

    @dataclass
    class Clicked(Message):
        """what: "toggle" (pause it, or resume), "cancel"."""

        download: Download
        what: str

    def __init__(self, download: Download) -> None:
        super().__init__()
        self.set_reactive(DownloadView.download, download)

    def render(self) -> Content:
        columns = self.content_size.width
        lines = (fitting(list(parts), columns) for parts in (self._first(), self._second()))
        return Content("\n").join(lines)

    def action_want(self, what: str) -> None:
        self.post_message(self.Clicked(self.download, what))

    def _first(self) -> Iterator[tuple[int, Content]]:
        download, step = self.download, self.download.step
        verb = "pull" if download.kind == "pull" else f"pack to {download.weights}"
        yield 0, Content(visible(one_line(f"{verb} {download.name}"))).stylize("bold")
        if download.state != "running":
            yield 0, Content.styled(download.state, "$text-error" if download.state == "failed" else "$text-warning")
        if download.share is not None:
            yield 2, bar(download.share, _BAR_COLUMNS)
            yield 1, Content(f"{download.share:4.0%}")
            yield 4, Content(f"{format_bytes(step.done)} of {format_bytes(step.total)}")
        if download.state == "running" and download.rate_bytes_s > 0:
            yield 5, Content(f"{format_bytes(int(download.rate_bytes_s))}/s")
        if (left_s := download.left_s) is not None:
            yield 3, Content(f"{format_seconds(left_s)} left")

    def _second(self) -> Iterator[tuple[int, Content]]:
        download, step = self.download, self.download.step
        if step.file_total:
            yield 3, Content.styled(f"  {visible(one_line(step.file))}", "$foreground-muted")
            yield 4, bar(step.file_done / step.file_total, _BAR_COLUMNS // 2, "$secondary")
            figures = f"{format_bytes(step.file_done)} of {format_bytes(step.file_total)}"
            yield 5, Content.styled(figures, "$foreground-muted")
        is_new = download.state == "running" and not (step.total or step.file)
        if note := step.note or ("beginning" if is_new else ""):
            indent = "" if step.file_total else "  "
            yield 2, Content.styled(f"{indent}{visible(one_line(note))}", "$foreground-muted")
        toggle = {"running": "pause", "paused": "resume", "failed": "again"}.get(download.state)
        if toggle is not None:
            yield 0, Content(toggle).stylize(Style.from_meta({"@click": "want('toggle')"}))
        if download.state != "stopping":
            yield 1, Content("cancel").stylize(Style.from_meta({"@click": "want('cancel')"}))


class DownloadList(VerticalScroll, can_focus=False):
    """All downloads; hidden where there are none."""

    def show(self, downloads: Sequence[Download]) -> None:
        views = list(self.query(DownloadView))
        for view, download in zip(views, downloads, strict=False):
            view.download = download
        for view in views[len(downloads) :]:
            view.remove()
        self.mount(*(DownloadView(download) for download in downloads[len(views) :]))
        self.display = bool(downloads)
