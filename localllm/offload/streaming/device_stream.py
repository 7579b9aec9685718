"""Runs of bytes that pass from the host's memory through a ring on a device, one copy each, forward after forward.

A run is on its way while the one before it is computed, over the border between two forwards too. Copies go on a stream
of their own; events say when a run has arrived and when its place may be written again. The host waits for nothing but
a run that is still being read from the disk. Knows nothing of what the bytes hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.offload.streaming.disk_stream import DiskStream, StreamClock
from localllm.offload.streaming.ring import Ring


@dataclass(frozen=True)
class HostRun:
    """Bytes (uint8) in the host's memory, best pinned. from_disk: a DiskStream brings them there in every forward."""

    name: str
    content: Tensor
    from_disk: bool = False


class Lane:
    """The stream on which copies go to a device, and whose bytes are in the ring that they go to.

    Several DeviceStreams may share it and the memory of the ring, of which one is used at a time.
    """

    def __init__(self, device: torch.device) -> None:
        # On a CPU, which stands in for a device in tests, torch's streams and events do nothing and copies are done at
        # once.
        self.module: Any = torch.get_device_module(device)
        self.device = device  # of several cards; which one is the current one is each thread's own affair
        self.stream: Any = self.module.Stream(device)
        self.user: DeviceStream | None = None
        self._clock = StreamClock()
        self._is_timed = device.type == "cuda"
        self._sending: deque[tuple[Any, Any]] = deque()  # events before and behind what is not in the clock yet
        self._waiting: deque[tuple[Any, Any]] = deque()

    @property
    def clock(self) -> StreamClock:
        """What has taken place so far, by the device's own time."""
        self.tally()
        return self._clock

    def tally(self) -> None:
        """Add what has ended since the last time to the clock."""
        self._clock.sending_s += _ended(self._sending)
        self._clock.wait_s += _ended(self._waiting)

    def mark(self, stream: Any = None) -> Any:
        """Return an event behind all that was given so far to `stream`, or to the stream that computes. A thread that
        waits for it sleeps."""
        event = self.module.Event(enable_timing=True, blocking=True) if self._is_timed else self.module.Event()
        event.record(self.module.current_stream(self.device) if stream is None else stream)
        return event

    def copy(self, content: Tensor, into: Tensor, after: Any | None) -> Any:
        """Begin a copy once `after` has come; return the event behind it."""
        return self.copy_all([(content, into)], after)

    def copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Any | None) -> Any:
        """Begin copies, each of a content to its place, once `after` has come; return the event behind the last."""
        with self.module.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            began = self.mark(self.stream) if self._is_timed else None
            for content, into in pairs:
                into.copy_(content, non_blocking=True)
            arrived = self.mark(self.stream)
        self._clock.bytes_sent += sum(content.numel() for content, _ in pairs)
        if began is not None:
            self._sending.append((began, arrived))
        return arrived

    def wait(self, arrived: Any) -> None:
        """Let all that is computed from here on come after that event."""
        began = self.mark() if self._is_timed else None
        self.module.current_stream(self.device).wait_event(arrived)
        if began is not None:
            self._waiting.append((began, self.mark()))

    def drain(self) -> None:
        """Wait until nothing is copied and nothing computed any more, and take the ring from its user: before memory
        that is copied from or to is freed. Torch gives freed memory to the next computation, and knows nothing of
        another stream that still writes to it; and a step that was begun ahead and is no longer wanted still reads
        memory of the host that is to be unregistered."""
        self.module.synchronize(self.device)
        self.user = None


