"""The pages of the KV cache: who owns each one, and where its bytes are.

A page holds 64 tokens of all layers that share a window, each layer's part on the device where its attention is
computed. Pages are counted, not copied, when sequences share them; one that nobody owns any more stays where it is, as
long as it is known to the prefix cache and its room is not needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.kv_page import PageLayout
from localllm.kernels.page_locked import copy_event, page_locked
from localllm.offload.streaming.disk_read import PAGE_BYTES
from localllm.offload.streaming.host_buffer import HUGE_PAGE_BYTES, host_buffer

HOST = torch.device("cpu")
_SLAB_PAGES = 16  # that a pool grows by, at least


class Page:
    """Room for 64 tokens.

    owners: the block tables that have it.
    spares: pages that are reserved for those owners who let go of it before the others do.
    is_sealed: full, known by its tokens, never changed.
    """

    __slots__ = ("is_sealed", "owners", "parts", "pool", "run", "spares")

    def __init__(self, pool: PagePool, parts: dict[torch.device, Tensor], run: Tensor | None) -> None:
        self.pool = pool
        self.parts = parts  # uint8 [layers there, layer_bytes] on each device
        self.run = run  # uint8: all of it and what fills the disk's last block, where the host has all layers
        self.owners = self.spares = 0
        self.is_sealed = False

    def layer(self, index: int) -> Tensor:
        """uint8 [layer_bytes] of the pool's layer so numbered."""
        device, row = self.pool.rows[index]
        return self.parts[device][row]

    @property
    def whole(self) -> Tensor | None:
        """uint8 [page_bytes]: all layers in order, where one device has them."""
        return next(iter(self.parts.values())).view(-1) if len(self.parts) == 1 else None

    def write_to(self, payload: Tensor) -> int:
        """Copy all layers in order into `payload`, uint8; return the number of bytes."""
        payload = payload[: self.pool.page_bytes]
        if (whole := self.whole) is not None:
            self.pool.ferry.copy(whole, payload)
        else:
            for index, row in enumerate(payload.view(-1, self.pool.layout.layer_bytes)):
                row.copy_(self.layer(index))
        return self.pool.page_bytes

    def read_from(self, payload: Tensor) -> None:
        """payload: uint8 [page_bytes], which may be written over afterwards."""
        if (whole := self.whole) is not None:
            self.pool.ferry.copy(payload, whole)
        else:
            for index, row in enumerate(payload.view(-1, self.pool.layout.layer_bytes)):
                self.layer(index).copy_(row)

    def copy_from(self, other: Page) -> None:
        for device, part in self.parts.items():
            part.copy_(other.parts[device])


