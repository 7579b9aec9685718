"""Graphs of launches for the steps of a few tokens that were used last. Knows nothing of what is launched.

A graph takes tens of MB of the driver's memory, in nobody's allocator: 24 to 60 MB for 32 layers, as others measured.
So there are only so many, which a plan counts, and where a card's memory runs out they are the first to go: they are
captured again in milliseconds.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar, cast

import torch

from localllm.offload.placement import GRAPH_ROOMS


class Room(Protocol):
    """The buffers that forwards of one shape read and write. graphs: by the number of the run; None where there was no
    memory for one."""

    graphs: dict[int, Any]


R = TypeVar("R", bound=Room)


class Graphs:
    """The rooms of a model's programs, of reduced ones too, with their graphs. One forward at a time: what passes
    between the launches is in memory that all graphs share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.captures = device.type == "cuda"
        self._rooms: OrderedDict[tuple[object, Hashable], Room] = OrderedDict()  # the one that was used last at the end
        self._most = GRAPH_ROOMS
        self._pool: Any = None
        self._capturing: Any = None  # a stream

    @property
    def num_rooms(self) -> int:
        """The rooms that have graphs."""
        return sum(any(graph is not None for graph in room.graphs.values()) for room in self._rooms.values())

    def room(self, program: object, key: Hashable, make: Callable[[], R]) -> R:
        """Return a program's room of this key; where it is new, it takes the place of the one that was not used for the
        longest time. program: stands for it, and does not hold it: its memory may be wanted."""
        if (program, key) in self._rooms:
            self._rooms.move_to_end((program, key))
        else:
            self._drop(list(self._rooms)[: max(0, len(self._rooms) - self._most + 1)])
            self._rooms[program, key] = make()
        return cast(R, self._rooms[program, key])

    def forget(self, program: object) -> None:
        """Drop a program's rooms."""
        self._drop([key for key in self._rooms if key[0] is program])

    def give_up(self) -> bool:
        """Drop all graphs, and keep half as many rooms from now on; return whether there were any."""
        if not self.num_rooms:
            return False
        self._most = max(1, self._most // 2)
        self._drop(list(self._rooms))
        return True

    def restore(self) -> None:
        """Keep as many rooms again as a plan counts."""
        self._most = GRAPH_ROOMS

    def _drop(self, keys: Collection[tuple[object, Hashable]]) -> None:
        if keys and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # one of them may be replayed just now
        for key in keys:
            del self._rooms[key]
        if not self.num_rooms:
            self._pool = None  # torch ends a pool with the last graph of it

    def captured(self, launch: Callable[[], None]) -> Any:
        """Record a graph of what `launch` gives the device; nothing of it is computed. Other threads may call the
        driver meanwhile. Return None where there is no memory for one."""
        try:
            return self._captured(launch)
        except RuntimeError as error:  # torch's own for its allocator, a plain one for the driver's
            if "out of memory" not in str(error):
                raise
            return None

    def _captured(self, launch: Callable[[], None]) -> Any:
        if self._capturing is None:  # one for all: cuBLAS keeps a workspace for each stream
            self._capturing = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Meanwhile torch gives back nothing that it keeps for later, also where a cap leaves the graph no other memory.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), self._capturing
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), _nothing_collected():
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that is void: the cause is what is to be told
                    self._end(graph)
                raise
            self._end(graph)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except BaseException:
            # torch ends its allocator's part behind what has failed: without it, it would never free memory again.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collect no garbage during a capture: what is freed may call the driver for what a capture does not allow."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
