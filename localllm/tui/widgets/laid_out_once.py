"""Widgets that are where they belong after one layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Size

if TYPE_CHECKING:
    from textual.widget import Widget
else:  # a widget would stand before the widget among those whose styles are inherited
    Widget = object


class LaidOutOnce(Widget):
    """What is in it depends on its width alone, or on its size where its height is given. Textual lays the screen out a
    second time whenever a size has changed: 27 times a second where 15 are enough, while an answer comes."""

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        old, new = self._size, size
        if self.styles.is_auto_height:
            old, new = old.with_height(0), new.with_height(0)
        return super()._size_updated(size, virtual_size, container_size, layout and old != new)
