"""Containers of which nothing is to be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region
from textual.strip import Strip

if TYPE_CHECKING:
    from textual.widget import Widget as Container
else:  # a widget would stand before the container among those whose styles are inherited
    Container = object


class Clear(Container):
    """What is below shows through. Textual draws a background line by line under all that covers it, and again when its
    height changes: three containers inside each other took half of each picture of an answer that is being written."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return super().render_lines(crop) if self.has_focus else []
