"""Pages of running sequences that a GPU has no room for, in the host's memory, page-locked where the system gives that.

An extent is one run of memory with the parts of one layer together, so that a layer is copied in as few pieces as there
are extents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.cache.extents import EXTENT_PAGES, Extent, ExtentStore
from localllm.cache.pages import Page
from localllm.kernels.kv_page import PageLayout
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.pinned import Pinning


class HostSpill(ExtentStore):
    """Memory is registered with the driver, and not allocated by torch, which would round an extent of 35 MB up to
    64."""

    def __init__(
        self, device: torch.device, layout: PageLayout, num_layers: int, extent_pages: int = EXTENT_PAGES
    ) -> None:
        """device: the GPU."""
        super().__init__(layout, num_layers, extent_pages, layout.layer_bytes, extent_pages * layout.layer_bytes)
        self._device, self._pinning = device, Pinning(device)
        self._memory: dict[int, Tensor] = {}  # by slot: uint8 [layers, pages, layer_bytes]

    def write(self, pages: Sequence[Page]) -> Extent:
        """Begin to copy `extent_pages` pages, behind what has been launched so far. Raises what torch does where there
        is no memory."""
        slot = self._take_slot()
        try:
            if slot not in self._memory:
                run = host_buffer(self.num_layers * self.part_bytes)
                self._memory[slot] = run.view(self.num_layers, self.extent_pages, self.layer_bytes)
                self._pinning.add(run)
            for row, part in enumerate(self._memory[slot]):
                part.copy_(torch.stack([page.layer(row) for page in pages]), non_blocking=True)
        except BaseException:
            self._free.append(slot)
            raise
        return Extent(slot)

    def are_readable(self, extents: Sequence[Extent]) -> bool:
        """Return whether the GPU's kernels may read these where they are."""
        return all(self._pinning.is_readable(self._memory[extent.slot]) for extent in extents)

    def part(self, row: int, extent: Extent) -> Tensor:
        """Return an extent's pages in a layer, uint8 [pages, layer_bytes]."""
        return self._memory[extent.slot][row]

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, those that hold nothing now as well."""
        return sum(memory.nbytes for memory in self._memory.values())

    def close(self) -> None:
        """Free the memory. No extent is left, and nothing is copied any more."""
        self._pinning.close()
        self._pinning = Pinning(self._device)
        self._memory.clear()
        self._free.clear()
        self._num_slots = 0