class Ferry:
    """Carries pages between the host's memory and a GPU's, through two places in locked memory: the next page is
    written there while the one before is on its way, and nobody waits for what goes to the GPU."""

    def __init__(self) -> None:
        self._places: list[tuple[Tensor, Any]] = []  # with an event: the last copy of that place has ended
        self._is_refused = False  # the system locks no memory for it
        self._used = 0

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Copy uint8 [n]. When this returns `source` may be written over, and what comes to the host is there."""
        device = source.device if into.device == HOST else into.device
        place = self._place(device, source.nbytes) if HOST in (source.device, into.device) else None
        if place is None:
            into.copy_(source)
            return
        room, copied = place
        stream = torch.cuda.current_stream(device)
        if into.device == HOST:
            room.copy_(source, non_blocking=True)
            copied.record(stream)
            copied.synchronize()
            into.copy_(room)
        else:
            copied.synchronize()
            room.copy_(source)
            into.copy_(room, non_blocking=True)
            copied.record(stream)

    def _place(self, device: torch.device, num_bytes: int) -> tuple[Tensor, Any] | None:
        if device.type != "cuda" or self._is_refused:
            return None
        if not self._places or self._places[0][0].nbytes < num_bytes:
            rooms = page_locked((2, num_bytes), torch.uint8, device)
            self._is_refused = not rooms.is_pinned()
            if self._is_refused:
                return None
            self._places = [(room, copy_event()) for room in rooms]
        self._used += 1
        room, copied = self._places[self._used % 2]
        return room[:num_bytes], copied


class PagePool:
    """Pages of one kind. layers: how many have a part in each; it grows when more is reserved than it has.

    `evict` is told of a sealed page whose room is taken for another.
    """

    def __init__(
        self,
        layout: PageLayout,
        devices: Sequence[torch.device],
        ferry: Ferry,
        is_shared: bool = False,
    ) -> None:
        """devices: of each layer. is_shared: all layers use the same bytes, one after the other."""
        self.layout = layout
        self.is_shared = is_shared
        self.ferry = ferry
        self.evict: Callable[[Page], None] = lambda _page: None
        self.free: list[Page] = []
        self.idle: OrderedDict[Page, None] = OrderedDict()  # sealed and owned by nobody, the least useful first
        self.reserved = 0  # of the free and the idle ones: promised
        self.pages: list[Page] = []
        self._place(devices)

    def _place(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        seen: Counter[torch.device] = Counter()
        rows = []
        for device in devices:
            rows.append((device, 0 if self.is_shared else seen[device]))
            seen[device] += 1
        self.rows = tuple(rows)  # of each layer: device and row there
        self._counts = {device: 1 if self.is_shared else count for device, count in seen.items()}

    @property
    def page_bytes(self) -> int:
        return sum(self._counts.values()) * self.layout.layer_bytes

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.page_bytes

    def reserve(self, count: int) -> None:
        """Promise so many pages. Raises what torch does where there is no memory, and has promised nothing then."""
        missing = self.reserved + count - len(self.free) - len(self.idle)
        if missing > 0:
            self._grow(max(missing, min(_SLAB_PAGES, missing * 2)))
        self.reserved += count

    def release(self, count: int) -> None:
        """Take a promise back."""
        self.reserved -= count
        assert self.reserved >= 0

    def shrink(self) -> None:
        """Drop free pages that were promised to nobody. The memory of a slab is freed when all of its pages are
        dropped."""
        unpromised = len(self.free) + len(self.idle) - self.reserved
        gone = set(self.free[: min(unpromised, len(self.free))])  # what was used the longest ago, or never
        self.free = [page for page in self.free if page not in gone]
        self.pages = [page for page in self.pages if page not in gone]

    def release_all(self) -> None:
        """Drop all pages; nobody uses any of them any more."""
        self.evict = lambda _page: None
        self.pages, self.free, self.reserved = [], [], 0
        self.idle.clear()

    def take(self) -> Page:
        """Take a reserved page, for a block table to write into."""
        assert self.reserved > 0 and (self.free or self.idle), "no page is taken that was not reserved"
        self.reserved -= 1
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            self.evict(page)
            page.is_sealed = False
        page.owners = 1
        return page

    def share(self, page: Page) -> None:
        """Let one more block table have a page, in the place of one that was reserved for it."""
        self.reserved -= 1
        if page.owners == 0:
            del self.idle[page]
        page.owners += 1

    def drop(self, page: Page, *, keeps_promise: bool = False) -> None:
        """Let a block table go of a page. keeps_promise: it will want another one; where others still have this one,
        memory for it may be missing. Then this raises what torch does, and nothing has changed."""
        if page.owners > 1 and keeps_promise:
            if page.spares:
                page.spares -= 1
            else:
                self.reserve(1)
        page.owners -= 1
        assert page.owners >= 0
        if page.spares and page.spares >= page.owners:  # the last owner needs none
            page.spares -= 1
            self.reserved -= 1
        if page.owners == 0:
            if page.is_sealed:
                self.idle[page] = None
            else:
                self.free.append(page)
            self.reserved += keeps_promise

    def _grow(self, count: int) -> None:
        num_bytes = {device: rows * self.layout.layer_bytes for device, rows in self._counts.items()}
        with torch.inference_mode(False):  # a forward may need more of them, and others write to them outside of it
            slabs = {device: _new_slab(count, size, device) for device, size in num_bytes.items()}
        fresh = []
        for i in range(count):
            parts = {
                device: slab[i, : num_bytes[device]].view(-1, self.layout.layer_bytes) for device, slab in slabs.items()
            }
            fresh.append(Page(self, parts, slabs[HOST][i] if set(slabs) == {HOST} else None))
        self.pages += fresh
        self.free[:0] = reversed(fresh)  # what was used before is in memory already

    def move(self, devices: Sequence[torch.device]) -> None:
        """Move each layer's parts to these devices. Where there is no memory, raise what torch does and move
        nothing."""
        if tuple(devices) == self.devices:
            return
        other = PagePool(self.layout, devices, self.ferry, self.is_shared)
        other._grow(len(self.pages))
        for page, target in zip(self.pages, other.pages, strict=True):
            if not page.owners and not page.is_sealed:
                continue
            if (source := page.whole) is not None and (into := target.whole) is not None:
                self.ferry.copy(source, into)
            else:
                for old, new in zip(self.rows, other.rows, strict=True):
                    target.parts[new[0]][new[1]].copy_(page.parts[old[0]][old[1]])
        for page, target in zip(self.pages, other.pages, strict=True):
            page.parts, page.run = target.parts, target.run
        self._place(devices)


def _new_slab(count: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [count, num_bytes, rounded up to blocks of the disk]: on the host a page is read to where it is used."""
    padded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    if device != HOST:
        return torch.empty((count, padded), dtype=torch.uint8, device=device)
    # In huge pages, where it is as large as one: what is read from the disk goes to memory that nobody has touched yet.
    room = (
        -(-count * padded // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if count * padded >= HUGE_PAGE_BYTES else count * padded
    )
    return host_buffer(room)[: count * padded].view(count, padded)
