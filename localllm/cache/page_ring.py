"""Pages of running sequences on their way from where they rest to the layer that needs them.

A ring of two places: while one layer attends, the parts of the next one are read from the disk, or copied to a GPU.
Behind the last layer comes the first one of the next step, so that a long answer reads all the time. A page that rests
elsewhere has its address changed for each layer; who attends reads the same bytes as if it had never left.

Where tokens choose the pages that they attend to, only those come: from the disk one by one, and from the host's memory
a GPU's kernels read them over the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from localllm.cache.extents import Extent, ExtentStore
from localllm.cache.host_spill import HostSpill
from localllm.cache.page_carriers import PLACES, CardCopies, Carrier, DiskReads
from localllm.cache.page_slots import PageSlots
from localllm.cache.pages import HOST
from localllm.cache.spill_file import SpillFile
from localllm.offload.streaming.disk_stream import StreamClock


class Spilled(Protocol):
    """A sequence of which pages rest elsewhere: those behind the first one, in each group of layers."""

    @property
    def extents(self) -> Mapping[int, Sequence[Extent]]: ...

    @property
    def num_spilled(self) -> int: ...

    @property
    def num_sketched(self) -> int: ...

    @property
    def most_extents(self) -> int:
        """Return how many it has at most, in each group of layers."""

    @property
    def homes(self) -> Sequence[tuple[torch.device, int]]: ...

    def addresses(self, index: int, device: torch.device) -> Tensor: ...


@dataclass(frozen=True)
class _Lap:
    """What is brought again and again: the layers in their order, and of each group of layers the extents."""

    layers: tuple[int, ...] = ()
    extents: Mapping[int, tuple[Extent, ...]] = field(default_factory=dict)


class PageRing:
    """Brings the parts of one layer after the other. One forward at a time.

    stores: of each group of layers whose pages may leave memory. What rests in the host's memory is read where it is by
    a layer whose attention the host computes, and by tokens that choose.
    """

    def __init__(
        self,
        stores: Mapping[int, SpillFile | HostSpill],
        places: Sequence[tuple[int, int]],
        device: torch.device = HOST,
        slot_pages: int = 0,
    ) -> None:
        """places: of each layer, its group and its number there. device: where pages are used. slot_pages: for so many
        pages there are slots, where tokens choose among pages on the disk."""
        self._stores: Mapping[int, ExtentStore] = stores
        self._in_memory = {index: store for index, store in stores.items() if isinstance(store, HostSpill)}
        self._places = places
        self._carrier: Carrier = DiskReads() if device == HOST else CardCopies(device)
        self._slots = {
            group: PageSlots(store, slot_pages * store.num_layers * store.stride, self._carrier.clock)
            for group, store in stores.items()
            if slot_pages and isinstance(store, SpillFile)
        }
        self.brings = False  # as the last `begin` has it: pages come one by one
        self._is_in_place = False  # the same: a GPU reads pages where they rest
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lap = _Lap()
        self._index = 0  # of the layer that is next, counted on over the laps
        self._homes: Sequence[tuple[torch.device, int]] = ()
        # Where pages begin that rest elsewhere, int64 [pages]: in a place, and of the first layer in the host's memory.
        self._offsets: dict[tuple[Spilled, int], Tensor] = {}
        self._rests: dict[tuple[Spilled, int], Tensor] = {}
        self._held: int | None = None
        self.base = 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + sum(slots.nbytes for slots in self._slots.values())

    @property
    def clock(self) -> StreamClock:
        """Bytes that were brought, and how long a layer waited for them."""
        return self._carrier.clock

    def begin(self, layers: Sequence[int], kvs: Sequence[Spilled], *, num_chosen: int = 0) -> None:
        """A forward of these sequences begins, through these layers. num_chosen: the pages that its tokens choose, each
        for itself, where only those are read: the caller calls `bring` for them, or its kernels read them on a GPU; 0:
        all are read. Raises what torch does where there is no memory."""
        self._homes = kvs[0].homes
        spilled = [*dict.fromkeys(kv for kv in kvs if kv.num_spilled)]
        # Kernels alone make sketches: where operators attend in some layer, all pages are brought.
        chooses = num_chosen > 0 and all(kv.num_sketched > kv.num_spilled for kv in spilled)
        self.brings = chooses and bool(self._slots)
        # Kernels read a page for each token that has chosen it, and the ring brings it once.
        is_less = num_chosen < sum(kv.num_spilled for kv in spilled)
        self._is_in_place = chooses and is_less and self._are_readable(spilled)
        if self.brings:
            self._free_places()
            self._number(spilled)
            return
        for slots in self._slots.values():
            slots.clear()
        groups = self._stores
        extents = {group: tuple(dict.fromkeys(e for kv in spilled for e in kv.extents[group])) for group in groups}
        lap = _Lap(tuple(filter(self._is_brought, layers)), extents)
        self._offsets = {(kv, group): self._offsets_of(kv, group, lap) for kv in spilled for group in groups}
        self._rests = {(kv, group): self._rests_of(kv, group) for kv in spilled for group in self._in_memory}
        cards = {self._places[each][0]: self._homes[each][0] for each in layers if self._homes[each][0] != HOST}
        for (kv, group), begins in (self._rests if self._is_in_place else self._offsets).items():
            if group in cards:  # what a GPU's tables have, until a layer's place is known
                kv.addresses(group, cards[group])[1 : 1 + len(begins)] = begins
        if not lap.layers:
            return
        is_next = lap == self._lap and self._index % len(lap.layers) == 0
        if not is_next:
            self.clear()
            self._make_room(lap, spilled)
        self._carrier.begin(is_first=not is_next)
        if not is_next:
            self._lap = lap
            for index in range(PLACES):
                self._bring(index)

    def _number(self, kvs: Sequence[Spilled]) -> None:
        """Give pages that are on the disk their numbers in place of addresses."""
        for kv in kvs:
            for group, file in self._stores.items():
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
            pages = self._stores[group].extent_pages
            self._slots[group].forget(extent.slot * pages, pages)

    @contextmanager
    def held(self, layer: int) -> Iterator[None]:
        """Inside, the pages of a layer have addresses; on a GPU `base` is added to those that its tables have. Raises
        LocalLLMError where the disk does not give them."""
        group, row = self._places[layer]
        if group not in self._stores or self.brings:
            yield
            return
        is_brought, home_row = self._is_brought(layer), self._homes[layer][1]
        if is_brought:
            assert self._lap.layers[self._index % len(self._lap.layers)] == layer, "layers are asked for in their order"
            self._carrier.wait(self._index % PLACES)
        layer_bytes = self._stores[group].layer_bytes
        begins = self._offsets if is_brought else self._rests
        first = self._place(self._index).data_ptr() if is_brought else row * self._stores[group].part_bytes
        self.base = first - home_row * layer_bytes
        if self._homes[layer][0] == HOST:
            for (kv, of), addresses in begins.items():
                if of == group:
                    kv.addresses(group, HOST)[1 : 1 + len(addresses)] = addresses + self.base
        self._held = layer
        try:
            yield
        finally:
            self._held = None
        if is_brought:
            self._carrier.release(self._index % PLACES)
            self._index += 1
            self._bring(self._index + PLACES - 1)

    def parts(self, kv: Spilled, layer: int) -> list[Tensor]:
        """Return the parts of a sequence's pages that rest elsewhere, uint8 [layer_bytes] each, in a layer that is
        held."""
        assert self._held == layer, "only the parts of one layer are there"
        group, row = self._places[layer]
        if not self._is_brought(layer):
            store = self._in_memory[group]
            return [part for extent in kv.extents[group] for part in store.part(row, extent)]
        place, num_bytes = self._place(self._index), self._stores[group].layer_bytes
        return [place[begin : begin + num_bytes] for begin in self._offsets[kv, group].tolist()]

    def clear(self) -> None:
        """Bring nothing ahead any more."""
        self._carrier.drop()
        self._lap, self._index = _Lap(), 0

    def release(self) -> None:
        """Give all memory back; what rests elsewhere is brought again where it is needed."""
        self._free_places()
        for slots in self._slots.values():
            slots.clear()

    def _free_places(self) -> None:
        self.clear()
        self._carrier.drain()
        self._offsets.clear()
        self._rests.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _is_brought(self, layer: int) -> bool:
        """Return whether a layer's pages pass through the ring."""
        group = self._places[layer][0]
        rests_here = group in self._in_memory and (self._is_in_place or self._homes[layer][0] == HOST)
        return group in self._stores and not rests_here

    def _are_readable(self, kvs: Sequence[Spilled]) -> bool:
        """Return whether a GPU's kernels may read these sequences' pages in the host's memory."""
        stores = self._in_memory.items()
        return bool(stores) and all(store.are_readable(kv.extents[group]) for kv in kvs for group, store in stores)

    def _make_room(self, lap: _Lap, spilled: Sequence[Spilled]) -> None:
        """Have memory for a lap; of a GPU's for all that the longest sequence may come to have, as torch keeps each
        smaller run that was freed for a larger one."""
        most = max(kv.most_extents for kv in spilled) if self._in_memory else 0
        place_bytes = max(
            max(len(lap.extents[group]), most) * store.part_bytes for group, store in self._stores.items()
        )
        if self._memory.nbytes < PLACES * place_bytes:
            self._carrier.drain()
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = self._carrier.room(PLACES * place_bytes)

    def _offsets_of(self, kv: Spilled, group: int, lap: _Lap) -> Tensor:
        store, number = self._stores[group], {extent: n for n, extent in enumerate(lap.extents[group])}
        begins = torch.tensor([number[extent] * store.part_bytes for extent in kv.extents[group]])
        return _pages_of(begins, store)

    def _rests_of(self, kv: Spilled, group: int) -> Tensor:
        store = self._in_memory[group]
        return _pages_of(torch.tensor([store.part(0, extent).data_ptr() for extent in kv.extents[group]]), store)

    def _place(self, index: int) -> Tensor:
        size = self._memory.nbytes // PLACES
        return self._memory[index % PLACES * size :][:size]

    def _bring(self, index: int) -> None:
        """Begin to bring the parts of the layer so numbered."""
        group, row = self._places[self._lap.layers[index % len(self._lap.layers)]]
        self._carrier.bring(index % PLACES, self._stores[group], row, self._lap.extents[group], self._place(index))


def _pages_of(begins: Tensor, store: ExtentStore) -> Tensor:
    """Return where each page begins of extents that begin there, int64 [pages]."""
    return (begins[:, None] + torch.arange(store.extent_pages) * store.stride).flatten()
