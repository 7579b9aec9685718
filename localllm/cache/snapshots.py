"""Snapshots of recurrent states, by the page behind which they were taken: in memory, and on the disk beside the pages.

On the disk a snapshot is one more page that hangs on its own: it is verified, evicted and quarantined like any other,
and goes before the page that it stands behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torch import Tensor

from localllm.cache.disk import DiskTier
from localllm.cache.page_file import PageKey
from localllm.cache.page_folder import snapshot_digest
from localllm.offload.streaming.host_buffer import host_buffer


def snapshot_key(page: PageKey) -> PageKey:
    """Return the key of the snapshot behind a page."""
    return PageKey(snapshot_digest(page.digest), page.digest, page.token_ids)


class SnapshotCache:
    """ram_bytes: the most that those in memory may take. num_bytes: of each."""

    def __init__(self, num_bytes: int, ram_bytes: int, disk: DiskTier | None) -> None:
        self.num_bytes, self._ram_bytes, self._disk = num_bytes, ram_bytes, disk
        self._in_ram: OrderedDict[bytes, Tensor] = OrderedDict()  # by the page's digest, the least useful first

    @property
    def ram_used_bytes(self) -> int:
        return len(self._in_ram) * self.num_bytes

    def has(self, page: PageKey) -> bool:
        """Return whether there is a snapshot behind a page; on the disk it may prove to be damaged."""
        return page.digest in self._in_ram or self._is_on_disk(page)

    def get(self, page: PageKey) -> Tensor | None:
        """Return the snapshot behind a page, uint8 [num_bytes]; None where there is none, or no longer. Raises
        MemoryError."""
        if page.digest in self._in_ram:
            self._in_ram.move_to_end(page.digest)
            return self._in_ram[page.digest]
        if self._disk is None or not self._is_on_disk(page):
            return None
        payload = host_buffer(self.num_bytes)[: self.num_bytes]
        if not self._disk.read([snapshot_key(page)], [payload.numpy().data]):
            return None
        self._keep(page, payload)
        return payload

    def put(self, page: PageKey, payload: Tensor) -> None:
        """Keep a snapshot that nobody changes any more, uint8 [num_bytes] on the host."""
        if page.digest not in self._in_ram:
            self._keep(page, payload)
        if self._disk is not None and self._disk.holds(page.digest):
            self._disk.put(snapshot_key(page), payload.numpy().data)

    def persist(self, pages: Iterable[PageKey]) -> None:
        """Write what is in memory behind these pages and not on the disk, whose queue may have been full."""
        for page in pages:
            if page.digest in self._in_ram and not self._is_on_disk(page):
                self.put(page, self._in_ram[page.digest])

    def touch(self, pages: Iterable[PageKey]) -> None:
        """Mark the snapshots behind these pages as used, in this order."""
        for page in pages:
            if page.digest in self._in_ram:
                self._in_ram.move_to_end(page.digest)
            if self._disk is not None:
                self._disk.touch([snapshot_key(page).digest])

    def forget(self, page: PageKey) -> None:
        """Free the memory of the snapshot behind a page that is gone."""
        self._in_ram.pop(page.digest, None)

    def limit_ram(self, ram_bytes: int) -> bool:
        """Keep no more than that in memory from now on. Returns whether anything had to go."""
        self._ram_bytes, before = ram_bytes, len(self._in_ram)
        self._make_room(0)
        return len(self._in_ram) < before

    def _keep(self, page: PageKey, payload: Tensor) -> None:
        if self.num_bytes <= self._ram_bytes:
            self._make_room(self.num_bytes)
            self._in_ram[page.digest] = payload

    def _make_room(self, num_bytes: int) -> None:
        while self._in_ram and self.ram_used_bytes + num_bytes > self._ram_bytes:
            self._in_ram.popitem(last=False)

    def _is_on_disk(self, page: PageKey) -> bool:
        return self._disk is not None and snapshot_key(page).digest in self._disk
