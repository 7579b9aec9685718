"""The simulated card: what its driver allows and refuses, what goes wrong on it, its launches and its graphs.

It runs nothing of CUDA. `tensors` puts torch's tensors on it, `cuda_api` stands in for `torch.cuda`.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from tests.simulated_card.host import HostMemory, span
from tests.simulated_card.memory import MIB, Block, FullError, Memory
from tests.simulated_card.streams import Schedule, Stream, Timeline, Work

DEVICE = torch.device("cuda", 0)
POISON = 0xFF  # every byte of memory that is given out: a NaN as a float, -1 as an integer
_numbers = itertools.count(1)


@dataclass(frozen=True)
class CardConfig:
    """schedule, seed: when streams do their work. memory_bytes: of the card. lockable_bytes: of the host's memory, what
    the driver page-locks at most: 0 for a machine that has none of it, a few MiB as on WSL2. reads_host: kernels find
    what is page-locked at the address that it has on the host. link_gbs: a slow link has little. graph_bytes,
    kernel_bytes: what the driver takes for a graph, and for a kernel at its first launch."""

    schedule: Schedule = "lazy"
    seed: int = 0
    memory_bytes: int = 1 << 30
    lockable_bytes: int | None = None
    reads_host: bool = True
    link_gbs: float = 25.0
    memory_gbs: float = 400.0
    launch_s: float = 2e-6
    graph_bytes: int = 0
    kernel_bytes: int = 0
    capability: tuple[int, int] = (8, 6)
    multiprocessors: int = 4


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and when: the number of the allocation, launch or capture at which it does, counted from 0 since
    the faults were set. None: never.

    allocation: torch's allocator finds no room, `allocations` times in a row; in a capture it counts as well.
    kernel: the driver finds no room to load a kernel. graph: it finds none for a graph that was captured.
    illegal_access: of the kernel that is launched; all that is asked of the driver behind it fails.
    """

    allocation: int | None = None
    allocations: int = 1
    kernel: int | None = None
    graph: int | None = None
    illegal_access: int | None = None


NO_FAULTS = Faults()


