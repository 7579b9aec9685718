"""What happened, above the composer: a line that goes by itself, or an error that stays until it is closed."""

from __future__ import annotations

from textual import events
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from localllm.errors import LocalLLMError
from localllm.frontend.text import error_rows, one_line

_NOTE_S = 8.0
_MOST_NOTES = 4  # lines; the oldest go


class Notice(Static):
    DEFAULT_CSS = """
    Notice {
        height: auto;
        max-height: 10;
        padding: 0 1;
        display: none;
        color: $text-muted;
        &.-warning { color: $text-warning; }
        &.-error { border-left: outer $error; background: $error-muted; color: $foreground; }
        &.-shown { display: block; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._timer: Timer | None = None
        self._notes: list[str] = []
        self.error: LocalLLMError | None = None

    def note(self, text: str, *, is_warning: bool = False) -> None:
        """A line; beside an error it waits until that is closed."""
        self._notes = [*self._notes, one_line(text)][-_MOST_NOTES:]
        if self.error is None:
            self.set_class(is_warning, "-warning")
            self._show_notes()

    def lines(self, lines: list[str]) -> None:
        """Several, in the place of those that are there."""
        self._notes = [one_line(line) for line in lines]
        if self.error is None:
            self.remove_class("-warning")
            self._show_notes()

    def tell(self, error: LocalLLMError) -> None:
        """An error: it stays until it is closed."""
        self.error = error
        self._stop_timer()
        rows = [Content.styled(f"{label + ':':<7}", "bold") + Content(value) for label, value in error_rows(error)]
        self.update(Content("\n").join([*rows, Content.styled("esc closes", "$foreground-muted")]))
        self.add_class("-shown", "-error")
        self.remove_class("-warning")

    def close(self) -> bool:
        """Takes it away; False where nothing was shown."""
        was_shown = self.has_class("-shown")
        self.error = None
        self._notes = []
        self._stop_timer()
        self.remove_class("-shown", "-error", "-warning")
        return was_shown

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.close()

    def _show_notes(self) -> None:
        self.update(Content("\n".join(self._notes)))
        self.add_class("-shown")
        self._stop_timer()
        self._timer = self.set_timer(_NOTE_S, self.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
