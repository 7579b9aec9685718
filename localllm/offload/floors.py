"""What this machine can do at most: read memory, read the disk, copy to and on a GPU, multiply matrices.

Each call is one sample; whoever measures takes it beside what it bounds, again and again. Rates are in 1e9 a second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch

from localllm.offload.host_buffer import host_buffer

MEMORY_BYTES = 1 << 30  # far beyond every cache: 32 MiB of it would be read at twice the speed
_MEMORY_STREAMS = (1, 8, 64, 512)
_MEMORY_TRIALS = 3
_NOISE_VALUES = 1 << 16
DEVICE_BYTES = 1 << 29
MATMUL_SHAPE = (512, 4096, 4096)  # M, N, K
MATMUL_COPIES = 4  # of the weights, in turn: 128 MiB that no cache keeps

DISK_BYTES = 1 << 30
_LEAST_DISK_BYTES = 1 << 26
_DISK_CHUNK_BYTES = 8 << 20
_DISK_THREADS = 4
_DISK_SECONDS = 1.0  # of one sample, at most: a slow disk must not hold up the rest


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class MemoryFloor:
    """Reading a buffer far larger than the caches, in such pages as weights lie in, with all of torch's threads.

    It is read as so many streams side by side as give the most: how many that is depends on the machine.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self._buffer = host_buffer(num_bytes or MEMORY_BYTES).view(torch.float32)
        noise = torch.randn(_NOISE_VALUES)  # drawn once and repeated: a whole buffer of it takes seconds
        self._buffer.view(-1, _NOISE_VALUES).copy_(noise)
        best = {streams: max(self._gbs(streams) for _ in range(_MEMORY_TRIALS)) for streams in _MEMORY_STREAMS}
        self._streams = max(best, key=lambda streams: best[streams])

    def dram_read_gbs(self) -> float:
        return self._gbs(self._streams)

    def _gbs(self, streams: int) -> float:
        rows = self._buffer.view(streams, -1)
        return self._buffer.nbytes / seconds(lambda: rows.sum(dim=1)) / 1e9


class MatmulFloor:
    """The library's bf16 matrix product, as a chunk of a prompt needs it."""

    def __init__(self, device: torch.device) -> None:
        M, N, K = MATMUL_SHAPE
        self._x = torch.randn((M, K), device=device).bfloat16()
        weight = torch.randn((N, K), device=device).bfloat16()
        self._weights = [weight.clone() for _ in range(MATMUL_COPIES)]

    def gflops(self) -> float:
        flops = 2 * MATMUL_SHAPE[0] * MATMUL_SHAPE[1] * MATMUL_SHAPE[2] * MATMUL_COPIES
        return flops / _device_seconds(self._x.device, self._products) / 1e9

    def _products(self) -> None:
        for weight in self._weights:
            torch.nn.functional.linear(self._x, weight)


class DeviceFloors:
    """Copies on a GPU, and to it from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = torch.empty(DEVICE_BYTES, dtype=torch.uint8, pin_memory=True).random_()
        self._from, self._to = self._pinned.to(device), torch.empty(DEVICE_BYTES, dtype=torch.uint8, device=device)

    def device_copy_gbs(self) -> float:
        """Bytes read and bytes written, both counted."""
        return 2 * DEVICE_BYTES / _device_seconds(self.device, lambda: self._to.copy_(self._from)) / 1e9

    def h2d_gbs(self) -> float:
        return DEVICE_BYTES / _device_seconds(self.device, lambda: self._to.copy_(self._pinned, True)) / 1e9


def _device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Until the device is done, where it works on its own."""
    if device.type == "cpu":
        return seconds(action)
    torch.cuda.synchronize(device)

    def finish() -> None:
        action()
        torch.cuda.synchronize(device)

    return seconds(finish)


@dataclass(frozen=True)
class DiskFile:
    """A file of random bytes without a name: it is gone with the process that made it, however that ends."""

    fd: int
    num_bytes: int
    bypasses_cache: bool  # O_DIRECT; else what the page cache holds of the file is dropped before it is read

    @property
    def method(self) -> str:
        return "O_DIRECT" if self.bypasses_cache else "page cache dropped"

    def read_gbs(self) -> float:
        """One sequential read, several requests under way, of the whole file or as much as a second allows."""
        if not self.bypasses_cache:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        offsets = iter(range(0, self.num_bytes, _DISK_CHUNK_BYTES))
        with ThreadPoolExecutor(_DISK_THREADS) as pool:
            readers = [pool.submit(self._read, offsets, started + _DISK_SECONDS) for _ in range(_DISK_THREADS)]
        return sum(reader.result() for reader in readers) / (time.perf_counter() - started) / 1e9

    def _read(self, offsets: Iterator[int], until: float) -> int:
        done = 0
        with mmap(-1, _DISK_CHUNK_BYTES) as buffer:  # page-aligned, as O_DIRECT wants it
            for offset in offsets:  # shared: CPython hands each offset to one thread
                done += os.preadv(self.fd, [buffer], offset)
                if time.perf_counter() > until:
                    break
        return done


@contextlib.contextmanager
def disk_file(directory: Path, most_bytes: int | None = None) -> Iterator[DiskFile | None]:
    """A file on the disk of `directory`, which need not exist yet; None where there is no room or no leave for one."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    most_bytes = most_bytes or DISK_BYTES
    num_bytes = min(most_bytes, shutil.disk_usage(existing).free // 4) // _DISK_CHUNK_BYTES * _DISK_CHUNK_BYTES
    with contextlib.ExitStack() as stack:
        try:
            written = stack.enter_context(tempfile.TemporaryFile(dir=existing))
            if num_bytes < min(most_bytes, _LEAST_DISK_BYTES) or not hasattr(os, "preadv"):
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
    """No chunk like another: a disk that compresses or deduplicates shall not look faster than it is."""
    noise = bytearray(os.urandom(_DISK_CHUNK_BYTES))
    for chunk in range(num_bytes // _DISK_CHUNK_BYTES):
        noise[::4096] = bytes([chunk % 256]) * (_DISK_CHUNK_BYTES // 4096)
        view = memoryview(noise)
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)


def _open_direct(fd: int) -> int | None:
    """The same file without the page cache; None where the file system or the platform has no such thing."""
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
