"""What `torch.cuda` is on the simulated card: streams, events, and all else that localllm asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from tests.simulated_card.device import Graph, SimulatedCard
from tests.simulated_card.streams import Stream, Work


class CudaStream:
    def __init__(self, card: SimulatedCard, stream: Stream) -> None:
        self._card, self.stream = card, stream
        self.device = torch.device("cuda", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.stream is self.stream

    def __hash__(self) -> int:
        return hash(self.stream)

    def wait_event(self, event: CudaEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: CudaStream) -> None:
        other.record_event().wait(self)

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or CudaEvent(self._card)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._card.synchronize(self.stream, "Stream.synchronize()")

    def query(self) -> bool:
        return self.record_event().query()


class CudaEvent:
    def __init__(self, card: SimulatedCard, enable_timing: bool = False, blocking: bool = False, **_: bool) -> None:
        self._card, self._is_timed, self._sleeps = card, enable_timing, blocking
        self._work: Work | None = None
        self._capture: Graph | None = None  # in which it was recorded

    def record(self, stream: CudaStream | None = None) -> None:
        card = self._card
        card.asked("Event.record()")
        given = card.current if stream is None else stream.stream
        self._capture = card.capture if card.capture is not None and given is card.capture.stream else None
        self._work = given.last

    def wait(self, stream: CudaStream | None = None) -> None:
        card = self._card
        card.asked("Event.wait()")
        waiting = card.current if stream is None else stream.stream
        if card.capture is not None and waiting is card.capture.stream:
            if self._capture is not card.capture:
                error = torch.AcceleratorError("CUDA error: dependency created on uncaptured work in another stream")
                card.broke_rule("a wait for another stream in a capture", error)
        elif self._work is not None and not self._work.is_done:
            waiting.add(None, [self._work])

    def query(self) -> bool:
        self._card.asked("Event.query()", in_capture=False)
        return self._work is None or self._work.is_done

    def synchronize(self) -> None:
        if not (self._sleeps or self._is_timed):  # what is timed is a measurement
            self._card.broken_rules.append("a thread that waits for an event spins")
        self._card.asked("Event.synchronize()", in_capture=False)
        self._card.counts["synchronizations"] += 1
        self._card.timeline.finish(self._work)
        self._card.asked("Event.synchronize()")

    def elapsed_time(self, end: CudaEvent) -> float:
        """Milliseconds of the card's clock."""
        assert self._is_timed and end._is_timed and self.query() and end.query()
        return 1e3 * (_time_of(end) - _time_of(self))


def _time_of(event: CudaEvent) -> float:
    return 0.0 if event._work is None else event._work.ended_at


class Cudart:
    """The few functions of CUDA's runtime that torch hands on as they are: they return a code."""

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        if self._card.is_lost:
            return 700  # cudaErrorIllegalAddress
        return 0 if self._card.register(address, num_bytes) else 2  # cudaErrorMemoryAllocation

    def cudaHostUnregister(self, address: int) -> int:
        card = self._card
        if card.is_lost:
            return 700
        if address not in card.host.registered:
            return 713  # cudaErrorHostMemoryNotRegistered
        if card.timeline.touches(address, card.host.registered[address]):
            card.broke_rule("memory is unregistered that work on its way reads", RuntimeError("it is still being read"))
        del card.host.registered[address]
        return 0


def functions(card: SimulatedCard) -> dict[str, Any]:
    """What takes the place of functions and classes of `torch.cuda`."""
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        **_device_functions(card),
        **_classes(card),
        **_stream_functions(card),
        **_memory_functions(card),
        "cudart": lambda: Cudart(card),
    }


def _device_functions(card: SimulatedCard) -> dict[str, Any]:
    config = card.config
    properties = SimpleNamespace(
        name=card.name,
        major=config.capability[0],
        minor=config.capability[1],
        multi_processor_count=config.multiprocessors,
        total_memory=config.memory_bytes,
        uuid=card.name,
    )
    return {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "device": lambda _device: nullcontext(),
        "get_device_name": _of_device(card.name),
        "get_device_properties": _of_device(properties),
        "get_device_capability": _of_device(config.capability),
        "get_arch_list": lambda: [f"sm_{config.capability[0]}{config.capability[1]}"],
    }


def _stream_functions(card: SimulatedCard) -> dict[str, Any]:
    @contextmanager
    def stream(used: CudaStream) -> Iterator[None]:
        before, card.current = card.current, used.stream
        try:
            yield
        finally:
            card.current = before

    return {
        "graph_pool_handle": card.new_pool,
        "is_current_stream_capturing": lambda: card.capture is not None and card.current is card.capture.stream,
        "stream": stream,
        "current_stream": lambda _device=None: CudaStream(card, card.current),
        "default_stream": lambda _device=None: CudaStream(card, card.timeline.compute),
        "synchronize": lambda _device=None: card.synchronize(),
    }


def _memory_functions(card: SimulatedCard) -> dict[str, Any]:
    memory = card.memory

    def free_and_total(_device: object = None) -> tuple[int, int]:
        card.asked("mem_get_info()")
        return memory.free_bytes, memory.total_bytes

    def empty_cache() -> None:
        card.asked("empty_cache()")
        card.give_back()

    def set_fraction(fraction: float, _device: object = None) -> None:
        memory.fraction = fraction

    def forget_peak(_device: object = None) -> None:
        memory.most_allocated_bytes = memory.allocated_bytes

    return {
        "empty_cache": empty_cache,
        "mem_get_info": free_and_total,
        "memory_reserved": lambda _device=None: memory.reserved_bytes,
        "memory_allocated": lambda _device=None: memory.allocated_bytes,
        "max_memory_allocated": lambda _device=None: memory.most_allocated_bytes,
        "reset_peak_memory_stats": forget_peak,
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda _device=None: memory.fraction,
    }


def _classes(card: SimulatedCard) -> dict[str, type]:
    """They stay classes: libraries that are imported on the card name them in annotations."""

    class NewStream(CudaStream):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(card, card.timeline.new_stream())

    class NewEvent(CudaEvent):
        def __init__(self, enable_timing: bool = False, **modes: bool) -> None:
            super().__init__(card, enable_timing, **modes)

    class NewGraph(Graph):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(card)

    return {"Stream": NewStream, "Event": NewEvent, "CUDAGraph": NewGraph}


def driver_functions(card: SimulatedCard) -> dict[str, Any]:
    """What takes the place of functions of `torch._C`, which a build for the CPU lacks."""

    def end_allocation(_index: int, pool: object) -> None:
        for stream in [stream for stream, used in card.pools.items() if used == pool]:
            del card.pools[stream]

    return {
        "_cuda_endAllocateToPool": end_allocation,
        "_cuda_getDriverVersion": lambda: 13000,
        "_cuda_hasPrimaryContext": lambda _index: True,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_host_emptyCache": card.host.give_back,
    }


def _of_device(answer: Any) -> Callable[..., Any]:
    return lambda _device=None: answer
