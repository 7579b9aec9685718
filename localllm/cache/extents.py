"""Extents: consecutive pages of running sequences that rest elsewhere, and who has them."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.kernels.kv_page import PageLayout

EXTENT_PAGES = 16  # 1,024 tokens: of a 1.1B model in INT8 0.5 MB a layer, which a disk reads at its full speed


class Extent:
    """Consecutive pages of a sequence. slot: its number in a store; owners: the sequences that have it."""

    __slots__ = ("owners", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.owners = slot, 1


class ExtentStore:
    """The extents of one group of layers.

    part_bytes: of an extent's pages in one layer.
    stride: from one page to the next one there.
    """

    def __init__(self, layout: PageLayout, num_layers: int, extent_pages: int, stride: int, part_bytes: int) -> None:
        self.extent_pages, self.layer_bytes, self.num_layers = extent_pages, layout.layer_bytes, num_layers
        self.stride, self.part_bytes = stride, part_bytes
        self._free: list[int] = []
        self._num_slots = 0

    def share(self, extents: Sequence[Extent]) -> list[Extent]:
        """Let one more sequence have these."""
        for extent in extents:
            extent.owners += 1
        return [*extents]

    def release(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            extent.owners -= 1
            assert extent.owners >= 0
            if not extent.owners:
                self._free.append(extent.slot)

    @property
    def nbytes(self) -> int:
        """Bytes that hold pages."""
        return (self._num_slots - len(self._free)) * self.num_layers * self.part_bytes

    def _take_slot(self) -> int:
        slot = self._free.pop() if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        return slot
