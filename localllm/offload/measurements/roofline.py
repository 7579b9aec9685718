"""Measure the limits of this machine: reading memory, copying to and on a GPU, multiplying matrices.

Each call is one sample; the caller takes it beside the rate that it bounds, again and again. Rates are in 1e9 a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from localllm.kernels.page_locked import page_locked
from localllm.offload.streaming.host_buffer import host_buffer

MEMORY_BYTES = 1 << 30  # far beyond every cache: 32 MiB of it would be read at twice the speed
_MEMORY_STREAMS = (1, 8, 64, 512)
_MEMORY_TRIALS = 3
_NOISE_VALUES = 1 << 16
DEVICE_BYTES = 1 << 29
_AWAKE_S = 0.2
MATMUL_SHAPE = (512, 4096, 4096)  # M, N, K
MATMUL_COPIES = 4  # of the weights, in turn: 128 MiB that no cache keeps


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class MemoryFloor:
    """Reads a buffer far larger than the caches, in the same kind of pages as weights, with all of torch's threads.

    It is read as several streams side by side; their number is the fastest on this machine.
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
        return flops / device_seconds(self._x.device, self._products) / 1e9

    def _products(self) -> None:
        for weight in self._weights:
            torch.nn.functional.linear(self._x, weight)


class DeviceFloors:
    """Copies on a GPU, and between it and pinned memory, or ordinary memory where so much cannot be pinned. A CPU may
    stand in for one: then they are plain copies."""

    def __init__(self, device: torch.device, num_bytes: int | None = None) -> None:
        self.device = device
        self._num_bytes = num_bytes or DEVICE_BYTES
        self._pinned = page_locked((self._num_bytes,), torch.uint8, device).fill_(1)
        self._from, self._to = (torch.ones(self._num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def device_copy_gbs(self) -> float:
        """Return the rate of a copy on the device; bytes read and bytes written both count."""
        return 2 * self._gbs(lambda: self._to.copy_(self._from))

    def h2d_gbs(self) -> float:
        return self._gbs(lambda: self._to.copy_(self._pinned, non_blocking=True))

    def d2h_gbs(self) -> float:
        return self._gbs(lambda: self._pinned.copy_(self._to, non_blocking=True))

    def _gbs(self, copy: Callable[[], object]) -> float:
        return self._num_bytes / device_seconds(self.device, copy) / 1e9


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds of an action on an idle device."""
    synchronize = torch.get_device_module(device).synchronize

    def finish() -> None:
        action()
        synchronize(device)

    synchronize(device)
    return seconds(finish)


def recorded(device: torch.device, action: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of a CUDA graph of `action`, as short steps run.

    Returns the action itself without a GPU, or if it needs the host between two launches.
    """
    if device.type != "cuda":
        return action
    device_seconds(device, action)  # what is compiled or loaded at first is not part of a graph
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads pin memory meanwhile
            action()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return action
    return graph.replay


def warm_up(device: torch.device, action: Callable[[], object]) -> None:
    """Run once on a CPU. On a GPU run until its clocks and its link are awake, which they are not while it is idle."""
    started = time.perf_counter()
    device_seconds(device, action)
    while device.type != "cpu" and time.perf_counter() - started < _AWAKE_S:
        device_seconds(device, action)
