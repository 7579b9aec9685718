"""A file on its way from the disk into memory, as fast as the disk gives it. Knows nothing of what it holds. Needs no
torch."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy

from localllm.offload.streaming.ring import PAGE_BYTES as PAGE_BYTES

# O_DIRECT reads by four threads reach what the disk has (2.3 GB/s where `dd iflag=direct` has 2.2) and leave the cores
# alone; through the page cache it was 0.4 to 1.6 GB/s, and a core was busy copying.
READERS = 4
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1 << 20, 8 << 20
_SAMPLES = 64
CACHED_SHARE = 0.9  # below it the misses cost more than the hits save


class FileRead:
    """The first bytes of a file, read by `readers` into `buffer` from the moment this is made.

    What the page cache holds is copied from there, everything else is read past it. buffer: aligned to a page, and a
    whole number of them. Raises OSError where the file cannot be opened, or is not a plain one.
    """

    def __init__(self, path: Path, buffer: memoryview, readers: ThreadPoolExecutor) -> None:
        size = len(buffer)
        self._buffer = buffer
        self._direct: int | None = None
        self._reads: list[Future[None]] = []
        pages = -(-size // (READERS * PAGE_BYTES))
        chunk = min(max(pages * PAGE_BYTES, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
        self._bounds = [(begin, min(begin + chunk, size)) for begin in range(0, size, chunk)]
        self._cached = open_plain(path)
        try:
            self._direct = None if cached_share(self._cached, size) >= CACHED_SHARE else open_direct(path)
            for bounds in self._bounds:
                self._reads.append(readers.submit(self._read, *bounds))
        except BaseException:
            self.close()
            raise

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order, each chunk when it is there. Raises OSError, and EOFError where the file is too short."""
        for (begin, end), read in zip(self._bounds, self._reads, strict=True):
            read.result()
            yield self._buffer[begin:end]

    def close(self) -> None:
        """Give up what is not yet read, and wait for what is being read."""
        for read in self._reads:
            if not read.cancel():
                read.exception()
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def _read(self, begin: int, end: int) -> None:
        read_into(self._cached, self._direct, begin, self._buffer[begin:end])


def read_into(plain: int, direct: int | None, begin: int, into: memoryview) -> None:
    """Fill `into` from byte `begin` of a file that is open as `plain`, past the page cache where `direct` is given.

    begin and into: aligned to a page, and whole pages. Raises OSError, and EOFError where the file ends before.
    """
    descriptor = plain if direct is None else direct
    end = begin + len(into)
    while into:
        try:
            count = os.preadv(descriptor, [into], end - len(into))
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor == plain:
                raise
            descriptor = plain  # only whole pages are read past the cache: not the rest of a short read
            continue
        if count == 0:
            raise EOFError(f"it ends at byte {os.fstat(descriptor).st_size}, {end} are needed")
        into = into[count:]


def open_plain(path: Path, flags: int = 0) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    return descriptor


def open_direct(path: Path) -> int | None:
    """Open a file to be read past the page cache; return None where the system or the file system has no such way."""
    try:
        return open_plain(path, os.O_DIRECT)
    except (AttributeError, OSError):
        return None


class CachedPages:
    """Tells how much of a file lies in the page cache. The mapping that it makes for this is never read."""

    def __init__(self, descriptor: int) -> None:
        self._num_bytes = os.fstat(descriptor).st_size
        self._mapping: mmap.mmap | None = None
        with suppress(OSError, ValueError):  # a file system that maps nothing, or an empty file
            self._mapping = mmap.mmap(descriptor, self._num_bytes, prot=mmap.PROT_READ)
            self._address = numpy.frombuffer(self._mapping, numpy.uint8).ctypes.data
        self._mincore = ctypes.CDLL(None).mincore
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def share(self, begin: int, num_bytes: int) -> float:
        """Return how much of these bytes lies there, as far as is known. begin: a multiple of a page's."""
        num_bytes = min(num_bytes, self._num_bytes - begin)
        if num_bytes <= 0:
            return 1.0
        if self._mapping is None:
            return 0.0
        resident = numpy.zeros(-(-num_bytes // mmap.PAGESIZE), numpy.uint8)
        failed = self._mincore(self._address + begin, num_bytes, resident.ctypes.data)
        return 0.0 if failed else float((resident & 1).mean())

    def sampled_share(self) -> float:
        """Return how much of the file lies there by `_SAMPLES` of its pages: 0.2 ms, where all of 300 MB take 5."""
        step = max(1, self._num_bytes // mmap.PAGESIZE // _SAMPLES) * mmap.PAGESIZE
        shares = [self.share(begin, mmap.PAGESIZE) for begin in range(0, self._num_bytes, step)]
        return sum(shares) / max(1, len(shares))

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()


def cached_share(descriptor: int, num_bytes: int) -> float:
    """Return how much of a file's first bytes lies in the page cache, as far as is known."""
    with closing(CachedPages(descriptor)) as pages:
        return pages.share(0, num_bytes)
