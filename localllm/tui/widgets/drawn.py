"""A picture that is drawn anew for each width."""

from __future__ import annotations

from collections.abc import Callable

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

Draw = Callable[[int], Content]  # for so many columns


class Chart(Widget):
    """As high as the picture; hidden where there is none."""

    DEFAULT_CSS = """
    Chart { height: auto; width: 1fr; display: none; }
    """

    _draw: Draw | None = None

    def show(self, draw: Draw | None) -> None:
        self._draw = draw
        self.display = draw is not None
        self.refresh(layout=True)

    def render(self) -> Content:
        return self._drawn(self.content_size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._drawn(width).wrap(width)) if width else 0

    def _drawn(self, columns: int) -> Content:
        return Content() if self._draw is None or columns < 1 else self._draw(columns)
