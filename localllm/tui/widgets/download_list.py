"""What is fetched and packed: how far each is, how fast, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from localllm.config import format_bytes
from localllm.frontend.text import format_seconds, one_line, visible
from localllm.tui.bars import bar, fitting
from localllm.tui.download_worker import Download

_BAR = 20  # columns


class DownloadView(Widget):
    """Two lines: all of it, and the file that is worked on."""

    DEFAULT_CSS = """
    DownloadView { height: 2; padding: 0 1; link-style: underline; link-color: $text-accent; }
    """
    transfer: reactive[Download] = reactive(Download("", "pull"))

    class Toggled(Message):
        """It is to pause, or to go on."""

        def __init__(self, transfer: Download) -> None:
            super().__init__()
            self.transfer = transfer

    class Cancelled(Message):
        def __init__(self, transfer: Download) -> None:
            super().__init__()
            self.transfer = transfer

    def __init__(self, transfer: Download) -> None:
        super().__init__()
        self.set_reactive(DownloadView.transfer, transfer)

    def render(self) -> Content:
        columns = self.content_size.width
        lines = (fitting(list(parts), columns) for parts in (self._first(), self._second()))
        return Content("\n").join(lines)

    def action_pause(self) -> None:
        self.post_message(self.Toggled(self.transfer))

    def action_cancel(self) -> None:
        self.post_message(self.Cancelled(self.transfer))

    def _first(self) -> Iterator[tuple[int, Content]]:
        transfer, step = self.transfer, self.transfer.step
        verb = "pull" if transfer.kind == "pull" else f"pack to {transfer.weights}"
        yield 0, Content(visible(one_line(f"{verb} {transfer.name}"))).stylize("bold")
        if transfer.state != "running":
            yield 0, Content.styled(transfer.state, "$text-error" if transfer.state == "failed" else "$text-warning")
        if transfer.share is not None:
            yield 2, bar(transfer.share, _BAR)
            yield 1, Content(f"{transfer.share:4.0%}")
            yield 4, Content(f"{format_bytes(step.done)} of {format_bytes(step.total)}")
        if transfer.state == "running" and transfer.rate_bytes_s > 0:
            yield 5, Content(f"{format_bytes(int(transfer.rate_bytes_s))}/s")
        if (left_s := transfer.left_s) is not None:
            yield 3, Content(f"{format_seconds(left_s)} left")

    def _second(self) -> Iterator[tuple[int, Content]]:
        transfer, step = self.transfer, self.transfer.step
        if step.file_total:
            yield 3, Content.styled(f"  {visible(one_line(step.file))}", "$foreground-muted")
            yield 4, bar(step.file_done / step.file_total, _BAR // 2, "$secondary")
            figures = f"{format_bytes(step.file_done)} of {format_bytes(step.file_total)}"
            yield 5, Content.styled(figures, "$foreground-muted")
        is_new = transfer.state == "running" and not (step.total or step.file)
        if note := step.note or ("beginning" if is_new else ""):
            indent = "" if step.file_total else "  "
            yield 2, Content.styled(f"{indent}{visible(one_line(note))}", "$foreground-muted")
        toggle = {"running": "pause", "paused": "resume", "failed": "again"}.get(transfer.state)
        if toggle is not None:
            yield 0, Content(toggle).stylize(Style.from_meta({"@click": "pause"}))
        if transfer.state != "stopping":
            yield 1, Content("cancel").stylize(Style.from_meta({"@click": "cancel"}))


class DownloadList(VerticalScroll, can_focus=False):
    """Hidden where nothing is fetched or packed."""

    DEFAULT_CSS = """
    DownloadList { height: auto; max-height: 7; border-top: solid $border-blurred; display: none; }
    """

    def show(self, transfers: Sequence[Download]) -> None:
        """All that there are."""
        views = list(self.query(DownloadView))
        for view, transfer in zip(views, transfers, strict=False):
            view.transfer = transfer
        for view in views[len(transfers) :]:
            view.remove()
        self.mount(*(DownloadView(transfer) for transfer in transfers[len(views) :]))
        self.display = bool(transfers)
