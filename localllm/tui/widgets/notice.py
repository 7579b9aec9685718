"""The lines above the composer: the progress of what runs, notes that go by themselves, an error that stays."""

from __future__ import annotations

from textual import events
from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from localllm.chat.text import error_rows, one_line
from localllm.errors import LocalLLMError
from localllm.tui.bars import bar

_BAR = 24  # columns


class Activity(Widget):
    """One line of progress; hidden where nothing runs."""

    DEFAULT_CSS = "Activity { height: 1; padding: 0 1; color: $text-muted; display: none; }"
    text = reactive("")
    share: reactive[float | None] = reactive(None)

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show `done` of `total`; 0 where they are not known."""
        self.text = one_line(text)
        self.share = done / total if total else None
        self.display = True

    def clear(self) -> None:
        self.display = False

    def render(self) -> Content:
        if self.share is None:
            return Content(f"{self.text} …")
        return bar(self.share, _BAR) + Content(f" {self.share:4.0%}  {self.text}")


_NOTE_S = 8.0
_MOST_NOTES = 4  # lines; the oldest go


class Notice(Static):
    DEFAULT_CSS = """
    Notice {
        height: auto; max-height: 12; padding: 0 1; display: none; color: $text-muted;
        &.-error { border-left: outer $error; background: $error-muted; color: $foreground; }
        &.-shown { display: block; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._timer: Timer | None = None
        self._notes: list[Content] = []
        self.error: LocalLLMError | None = None

    def note(self, text: str, *, is_warning: bool = False, for_s: float = _NOTE_S) -> None:
        """Show a line, below an error that is shown."""
        note = Content.styled(one_line(text), "$text-warning" if is_warning else "")
        self._show_notes([*self._notes, note][-_MOST_NOTES:], for_s)

    def lines(self, lines: list[str]) -> None:
        """Show several lines in place of the present ones."""
        self._show_notes([Content(one_line(line)) for line in lines], _NOTE_S)

    def show_error(self, error: LocalLLMError) -> None:
        """Show an error until it is closed."""
        self.error = error
        self._draw()

    def withdraw(self, text: str) -> None:
        """Remove a note that is no longer true."""
        kept = [note for note in self._notes if note.plain != text]
        if len(kept) < len(self._notes):
            self._notes = kept
            self._draw()

    def close_error(self) -> None:
        """Remove the error. Notes stay until their time is over: a warning is shown once."""
        self.error = None
        self._draw()

    def close(self) -> bool:
        """Remove the error, or without one the notes. Returns False where nothing was shown."""
        if self.error is not None:
            self.close_error()
            return True
        was_shown = bool(self._notes)
        self._end_notes()
        return was_shown

    def clear(self) -> None:
        """Remove the error and the notes."""
        self.error = None
        self._end_notes()

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.close()

    def _show_notes(self, notes: list[Content], for_s: float) -> None:
        self._notes = notes
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(for_s, self._end_notes)
        self._draw()

    def _end_notes(self) -> None:
        self._notes = []
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self._draw()

    def _draw(self) -> None:
        rows = self._notes
        if self.error is not None:
            shown = [
                Content.styled(f"{label + ':':<7}", "bold") + Content(value) for label, value in error_rows(self.error)
            ]
            rows = [*shown, Content.styled("esc closes", "$foreground-muted"), *rows]
        self.update(Content("\n").join(rows))
        self.set_class(bool(rows), "-shown")
        self.set_class(self.error is not None, "-error")
