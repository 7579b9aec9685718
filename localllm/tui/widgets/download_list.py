"""Downloads and conversions: progress, rate and the time that is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from localllm.chat.text import format_seconds, one_line, visible
from localllm.config import format_bytes
from localllm.tui.download_worker import Download
from localllm.tui.widgets.bars import bar, fitting

_BAR = 20  # columns


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
            yield 2, bar(download.share, _BAR)
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
            yield 4, bar(step.file_done / step.file_total, _BAR // 2, "$secondary")
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
