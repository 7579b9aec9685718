"""How the parts of a layer come to a place of the ring: read from the disk, or copied to a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from localllm.cache.extents import Extent, ExtentStore
from localllm.cache.host_spill import HostSpill
from localllm.cache.spill_file import SpillFile
from localllm.offload.streaming.device_stream import Lane
from localllm.offload.streaming.disk_read import READERS
from localllm.offload.streaming.disk_stream import StreamClock
from localllm.offload.streaming.host_buffer import HUGE_PAGE_BYTES, host_buffer

PLACES = 2


class Carrier(Protocol):
    @property
    def clock(self) -> StreamClock:
        """Bytes that were brought, and how long a layer waited for them."""

    def room(self, num_bytes: int) -> Tensor:
        """Return memory for the ring, uint8 [>= num_bytes]. Raises what torch does where there is none."""

    def begin(self, *, is_first: bool) -> None:
        """A forward begins. is_first: nothing was brought for it ahead."""

    def bring(self, place: int, store: ExtentStore, row: int, extents: Sequence[Extent], into: Tensor) -> None:
        """Begin to bring the parts of a layer, once its place is released."""

    def wait(self, place: int) -> None:
        """Let all that is computed from here on find them. Raises LocalLLMError where the disk does not give them."""

    def release(self, place: int) -> None:
        """Nothing that is computed from here on reads that place."""

    def drop(self) -> None:
        """Forget what is being brought; what is brought next comes behind it."""

    def drain(self) -> None:
        """Wait until nothing reads or writes the ring's memory, which will be another's."""


class DiskReads:
    """To the host's memory, by threads that read."""

    def __init__(self) -> None:
        self.clock = StreamClock()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="pages")
        self._reads: list[list[Future[float]]] = [[] for _ in range(PLACES)]
        self._num_bytes, self._begun = [0] * PLACES, [0.0] * PLACES
        self._read_until = 0.0  # as `time.perf_counter` has it

    def room(self, num_bytes: int) -> Tensor:
        return host_buffer(-(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)

    def begin(self, *, is_first: bool) -> None:
        """Nothing is to be done."""

    def bring(self, place: int, store: ExtentStore, row: int, extents: Sequence[Extent], into: Tensor) -> None:
        assert isinstance(store, SpillFile)
        memory = into.numpy().data
        self._num_bytes[place], self._begun[place] = len(extents) * store.part_bytes, time.perf_counter()
        self._reads[place] = [
            self._readers.submit(self._read, store, begin, memory[at : at + count])
            for begin, at, count in store.pieces(row, extents)
        ]

    def wait(self, place: int) -> None:
        started = time.perf_counter()
        for read in self._reads[place]:
            read.result()
        self.clock.wait_s += time.perf_counter() - started
        self.clock.bytes_read += self._num_bytes[place]
        ended = max((read.result() for read in self._reads[place]), default=0.0)
        self.clock.reading_s += max(0.0, ended - max(self._begun[place], self._read_until))
        self._read_until = max(self._read_until, ended)

    @staticmethod
    def _read(store: SpillFile, begin: int, into: memoryview) -> float:
        """Return when it has ended."""
        store.read(begin, into)
        return time.perf_counter()

    def release(self, place: int) -> None:
        self._reads[place] = []

    def drop(self) -> None:
        for reads in self._reads:
            for read in reads:
                if not read.cancel():
                    read.exception()
            reads.clear()

    def drain(self) -> None:
        self.drop()


class CardCopies:
    """To a GPU, on a stream of its own; the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._lane = Lane(device)
        self._arrived: dict[int, Any] = {}  # events of copies, by place
        self._released: dict[int, Any] = {}

    @property
    def clock(self) -> StreamClock:
        return self._lane.clock

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._lane.device)

    def begin(self, *, is_first: bool) -> None:
        self._lane.tally()  # events would gather where nobody looks at the clock
        if is_first:
            # Pages may still be on their way to the host, and what was launched before may read the ring.
            self._lane.stream.wait_event(self._lane.mark())

    def bring(self, place: int, store: ExtentStore, row: int, extents: Sequence[Extent], into: Tensor) -> None:
        assert isinstance(store, HostSpill)
        size = store.part_bytes
        pairs = [(store.part(row, e).view(-1), into[n * size : (n + 1) * size]) for n, e in enumerate(extents)]
        self._arrived[place] = self._lane.copy_all(pairs, self._released.pop(place, None))

    def wait(self, place: int) -> None:
        self._lane.wait(self._arrived[place])

    def release(self, place: int) -> None:
        self._released[place] = self._lane.mark()

    def drop(self) -> None:
        self._arrived.clear()
        self._released.clear()

    def drain(self) -> None:
        self._lane.drain()
