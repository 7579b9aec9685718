"""Containers that cost little to draw and to lay out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region, Size
from textual.strip import Strip

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
