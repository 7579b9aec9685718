"""Measure how fast a disk is read past the page cache: a temporary file, read by several threads. Needs no torch.

Each read is one sample; the caller takes as many as its time allows. Rates are in 1e9 bytes a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

from localllm.present import nearest

_LEAST_BYTES = 1 << 26
_CHUNK_BYTES = 8 << 20
_HUGE_BYTES = 2 << 20
_READERS = 4
_SECONDS = 1.0  # of one sample, at most: a slow disk must not hold up the rest


@dataclass(frozen=True)
class DiskFile:
    """A file of random bytes without a name. It vanishes with its process, however that ends."""

    fd: int
    num_bytes: int
    bypasses_cache: bool  # O_DIRECT; else what the page cache holds of the file is dropped before it is read

    @property
    def method(self) -> str:
        return "O_DIRECT" if self.bypasses_cache else "page cache dropped"

    def read_gbs(self) -> float:
        """Return the rate of one sequential read, with several requests in flight, of the whole file or for at most a
        second."""
        if not self.bypasses_cache:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _read_gbs([(self.fd, begin) for begin in range(0, self.num_bytes, _CHUNK_BYTES)])


def files_read_gbs(paths: Sequence[Path]) -> float:
    """These files past the page cache, by several threads, from some place on and around for a second at most.

    Raises OSError where the file system has no way past the cache.
    """
    with contextlib.ExitStack() as stack:
        pieces = []
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            stack.callback(os.close, descriptor)
            pieces += [(descriptor, begin) for begin in range(0, path.stat().st_size, _CHUNK_BYTES)]
        first = random.randrange(len(pieces))
        return _read_gbs([*pieces[first:], *pieces[:first]])


def _read_gbs(pieces: Sequence[tuple[int, int]]) -> float:
    """pieces: the file and the first byte of each chunk."""
    turns, buffers = iter(pieces), [_buffer() for _ in range(_READERS)]
    started = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        readers = [pool.submit(_read, turns, buffer, started + _SECONDS) for buffer in buffers]
    return sum(reader.result() for reader in readers) / (time.perf_counter() - started) / 1e9


def _read(pieces: Iterator[tuple[int, int]], buffer: memoryview, until: float) -> int:
    done = 0
    for descriptor, begin in pieces:  # shared: CPython hands each piece to one thread
        done += os.preadv(descriptor, [buffer], begin)
        if time.perf_counter() > until:
            break
    return done


def _buffer() -> memoryview:
    """Return a buffer of one chunk, in huge pages if the system has them: 3.5 GB/s instead of 1.5.

    The disk then gets requests of whole megabytes instead of two thousand pages. The buffer is written once, because
    untouched memory arrives at 0.4 GB/s in some virtual machines.
    """
    region = mmap(-1, _CHUNK_BYTES + _HUGE_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        region.madvise(MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % _HUGE_BYTES
    buffer = memoryview(region)[begin : begin + _CHUNK_BYTES]
    buffer[:] = bytes(_CHUNK_BYTES)
    return buffer


@contextlib.contextmanager
def disk_file(directory: Path, most_bytes: int) -> Iterator[DiskFile | None]:
    """Return a file on the disk of `directory`, which need not exist yet; None if there is no room or no permission.

    It takes at most a quarter of the free space, and is not made below 64 MiB unless less was asked for.
    """
    existing = nearest(directory)
    num_bytes = min(most_bytes, shutil.disk_usage(existing).free // 4) // _CHUNK_BYTES * _CHUNK_BYTES
    with contextlib.ExitStack() as stack:
        try:
            written = stack.enter_context(tempfile.TemporaryFile(dir=existing))
            if num_bytes < min(most_bytes, _LEAST_BYTES) or not hasattr(os, "preadv"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write_random(written.fileno(), num_bytes)
        except OSError:
            yield None
            return
        direct = _open_direct(written.fileno())
        if direct is not None:
            stack.callback(os.close, direct)
        yield DiskFile(written.fileno() if direct is None else direct, num_bytes, direct is not None)


def _write_random(fd: int, num_bytes: int) -> None:
    """Write chunks that all differ, so that a disk that compresses or deduplicates does not look faster than it is."""
    noise = bytearray(os.urandom(_CHUNK_BYTES))
    for chunk in range(num_bytes // _CHUNK_BYTES):
        noise[::4096] = bytes([chunk % 256]) * (_CHUNK_BYTES // 4096)
        view = memoryview(noise)
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)


def _open_direct(fd: int) -> int | None:
    """Open the same file without the page cache; None if the file system or the platform cannot."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    direct = None
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | flag)
        with mmap(-1, 4096) as page:
            os.preadv(direct, [page], 0)
    except OSError:
        if direct is not None:
            os.close(direct)
        return None
    return direct
