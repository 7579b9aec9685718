"""Pages of running sequences on the disk, in a file that has no name and is gone with the process.

Pages leave memory in extents of `EXTENT_PAGES`, the oldest first. The parts of one layer lie together, extent by
extent, so that a layer is read in a few long pieces.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from localllm.cache.extents import EXTENT_PAGES, Extent, ExtentStore
from localllm.cache.pages import Page
from localllm.errors import LocalLLMError
from localllm.kernels.kv_page import PageLayout
from localllm.offload.streaming.disk_read import PAGE_BYTES, read_into
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.kernel_reads import KernelReads

_MOST_EXTENTS = 1 << 14  # of all sequences: 16 million tokens
_MOST_PIECE_BYTES = 8 << 20  # of a read
_DEPTH = 32  # of the kernel's reads, one page of a layer each
_LONGEST_READ_S = 60.0


class SpillFile(ExtentStore):
    """Parts are whole blocks of the disk, and so are strides where pages are read one by one."""

    def __init__(
        self,
        directory: Path,
        layout: PageLayout,
        num_layers: int,
        extent_pages: int = EXTENT_PAGES,
        *,
        by_page: bool = False,
    ) -> None:
        stride = _whole_blocks(layout.layer_bytes) if by_page else layout.layer_bytes
        super().__init__(layout, num_layers, extent_pages, stride, _whole_blocks(extent_pages * stride))
        self._directory = directory
        self._kernel: KernelReads | None = None
        self._plain = -1  # until the first page leaves memory
        self._direct: int | None = None

    def write(self, pages: Sequence[Page]) -> Extent:
        """Write `extent_pages` pages, whose bytes are on the host. Raises LocalLLMError where the disk takes none."""
        slot = self._take_slot()
        try:
            if slot >= _MOST_EXTENTS:
                raise OSError(f"{_MOST_EXTENTS} extents are the most")
            self._open()
            part = host_buffer(self.part_bytes)
            for row in range(self.num_layers):
                for number, page in enumerate(pages):
                    part[number * self.stride :][: self.layer_bytes] = page.layer(row)
                self._write(self._begin(row, slot), part.numpy().data)
        except BaseException as error:
            self._free.append(slot)
            if not isinstance(error, OSError):
                raise
            num_bytes = self.num_layers * self.part_bytes
            what = f"{num_bytes / 1e6:.1f} MB of keys and values cannot be written to {self._directory}"
            fix = "make room there, or drop --kv-offload"
            raise LocalLLMError(what, why=error.strerror or str(error), fix=fix) from None
        return Extent(slot)

    def pieces(self, row: int, extents: Sequence[Extent]) -> list[tuple[int, int, int]]:
        """Return what must be read for a layer: offset in the file, offset in the result, bytes; long ones where
        extents lie behind each other."""
        found: list[tuple[int, int, int]] = []
        for number, extent in enumerate(extents):
            begin, at = self._begin(row, extent.slot), number * self.part_bytes
            if found and sum(found[-1][::2]) == begin and found[-1][2] + self.part_bytes <= _MOST_PIECE_BYTES:
                found[-1] = (*found[-1][:2], found[-1][2] + self.part_bytes)
            else:
                found.append((begin, at, self.part_bytes))
        return found

    def read(self, begin: int, into: memoryview) -> None:
        """Raises LocalLLMError where the disk does not give what it took."""
        try:
            read_into(self._plain, self._direct, begin, into)
        except (OSError, EOFError) as error:
            what = f"keys and values cannot be read back from {self._directory}"
            raise LocalLLMError(
                what, why=str(error), fix="ask again; without --kv-offload they stay in memory"
            ) from None

    @property
    def num_pages(self) -> int:
        """Pages that the file has places for; those of an extent are numbered from `slot * extent_pages` on."""
        return self._num_slots * self.extent_pages

    def read_pages(self, row: int, pages: Sequence[int], addresses: Sequence[int]) -> None:
        """Read a layer's parts of these pages, `stride` bytes each, to addresses in whole blocks. Raises LocalLLMError
        as `read` does."""
        begins = [
            self._begin(row, page // self.extent_pages) + page % self.extent_pages * self.stride for page in pages
        ]
        done = 0
        if self._kernel is not None and self._direct is not None:
            places = enumerate(zip(begins, addresses, strict=True))
            reads = [(number, self._direct, begin, at, self.stride) for number, (begin, at) in places]
            done = self._kernel_read(reads)
        for begin, at in zip(begins[done:], addresses[done:], strict=True):
            self.read(begin, memoryview((ctypes.c_char * self.stride).from_address(at)).cast("B"))

    def _kernel_read(self, reads: Sequence[tuple[int, int, int, int, int]]) -> int:
        """Have the kernel read as many as it can, `_DEPTH` at a time; return how many from the first on are there."""
        assert self._kernel is not None
        begun, under_way, failed = 0, 0, len(reads)
        while under_way or begun < len(reads) == failed:
            with suppress(OSError):  # the file system reads in another way
                more = reads[begun : begun + _DEPTH - under_way] if failed == len(reads) else []
                count = self._kernel.begin(more) if more else 0
                begun, under_way = begun + count, under_way + count
            if not under_way:
                break
            ended = self._kernel.ended(_LONGEST_READ_S)
            under_way -= len(ended)
            failed = min([failed, *(number for number, num_bytes in ended if num_bytes != self.stride)])
        return min(begun, failed)

    def close(self) -> None:
        """Give the file back: no extent is left."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None
        for descriptor in (self._plain, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._plain, self._direct = -1, None

    def _begin(self, row: int, slot: int) -> int:
        return (row * _MOST_EXTENTS + slot) * self.part_bytes

    def _open(self) -> None:
        if self._plain >= 0:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._plain, name = tempfile.mkstemp(dir=self._directory, prefix=".spill-")
        try:
            with suppress(AttributeError, OSError):  # the system, or the file system, has no way past the page cache
                self._direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
                self._kernel = KernelReads(_DEPTH)
        finally:
            Path(name).unlink()

    def _write(self, begin: int, part: memoryview) -> None:
        descriptor = self._plain if self._direct is None else self._direct
        while part:
            count = os.pwritev(descriptor, [part], begin)
            part, begin = part[count:], begin + count


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
