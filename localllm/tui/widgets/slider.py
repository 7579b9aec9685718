"""A choice of one of several values along a line: by a key, a click, or the mouse on the knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual import events
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

_LABEL = 11  # columns
_VALUE = 11
_MOST_TRACK = 44
_GAP = 2  # between two words


@dataclass(frozen=True)
class SliderStop:
    """A value of a slider; None where the model or the machine decides."""

    value: Any
    text: str


class Slider(Widget, can_focus=True):
    """Words side by side, or a track with a knob."""

    index: reactive[int] = reactive(0)

    class Moved(Message):
        pass

    def __init__(self, key: str, label: str, stops: Sequence[SliderStop], index: int, *, is_scale: bool) -> None:
        """key: of the setting. index: the present stop. is_scale: the stops are amounts, shown as a track."""
        super().__init__(id=key)
        self.key = key
        self.stops = stops
        self._label = label
        self._is_scale = is_scale
        self._at_first = index
        self.set_reactive(Slider.index, index)

    @property
    def value(self) -> Any:
        return self.stops[self.index].value

    @property
    def is_moved(self) -> bool:
        return self.index != self._at_first

    def move(self, step: int) -> None:
        self._go(self.index + step)

    def reset(self) -> None:
        self._go(self._at_first)

    def _go(self, index: int) -> None:
        index = max(0, min(len(self.stops) - 1, index))
        if index != self.index:
            self.index = index
            self.set_class(self.is_moved, "-moved")
            self.post_message(self.Moved())

    def render(self) -> Content:
        sign = "▸" if self.has_focus else " "
        label = Content.styled(f"{sign} {self._label}".ljust(_LABEL), "bold $text-accent" if self.has_focus else "")
        return label + (self._track() if self._is_scale else self._words())

    def _track(self) -> Content:
        columns = self._columns
        knob, first = self._column_of(self.index), self._column_of(self._at_first)
        line = ["━" if column < knob else "─" for column in range(columns)]
        line[first] = "┃"  # as it is at present
        line[knob] = "●"
        drawn = Content("".join(line)).stylize("$primary", 0, knob).stylize("bold $text-accent", knob, knob + 1)
        return drawn + Content.styled(f"  {self.stops[self.index].text}", "bold")

    def _words(self) -> Content:
        styles = {self._at_first: "underline", self.index: "bold $text-primary on $primary-muted"}
        words = [Content.styled(stop.text, styles.get(index, "")) for index, stop in enumerate(self.stops)]
        return Content(" " * _GAP).join(words)

    @property
    def _columns(self) -> int:
        return max(2, min(_MOST_TRACK, self.content_size.width - _LABEL - _VALUE))

    def _column_of(self, index: int) -> int:
        return round(index * (self._columns - 1) / max(1, len(self.stops) - 1))

    def _index_at(self, column: int) -> int | None:
        """The stop nearest to a column of the widget; None beside all of them."""
        column -= _LABEL
        if column < 0:
            return None
        if self._is_scale:
            return round(min(column, self._columns - 1) * (len(self.stops) - 1) / (self._columns - 1))
        end = 0
        for index, stop in enumerate(self.stops):
            end += len(stop.text) + _GAP
            if column < end:
                return index
        return None

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self.focus()
        self.capture_mouse()
        self._draw_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self.app.mouse_captured is self:
            self._draw_to(event.x)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()

    def _draw_to(self, x: int) -> None:
        index = self._index_at(x - self.gutter.left)
        if index is not None:
            self._go(index)
