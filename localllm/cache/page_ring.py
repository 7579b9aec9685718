"""Pages of running sequences on their way from the disk to the layer that needs them.

A ring of two places: while one layer attends, the parts of the next one are read. Behind the last layer comes the first
one of the next step, so that a long answer reads all the time. A page that is on the disk has its address changed for
each layer; who attends reads the same bytes as if it had never left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from localllm.cache.page_slots import PageSlots
from localllm.cache.pages import HOST
from localllm.cache.spill_file import Extent, SpillFile
from localllm.offload.streaming.disk_read import READERS
from localllm.offload.streaming.disk_stream import StreamClock
from localllm.offload.streaming.host_buffer import HUGE_PAGE_BYTES, host_buffer

_PLACES = 2


class Spilled(Protocol):
    """A sequence of which pages are on the disk: those behind the first one, in each group of layers."""

    @property
    def extents(self) -> Mapping[int, Sequence[Extent]]: ...

    @property
    def num_spilled(self) -> int: ...

    @property
    def num_bounded(self) -> int: ...

    def addresses(self, index: int, device: torch.device) -> Tensor: ...


@dataclass(frozen=True)
class _Lap:
    """What is read again and again: the layers in their order, and of each group of layers the extents."""

    layers: tuple[int, ...] = ()
    extents: Mapping[int, tuple[Extent, ...]] = field(default_factory=dict)

    def bytes_of(self, group: int, file: SpillFile) -> int:
        return len(self.extents[group]) * file.part_bytes


class PageRing:
    """Brings the parts of one layer after the other. One forward at a time.

    files: of each group of layers whose pages may leave memory.
    clock: bytes that were read, and how long a layer waited for them.
    """

    def __init__(self, files: Mapping[int, SpillFile], places: Sequence[tuple[int, int]], slot_pages: int = 0) -> None:
        """places: of each layer, its group and its number there. slot_pages: for so many pages there are slots, where
        tokens choose."""
        self._files, self._places = files, places
        self.clock = StreamClock()
        self._slots = {
            group: PageSlots(file, slot_pages * file.num_layers * file.stride, self.clock)
            for group, file in files.items()
            if slot_pages
        }
        self.brings = False  # as the last `begin` has it: pages come one by one
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="pages")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lap = _Lap()
        self._reads: list[list[Future[None]]] = [[] for _ in range(_PLACES)]
        self._index = 0  # of the layer that is next, counted on over the laps
        self._offsets: dict[tuple[Spilled, int], Tensor] = {}  # where pages begin in a place: int64 [pages on the disk]
        self._held: int | None = None

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + sum(slots.nbytes for slots in self._slots.values())

    def begin(self, layers: Sequence[int], kvs: Sequence[Spilled], *, chooses: bool = False) -> None:
        """A forward of these sequences begins, through these layers. chooses: its tokens choose the pages that they
        attend to, and the caller calls `bring` for those. Raises MemoryError."""
        spilled = [*dict.fromkeys(kv for kv in kvs if kv.num_spilled)]
        extents = {group: tuple(dict.fromkeys(e for kv in spilled for e in kv.extents[group])) for group in self._files}
        lap = _Lap(tuple(layer for layer in layers if self._places[layer][0] in self._files), extents)
        self.brings = chooses and bool(self._slots) and all(kv.num_bounded > kv.num_spilled for kv in spilled)
        if self.brings:
            self.clear(frees=True)
            self._number(spilled)
            return
        for slots in self._slots.values():
            slots.clear()
        self._offsets = {(kv, group): self._offsets_of(kv, group, lap) for kv in spilled for group in self._files}
        if lap == self._lap and self._index % len(lap.layers) == 0:
            return
        self.clear()
        place_bytes = max(lap.bytes_of(group, file) for group, file in self._files.items())
        if self._memory.nbytes < _PLACES * place_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)
            room = -(-_PLACES * place_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._memory = host_buffer(room)
        self._lap = lap
        for index in range(_PLACES):
            self._read(index)

    def _number(self, kvs: Sequence[Spilled]) -> None:
        """Give pages that are on the disk their numbers in place of addresses."""
        for kv in kvs:
            for group, file in self._files.items():
                firsts = torch.tensor([extent.slot * file.extent_pages for extent in kv.extents[group]])
                numbers = (firsts[:, None] + torch.arange(1, 1 + file.extent_pages)).flatten()
                kv.addresses(group, HOST)[1 : 1 + len(numbers)] = numbers

    def bring(self, layer: int, chosen: Tensor) -> None:
        """Write the addresses of a layer's pages in place of their numbers, int64 [n], once they are in memory. Raises
        LocalLLMError, and MemoryError."""
        group, row = self._places[layer]
        if group in self._slots:
            self._slots[group].bring(row, chosen)

    def forget(self, group: int, extent: Extent) -> None:
        """An extent is new: what was in memory of its place in the file is of another one."""
        if group in self._slots:
            pages = self._files[group].extent_pages
            self._slots[group].forget(extent.slot * pages, pages)

    @contextmanager
    def held(self, layer: int) -> Iterator[None]:
        """Inside, the pages of a layer have addresses. Raises LocalLLMError where the disk does not give them."""
        group, row = self._places[layer]
        if group not in self._files or self.brings:
            yield
            return
        assert self._lap.layers[self._index % len(self._lap.layers)] == layer, "layers are asked for in their order"
        started, file = time.perf_counter(), self._files[group]
        for read in self._reads[self._index % _PLACES]:
            read.result()
        self.clock.wait_s += time.perf_counter() - started
        self.clock.bytes_read += self._lap.bytes_of(group, file)
        base = self._place(self._index).data_ptr() - row * file.layer_bytes
        for (kv, of), offsets in self._offsets.items():
            if of == group:
                kv.addresses(group, HOST)[1 : 1 + len(offsets)] = offsets + base
        self._held = layer
        try:
            yield
        finally:
            self._held = None
        self._index += 1
        self._read(self._index + _PLACES - 1)

    def parts(self, kv: Spilled, layer: int) -> list[Tensor]:
        """Return the parts of a sequence's pages that are on the disk, uint8 [layer_bytes] each, in a layer that is
        held."""
        assert self._held == layer, "only the parts of one layer are in memory"
        group, _ = self._places[layer]
        place, num_bytes = self._place(self._index), self._files[group].layer_bytes
        return [place[begin : begin + num_bytes] for begin in self._offsets[kv, group].tolist()]

    def clear(self, *, frees: bool = False) -> None:
        """Read nothing ahead any more. frees: give the memory back, too."""
        self._drain()
        self._lap, self._index = _Lap(), 0
        if frees:
            self._offsets.clear()
            self._memory = torch.empty(0, dtype=torch.uint8)

    def _offsets_of(self, kv: Spilled, group: int, lap: _Lap) -> Tensor:
        file, number = self._files[group], {extent: n for n, extent in enumerate(lap.extents[group])}
        begins = torch.tensor([number[extent] * file.part_bytes for extent in kv.extents[group]])
        return (begins[:, None] + torch.arange(file.extent_pages) * file.stride).flatten()

    def _place(self, index: int) -> Tensor:
        size = self._memory.nbytes // _PLACES
        return self._memory[index % _PLACES * size :][:size]

    def _read(self, index: int) -> None:
        """Begin to read the parts of the layer so numbered."""
        group, row = self._places[self._lap.layers[index % len(self._lap.layers)]]
        file, place = self._files[group], self._place(index).numpy().data
        pieces = file.pieces(row, self._lap.extents[group])
        self._reads[index % _PLACES] = [
            self._readers.submit(file.read, begin, place[at : at + count]) for begin, at, count in pieces
        ]

    def _drain(self) -> None:
        """Wait for what is being read: memory that it is read into is another's afterwards."""
        for reads in self._reads:
            for read in reads:
                if not read.cancel():
                    read.exception()
            reads.clear()