class SimulatedCard:
    """broken_rules: what was asked for that a card, or its driver, does not take. Whoever plays a forward on it looks
    there at the end, as an engine goes on without what has failed. counts: allocations, launches, captures, replays,
    synchronizations since `faults` were set."""

    def __init__(self, config: CardConfig) -> None:
        self.config = config
        self.name = f"Simulated card {next(_numbers)}"  # a verdict that is kept of one is of no other
        self.timeline = Timeline(config.schedule, config.seed)
        self.memory = Memory(config.memory_bytes)
        self.host = HostMemory(config.lockable_bytes)
        self.current = self.timeline.compute
        self.capture: Graph | None = None
        self.pools: dict[Stream, Hashable] = {}  # of streams whose allocations go to a graph's pool
        self.broken_rules: list[str] = []
        self.is_lost = False  # after an illegal access
        self._left_errors: set[int] = set()  # threads that had an error of the runtime's and have not asked for it
        self._kernels: set[str] = set()  # that were launched
        self._pool_numbers = itertools.count()
        self.set_faults(NO_FAULTS)

    def set_faults(self, faults: Faults) -> None:
        self._faults = faults
        self.counts: Counter[str] = Counter()

    # What is asked of the driver

    def asked(self, what: str, *, in_capture: bool = True) -> None:
        """Every call of the driver. in_capture: it is allowed there. Raises what CUDA's error becomes in torch."""
        if self.is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if not in_capture and self.capture is not None and self.capture.thread == threading.get_ident():
            self.capture.is_void = True
            self.broke_rule(
                f"{what} in a capture",
                torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
            )

    def broke_rule(self, rule: str, error: Exception) -> NoReturn:
        self.broken_rules.append(rule)
        raise error

    def synchronize(self, stream: Stream | None = None, what: str = "a synchronization") -> None:
        """Wait for a stream, or for all."""
        self.asked(what, in_capture=False)
        self.counts["synchronizations"] += 1
        if stream is None:
            self.timeline.finish_all()
        else:
            self.timeline.finish(stream.last)
        self.asked(what)  # which tells of what went wrong meanwhile

    def take(self, num_bytes: int) -> None:
        """Let another program take memory of the card, or give some back."""
        try:
            self.memory.take("other programs", num_bytes)
        except FullError:
            raise AssertionError(f"the other program finds {self.memory.free_bytes} bytes") from None

    # Memory

    def allocate(self, num_bytes: int) -> Block:
        """Raises as torch's allocator does."""
        self.asked("an allocation")
        number = self.counts["allocations"]
        self.counts["allocations"] += 1
        first = self._faults.allocation
        owner = self.pools.get(self.current, self.current)
        with suppress(FullError):
            if first is None or not first <= number < first + self._faults.allocations:
                return self.memory.allocate(num_bytes, owner, may_give_back=not self.pools)
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {num_bytes / MIB:.2f} MiB. GPU 0 has a total capacity of "
            f"{self.memory.total_bytes / MIB:.2f} MiB of which {self.memory.free_bytes / MIB:.2f} MiB is free."
        )

    def poisoned(self, num_bytes: int) -> tuple[Tensor, Block]:
        """Return new memory, uint8, which holds no number once it is its turn."""
        block = self.allocate(num_bytes)
        memory = self.memory.arena[block.begin : block.begin + block.size]
        self.enqueue(lambda: memory.fill_(POISON))
        return memory[:num_bytes], block

    def give_back(self) -> None:
        if not self.pools:  # as torch does in a capture
            self.memory.give_back()

    # Work

    def enqueue(
        self, run: Callable[[], object], *, seconds: float = 0.0, reads: Sequence[tuple[int, int]] = ()
    ) -> Work | None:
        """Give the current stream something to do; in a capture it is kept instead, and None is returned."""
        self.asked("a launch")
        graph = self.capture
        if graph is not None and self.current is graph.stream:
            graph.steps.append(run)
            graph.reads += reads
            graph.seconds += seconds
            return None
        return self.current.add(run, (), seconds, reads)

    def compute(self, run: Callable[[], object]) -> None:
        """Launch an operator's kernel: torch then asks the runtime for the thread's last error, whoever made it."""
        if threading.get_ident() in self._left_errors:
            self._left_errors.clear()
            raise torch.AcceleratorError("CUDA error: out of memory")
        self.enqueue(run, seconds=self.config.launch_s)

    def register(self, address: int, num_bytes: int) -> bool:
        """Return whether the driver page-locks memory of the host. Where it does not, the error stays behind in this
        thread."""
        if not self.host.register(address, num_bytes):
            self._left_errors.add(threading.get_ident())
            return False
        return True

    def launch(self, name: str, run: Callable[[], object], arguments: Sequence[Tensor]) -> None:
        """Launch a kernel. arguments: its tensors, of which the host's must be page-locked, but for those that are
        empty and have no address. Raises as Triton does."""
        of_host = [tensor for tensor in arguments if tensor.numel() and not self._is_here(tensor)]
        if not all(map(self.host.is_locked, of_host)):
            error = ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            self.broke_rule(f"{name} is given pageable memory", error)
        number = self.counts["launches"]
        self.counts["launches"] += 1
        if number == self._faults.kernel or not self._is_loaded(name):
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        self.enqueue(run, seconds=self.config.launch_s, reads=[span(tensor) for tensor in of_host])
        if self.capture is not None and self.current is self.capture.stream:
            self.capture.launches += 1
            self.counts["launches"] -= 1  # it is none before it is replayed
        elif number == self._faults.illegal_access:
            self.is_lost = True

    def count_replayed(self, launches: int) -> None:
        first = self.counts["launches"]
        self.counts["launches"] += launches
        if self._faults.illegal_access in range(first, first + launches):
            self.is_lost = True

    def _is_loaded(self, name: str) -> bool:
        """Return whether the driver has the kernel, now at last."""
        if name not in self._kernels:
            with suppress(FullError):
                self.memory.take("kernels", self.config.kernel_bytes)
                self._kernels.add(name)
        return name in self._kernels

    def _is_here(self, tensor: Tensor) -> bool:
        return self.memory.base <= tensor.data_ptr() < self.memory.base + self.memory.arena.numel()

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Return the memory at an address that a kernel has from a table: the card's, or page-locked memory of the
        host. Raises as `asked` where none is there."""
        if self.config.reads_host and self.host.holds(address, num_bytes):
            return self.host.bytes_at(address, num_bytes)
        if not self.memory.holds(address, num_bytes):
            self.is_lost = True
        self.asked("a kernel")
        begin = address - self.memory.base
        return self.memory.arena[begin : begin + num_bytes]

    # Graphs

    def new_pool(self) -> tuple[str, int]:
        return "pool", next(self._pool_numbers)

    def has_room_for_graph(self) -> bool:
        """Take what the driver needs for a graph; return whether it was there."""
        number = self.counts["captures"]
        self.counts["captures"] += 1
        if number == self._faults.graph:
            return False
        with suppress(FullError):
            self.memory.take("graphs", self.config.graph_bytes)
            return True
        return False


class Graph:
    """What `torch.cuda.CUDAGraph` is: work that was captured, over the addresses that it had then."""

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        self.steps: list[Callable[[], object]] = []
        self.reads: list[tuple[int, int]] = []
        self.seconds, self.launches = 0.0, 0
        self.stream: Stream | None = None
        self.thread = 0
        self.is_void = False
        self._pool: Hashable = None
        self._is_whole = False

    def capture_begin(self, pool: Hashable = None, **_modes: object) -> None:
        card = self._card
        card.asked("a capture", in_capture=False)
        if card.current is card.timeline.compute:
            card.broke_rule(
                "a capture on the default stream", RuntimeError("CUDA graphs must be captured on a non-default stream.")
            )
        self._pool, self.stream, self.thread = pool or card.new_pool(), card.current, threading.get_ident()
        card.memory.kept[self._pool] += 1
        card.capture, card.pools[card.current] = self, self._pool

    def capture_end(self) -> None:
        """What torch's allocator does for a capture goes on where this fails: see `_cuda_endAllocateToPool`."""
        self._card.capture = None
        self._card.asked("the end of a capture")
        if self.is_void:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        if not self._card.has_room_for_graph():
            raise torch.AcceleratorError("CUDA error: out of memory")
        self._is_whole = True
        assert self.stream is not None
        self._card.pools.pop(self.stream, None)

    def replay(self) -> None:
        card, steps = self._card, self.steps
        assert self._is_whole, "what is replayed was captured"
        card.counts["replays"] += 1

        def run() -> None:
            for step in steps:
                step()

        card.enqueue(run, seconds=self.seconds, reads=self.reads)
        card.count_replayed(self.launches)

    def pool(self) -> Hashable:
        return self._pool

    def reset(self) -> None:
        if self._is_whole:
            self._card.memory.taken_bytes["graphs"] -= self._card.config.graph_bytes
        if self.stream is not None:
            self._card.memory.kept[self._pool] -= 1
        self.stream, self._is_whole, self.steps = None, False, []

    def __del__(self) -> None:
        self.reset()