class DeviceStream:
    """A BlockStream of `runs` through `memory` (uint8 [ring.num_bytes] on the device). One forward at a time."""

    def __init__(
        self, runs: Sequence[HostRun], ring: Ring, memory: Tensor, lane: Lane, disk: DiskStream | None = None
    ) -> None:
        """disk: brings the runs that are from the disk, and what is read there but computed on the host."""
        self.names = frozenset(run.name for run in runs) | (frozenset() if disk is None else disk.names)
        self._runs = runs
        self._index = {run.name: index for index, run in enumerate(runs)}
        self._reach = ring.reach
        self._places = [
            memory[begin : begin + run.content.numel()] for run, begin in zip(runs, ring.offsets, strict=True)
        ]
        self._lane = lane
        self._disk = disk
        # Runs are counted on over the forwards: number n is run n % len(runs).
        self._next = 0  # the run that is needed next; those before it are released
        self._end = 0  # of this forward; beyond, nothing is taken from the disk, which another stream may go on with
        self._arrived: dict[int, Any] = {}  # of the copies that were begun
        self._released: dict[int, Any] = {}

    @property
    def clock(self) -> StreamClock:
        return self._lane.clock if self._disk is None else self._lane.clock + self._disk.clock

    def begin(self) -> None:
        """As BlockStream says. Copies that were begun for a forward that was given up are dropped."""
        if self._disk is not None:
            self._disk.begin()
        self._lane.tally()  # events would gather where nobody looks at the clock
        # A forward that was given up at its start has taken runs from the disk already.
        has_taken_from_disk = any(self._run(number).from_disk for number in self._arrived)
        has_ended = self._next % max(1, len(self._runs)) == 0 and not has_taken_from_disk
        if self._lane.user is self and has_ended:
            self._end = self._next + len(self._runs)
            self._copy_ahead()  # what has been read meanwhile
            return
        # All that was computed may have used the ring, whoever gave it; what was copied before is copied before.
        self._lane.stream.wait_event(self._lane.mark())
        self._lane.user = self
        self._next, self._end = 0, len(self._runs)
        self._arrived.clear()
        self._released.clear()
        self._copy_ahead()

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Inside, the run of this name is in its place. Raises CheckpointError naming the file that cannot be read."""
        if name not in self._index:
            with self._disk_held(name):
                yield
            return
        number = self._next
        assert self._index[name] == number % len(self._runs), "runs are asked for in their order"
        if number not in self._arrived:
            self._copy(number)
        self._lane.wait(self._arrived.pop(number))
        yield
        self._released[number] = self._lane.mark()
        self._released.pop(number - 2, None)  # from now on no copy waits for one so far back
        self._next = number + 1
        self._copy_ahead()

    @contextmanager
    def _disk_held(self, name: str) -> Iterator[None]:
        if self._disk is None:
            yield
        else:
            with self._disk.held(name):
                yield

    def _copy_ahead(self) -> None:
        """Begin the copies that have a place now and whose bytes are in the host's memory already."""
        for number in (self._next, self._next + 1) if self._runs else ():
            has_place = number - self._reach[number % len(self._runs)] < self._next
            if number not in self._arrived and has_place and self._is_there(number):
                with suppress(CheckpointError):  # which is met in its turn
                    self._copy(number)

    def _is_there(self, number: int) -> bool:
        run = self._run(number)
        if not run.from_disk:
            return True
        assert self._disk is not None
        return number < self._end and self._disk.is_read(run.name)

    def _copy(self, number: int) -> None:
        """Begin the copy of a run, once it is read where it is from the disk."""
        run, index = self._run(number), number % len(self._runs)
        before = self._released.get(number - self._reach[index])

        def copy() -> Any:
            return self._lane.copy(run.content, self._places[index], before)

        self._arrived[number] = self._disk.copied(run.name, copy) if run.from_disk and self._disk else copy()

    def _run(self, number: int) -> HostRun:
        return self._runs[number % len(self._runs)]


def _ended(pairs: deque[tuple[Any, Any]]) -> float:
    """Return the seconds between the events of the pairs that have come, and drop those. They come in their order."""
    ended_ms = 0.0
    while pairs and pairs[0][1].query():
        began, end = pairs.popleft()
        ended_ms += began.elapsed_time(end)
    return ended_ms / 1e3
