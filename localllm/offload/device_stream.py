"""Runs of bytes that pass from the host's memory through a ring on a device, one copy each, forward after forward.

A run is on its way while the one before it is computed, over the border between two forwards too. Copies go on a stream
of their own; events say when a run has arrived and when its place may be written again, and nothing waits on the host
but for what comes from the disk. Knows nothing of what the bytes hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.offload.disk_stream import DiskStream, StreamClock
from localllm.offload.ring import Ring


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
        self.stream: Any = self.module.Stream()
        self.user: DeviceStream | None = None

    def mark(self) -> Any:
        """Of what the device was given to compute so far."""
        event = self.module.Event()
        event.record(self.module.current_stream())
        return event


class DeviceStream:
    """A BlockStream of `runs` through `memory` (uint8 [ring.num_bytes] on the device). One forward at a time."""

    def __init__(
        self, runs: Sequence[HostRun], ring: Ring, memory: Tensor, lane: Lane, disk: DiskStream | None = None
    ) -> None:
        """disk: brings the runs that are from the disk, and what is read there but computed on the host."""
        self.clock = StreamClock() if disk is None else disk.clock
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
        self._arrived: dict[int, Any] = {}  # of the copies that were begun
        self._released: dict[int, Any] = {}

    def begin(self) -> None:
        """As BlockStream says. Copies that were begun for a forward that was given up are dropped."""
        if self._disk is not None:
            self._disk.begin()
        if self._lane.user is self and self._next % max(1, len(self._runs)) == 0:
            return
        # All that was computed may have used the ring, whoever gave it; what was copied before is copied before.
        self._lane.stream.wait_event(self._lane.mark())
        self._lane.user = self
        self._next = 0
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
        self._lane.module.current_stream().wait_event(self._arrived.pop(number))
        yield
        self._released[number] = self._lane.mark()
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
        """Begin what has a place now and is in the host's memory already."""
        for number in (self._next, self._next + 1):
            if not self._runs or number in self._arrived or self._run(number).from_disk:
                continue
            if number - self._reach[number % len(self._runs)] < self._next:
                self._copy(number)

    def _copy(self, number: int) -> None:
        """Of a run from the disk, the copy is waited for: its place on the host is for the next one then."""
        run, index = self._run(number), number % len(self._runs)
        before = self._released.pop(number - self._reach[index], None)
        with self._disk_held(run.name) if run.from_disk else self._nothing():
            with self._lane.module.stream(self._lane.stream):
                if before is not None:
                    self._lane.stream.wait_event(before)
                self._places[index].copy_(run.content, non_blocking=True)
                arrived = self._arrived[number] = self._lane.module.Event()
                arrived.record(self._lane.stream)
            if run.from_disk:
                started = time.perf_counter()
                arrived.synchronize()
                self.clock.wait_s += time.perf_counter() - started
        self.clock.bytes_sent += run.content.numel()

    @contextmanager
    def _nothing(self) -> Iterator[None]:
        yield

    def _run(self, number: int) -> HostRun:
        return self._runs[number % len(self._runs)]
