"""Containers of which nothing is to be seen."""

from __future__ import annotations

from textual.geometry import Region
from textual.strip import Strip

from localllm.tui.widgets.laid_out_once import LaidOutOnce


class Clear(LaidOutOnce):
    """What is below shows through. Textual draws a background line by line under all that covers it, and again when its
    height changes: three containers inside each other took half of each picture of an answer that is being written."""

    def render_lines(self, crop: Region) -> list[Strip]:
        return super().render_lines(crop) if self.has_focus else []
