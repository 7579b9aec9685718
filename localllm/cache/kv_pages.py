"""All pages of a model's KV cache: pools of them for each group of layers, and where they rest that memory has no room
for. Knows of the sequences that have some only what `PageHolder` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from localllm.cache.host_spill import HostSpill
from localllm.cache.kv_eviction import Eviction
from localllm.cache.kv_format import KVFormat
from localllm.cache.layer_group import LayerGroup, Spill
from localllm.cache.page_masses import PageMasses
from localllm.cache.page_ring import PageRing
from localllm.cache.pages import HOST, Ferry, PagePool
from localllm.cache.spill_file import SpillFile
from localllm.cache.states import SequenceState
from localllm.kernels.kv_page import GROUP, KVShape, layer_groups, pages_of
from localllm.kernels.page_choice import FIXED_PAGES, PageSketches
from localllm.kernels.state_shapes import StateShape


class PageHolder(Protocol):
    """A sequence that has some of the pages. nbytes: of what it has beside them."""

    @property
    def nbytes(self) -> int: ...

    @property
    def num_spilled(self) -> int: ...

    def move_states(self, devices: Sequence[torch.device]) -> None: ...

    def readdress(self) -> None: ...


class KVPages:
    """All pages of a model's KV cache, and the sequences that have some."""

    def __init__(
        self,
        kv_format: KVFormat,
        *,
        windows: Sequence[int | None],
        devices: Sequence[torch.device],
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        state_shapes: Sequence[StateShape] = (),
        state_devices: Sequence[torch.device] = (),
        spill: Spill | None = None,
        chosen_pages: int | None = None,
        eviction: Eviction | None = None,
    ) -> None:
        """windows, devices, shapes: of each layer with keys and values. state_shapes, state_devices: of each layer with
        a state. spill: where pages rest that memory has no room for; None: they stay. chosen_pages: that a token
        attends to, beside a few, where it does not attend to all of them. eviction: what leaves of a long sequence;
        nothing is spilled or chosen beside it."""
        self.format, self.chosen_pages, self.eviction = kv_format, chosen_pages, eviction
        self._state_shapes, self.state_devices = tuple(state_shapes), tuple(state_devices)
        ferry = Ferry()

        def new_group(layers: tuple[int, ...]) -> LayerGroup:
            shape, window = (shapes[layers[0]], windows[layers[0]]) if layers else (KVShape(1, GROUP), None)
            dense, coded = kv_format.layouts(shape, dtype)
            homes = [devices[layer] for layer in layers]
            sealed = None if coded is None else PagePool(coded, homes, ferry)
            shared = PagePool(dense, homes, ferry, is_shared=True)
            rules = (spill, eviction) if window is None and layers else (None, None)
            return LayerGroup(window, shape, layers, PagePool(dense, homes, ferry), sealed, shared, *rules)

        slot_pages = 0
        if spill is not None and chosen_pages is not None and spill.device == HOST:
            # Most of the memory is for what is chosen, old or new; a GPU reads it where it rests.
            newest = spill.resident_tokens // 4
            slot_pages = pages_of(spill.resident_tokens - newest)
            spill = replace(spill, resident_tokens=newest)
        # Where no layer has keys and values, pages without content stand for the tokens that states have taken in.
        self.groups = tuple(map(new_group, layer_groups(windows, shapes) or ((),)))
        # Of each layer: its group, and its number there.
        self.places = tuple(
            next((g, group.layers.index(layer)) for g, group in enumerate(self.groups) if layer in group.layers)
            for layer in range(len(windows))
        )
        self.sequences: set[PageHolder] = set()
        self.stores: dict[int, SpillFile | HostSpill] = {}
        self.ring: PageRing | None = None
        if spill is not None:
            spilling = [(index, group) for index, group in enumerate(self.groups) if group.spill is not None]
            self.stores = {index: _new_store(group, spill, by_page=slot_pages > 0) for index, group in spilling}
            self.ring = PageRing(self.stores, self.places, spill.device, slot_pages) if self.stores else None

    @property
    def nbytes(self) -> int:
        ring_bytes = 0 if self.ring is None else self.ring.nbytes
        held = sum(sequence.nbytes for sequence in self.sequences)
        return held + ring_bytes + sum(pool.nbytes for group in self.groups for pool in group.pools)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that pages rest in, of those that a GPU has no room for."""
        return sum(store.held_bytes for store in self.stores.values() if isinstance(store, HostSpill))

    @property
    def homes(self) -> Sequence[tuple[torch.device, int]]:
        """For each layer, the device of its keys and values, and the number of its part in a page's bytes there."""
        return [self.groups[group].sealed.rows[row] for group, row in self.places]

    @property
    def is_on_host(self) -> bool:
        pools = [pool for group in self.groups for pool in group.pools]
        return all(
            device == HOST for devices in (self.state_devices, *(p.devices for p in pools)) for device in devices
        )

    def new_masses(self, capacity: int) -> PageMasses | None:
        """Return what counts the attention that the pages of a sequence get; None where none leaves for too little."""
        heads = [group.dense.layout.num_kv_heads for group in self.groups if group.eviction is not None]
        has_any = heads and self.eviction is not None and self.eviction.kind == "heavy"
        return PageMasses(capacity, max(heads)) if has_any else None

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of a snapshot of all states of a sequence; 0 where no layer has any."""
        return sum(shape.snapshot_bytes for shape in self._state_shapes)

    def new_state(self) -> SequenceState | None:
        """Return the states of a sequence that begins; None where no layer has any. Raises what torch does where there
        is no memory."""
        return SequenceState(self._state_shapes, self.state_devices) if self._state_shapes else None

    def new_sketches(self, capacity: int) -> dict[int, PageSketches]:
        """Return room for the sketches of a sequence's pages, for each group of layers whose tokens may choose some of
        them. Raises what torch does where there is no memory."""
        pages = pages_of(capacity)
        if self.chosen_pages is None or pages <= self.chosen_pages + FIXED_PAGES:
            return {}
        whole = [(index, group) for index, group in enumerate(self.groups) if group.window is None and group.layers]
        return {index: PageSketches(group.homes, group.shape, pages) for index, group in whole}

    def move(self, devices: Sequence[torch.device], state_devices: Sequence[torch.device] = ()) -> None:
        """devices, state_devices: of each layer with keys and values, and with a state. Where there is no memory,
        raises what torch does; what has moved stays there."""
        self.state_devices = tuple(state_devices)
        if self.ring is not None:
            self.ring.release()
        try:
            for sequence in self.sequences:
                sequence.move_states(state_devices)
            for group in self.groups:
                for pool in group.pools:
                    pool.move([devices[layer] for layer in group.layers])
        finally:
            for sequence in self.sequences:
                sequence.readdress()

    def end_spill(self) -> None:
        """End what brings pages that rest elsewhere, unless a sequence has some there."""
        if not any(sequence.num_spilled for sequence in self.sequences):
            self.close()

    def close(self) -> None:
        """End what brings pages that rest elsewhere, and free what they rest in: no sequence has any."""
        if self.ring is not None:
            self.ring.release()
        for store in self.stores.values():
            store.close()

    def release(self) -> None:
        """Free all pages, which nobody uses any more. Pages and pools refer to each other: without this their memory
        would wait for the garbage collector."""
        assert not self.sequences
        for group in self.groups:
            for pool in group.pools:
                pool.release_all()

    def shrink(self) -> None:
        """Free memory that was promised to nobody, as far as whole slabs of it hold nothing."""
        for group in self.groups:
            for pool in group.pools:
                pool.shrink()


def _new_store(group: LayerGroup, spill: Spill, *, by_page: bool) -> SpillFile | HostSpill:
    layout, num_layers = group.sealed.layout, len(group.layers)
    if spill.device != HOST:
        return HostSpill(spill.device, layout, num_layers, spill.extent_pages)
    return SpillFile(spill.directory, layout, num_layers, spill.extent_pages, by_page=by_page)
