"""Reads of records into memory, many of them at a time, and each told of when it has ended.

What lies past the page cache is read by the kernel, what lies in it is copied by threads; so is everything where the
system has no such reads. Knows nothing of what a record holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from localllm.offload.streaming.disk_read import CACHED_SHARE, CachedPages, read_into
from localllm.offload.streaming.kernel_reads import KernelReads
from localllm.offload.streaming.lru_slots import Expert
from localllm.offload.streaming.open_file import OpenFile

# A token misses two or three experts of a block, 2.6 MB each. Read whole they come at 3.5 GB/s, as fast as the disk is;
# in pieces of 1 MB that the interpreter passes to threads one by one, at 1.2.
_THREADS = 4
_LOOK_S = 0.01  # between two looks at what the threads have read, while the kernel's reads are waited for, too
_READS_A_LOOK = 64  # of a file, before the page cache is asked again
_DEPTH = 16  # of the kernel's reads, 40 MB: of more the disk's queue is full, and io_submit itself would wait


class RecordFile(OpenFile):
    """A file of records of one size."""

    def __init__(self, path: Path, begin: int, record_bytes: int, fix: str) -> None:
        """begin: of the first record, in bytes. fix: see `OpenFile`. Raises CheckpointError as it does."""
        super().__init__(path, fix)
        self._begin, self._record_bytes = begin, record_bytes
        self._num_reads = 0
        self._is_cached = False
        self.is_read_by_kernel = self.direct is not None  # as far as the last read has told

    def begin(self, index: int) -> int:
        """Return where a record begins, in bytes."""
        return self._begin + index * self._record_bytes

    def comes_from_cache(self) -> bool:
        """Return whether a record is to be read from the page cache, which has nearly all of the file, or past which
        there is no way. A single record that it has is no reason: its readahead would bring the others, too."""
        if self._num_reads % _READS_A_LOOK == 0:
            with closing(CachedPages(self.plain)) as pages:
                self._is_cached = self.direct is None or pages.sampled_share() >= CACHED_SHARE
        self._num_reads += 1
        return self._is_cached

    def read(self, index: int, record: memoryview, *, is_cached: bool) -> None:
        """Raises CheckpointError."""
        try:
            read_into(self.plain, None if is_cached else self.direct, self.begin(index), record)
        except (OSError, EOFError) as error:
            raise self.refusal("cannot be read", f"expert {index}: {error}") from None


@dataclass(frozen=True)
class RecordRead:
    """A record that is wanted, and the memory for it, which begins at a page. expert: whose it is."""

    expert: Expert
    file: RecordFile
    record: memoryview
    address: int

    @property
    def index(self) -> int:
        """Its number in the file."""
        return self.expert[1]


def _asked(read: RecordRead) -> tuple[int, int, int, int, int]:
    """Return what the kernel is asked for: see `KernelReads.begin`."""
    assert read.file.direct is not None
    return read.address, read.file.direct, read.file.begin(read.index), read.address, len(read.record)


class RecordReads:
    """The reads of one thread, in whatever order they end."""

    def __init__(self) -> None:
        self._line: deque[RecordRead] = deque()  # behind those that the kernel reads
        self._read_by_kernel: dict[int, RecordRead] = {}  # by the address that is written to
        self._ended: deque[RecordRead] = deque()
        self._num_by_threads = 0
        self._wanted: SimpleQueue[tuple[RecordRead, bool] | None] = SimpleQueue()  # None ends a thread
        self._read: SimpleQueue[tuple[RecordRead, Exception | None]] = SimpleQueue()  # with why it could not be, if so
        self._kernel: KernelReads | None = None
        with suppress(OSError):  # the system has no such reads, or has as many as it allows
            self._kernel = KernelReads(_DEPTH)
        self._threads = [threading.Thread(target=self._work, name="records", daemon=True) for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, reads: Sequence[RecordRead]) -> None:
        for read in reads:
            is_cached = read.file.comes_from_cache()
            read.file.is_read_by_kernel = not is_cached and self._kernel is not None
            if is_cached or self._kernel is None:
                self._begin_by_thread(read, is_cached)
            else:
                self._line.append(read)
        self._fill_kernel()

    def look(self) -> bool:
        """Return whether anything has ended, without a wait: 10 us where the kernel must be asked."""
        if not self._ended and self._read_by_kernel:
            self._take_ended(0.0)
        return self.has_next

    def next(self, timeout_s: float) -> tuple[RecordRead, Exception | None]:
        """Wait for a read that ends, and return it, with why it could not be done, if so. Raises Empty."""
        until = time.monotonic() + timeout_s
        while not self._ended and self._read_by_kernel and self._read.empty():
            # What the threads have read is not told of by the kernel.
            part = until if not self._num_by_threads else min(until, time.monotonic() + _LOOK_S)
            if not self._take_ended(part) and time.monotonic() >= until:
                raise Empty
        if self._ended:
            return self._ended.popleft(), None
        read = self._read.get(timeout=max(0.0, until - time.monotonic()))
        self._num_by_threads -= 1
        return read

    @property
    def has_next(self) -> bool:
        """Whether `next` need not wait."""
        return bool(self._ended) or not self._read.empty()

    def close(self, timeout_s: float) -> bool:
        """Return whether nothing is written to any memory any more: it waits so long for that."""
        until = time.monotonic() + timeout_s
        self.drop_waiting()
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        while self._read_by_kernel and self._take_ended(until):
            pass
        if self._kernel is not None and not self._read_by_kernel:
            self._kernel.close()
        return not self._read_by_kernel and not any(thread.is_alive() for thread in self._threads)

    def drop_waiting(self) -> list[RecordRead]:
        """Give up what only waits in line, and return it; the rest ends as it would."""
        waiting = [*self._line]
        self._line.clear()
        return waiting

    def _begin_by_thread(self, read: RecordRead, is_cached: bool) -> None:
        self._num_by_threads += 1
        self._wanted.put((read, is_cached))

    def _fill_kernel(self) -> None:
        """Let the kernel begin as many of those in line as it takes."""
        while self._kernel is not None and self._line and len(self._read_by_kernel) < _DEPTH:
            count = min(len(self._line), _DEPTH - len(self._read_by_kernel))
            reads = [self._line.popleft() for _ in range(count)]
            try:
                begun = self._kernel.begin([_asked(read) for read in reads])
            except OSError:  # this file system reads in another way
                begun = 0
            self._read_by_kernel |= {read.address: read for read in reads[:begun]}
            for read in reads[begun:]:
                read.file.is_read_by_kernel = False
                self._begin_by_thread(read, is_cached=False)

    def _take_ended(self, until: float) -> bool:
        """Wait for the kernel's next reads, and return whether there were any."""
        assert self._kernel is not None
        events = self._kernel.ended(max(0.0, until - time.monotonic()))
        for address, num_bytes in events:
            read = self._read_by_kernel.pop(address)
            if num_bytes == len(read.record):
                self._ended.append(read)
            else:  # a thread goes on by other ways, or learns why there is none
                self._begin_by_thread(read, is_cached=False)
        self._fill_kernel()
        return bool(events)

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            read, is_cached = wanted
            try:
                read.file.read(read.index, read.record, is_cached=is_cached)
            except Exception as error:  # told to whoever waits
                self._read.put((read, error))
            else:
                self._read.put((read, None))
