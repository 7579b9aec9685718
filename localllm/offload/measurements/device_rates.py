"""Measure a GPU: copies, launches, the way to the CPU and back, and the memory that CUDA itself takes.

A CPU may stand in for the GPU. Knows nothing of models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from localllm.kernels.page_locked import page_locked
from localllm.offload.measurements.roofline import DeviceFloors, device_seconds, recorded, warm_up
from localllm.offload.planner.nvml import Gpu, gpu_of
from localllm.offload.planner.profile import UNKNOWN_CONTEXT_BYTES, UNKNOWN_GRAPH_NODE_BYTES, DeviceRates

# Beyond every cache, and 10 ms over a link of 25 GB/s; 3 times to the card and 3 back, over the slowest link, take 2 s.
_COPY_BYTES = 256 << 20
_COPIES = 3
_LAUNCHES = 200  # fewer than the driver's queue holds, beyond which a launch waits for a place
_REPEATS = 5
_HOPS = 50
_HIDDEN_SIZE = 4096
_MIB = 1 << 20
# What is beyond was another program's coming or going, or another process under this one's number.
_CONTEXT_BYTES = range(100 * _MIB, 2048 * _MIB)
_GRAPH_NODES = 1000  # of a graph: the driver takes its memory in steps of 2 MiB
_GRAPH_NODE_BYTES = range(1 << 10, 1 << 20)


@torch.inference_mode()
def device_rates(device: torch.device) -> DeviceRates:
    """Measure everything except the formats, in a second or two. Raises torch.OutOfMemoryError if the device has no
    room."""
    free_before = _free_before_context(device)
    floors = DeviceFloors(device, _COPY_BYTES)
    warm_up(device, floors.h2d_gbs)
    device_copy_gbs, h2d_gbs, d2h_gbs = (
        statistics.median(sample() for _ in range(_COPIES))
        for sample in (floors.device_copy_gbs, floors.h2d_gbs, floors.d2h_gbs)
    )
    del floors
    launches = _launch_s(device)
    return DeviceRates(
        device_copy_gbs,
        h2d_gbs,
        d2h_gbs,
        *launches,
        _hop_s(device),
        _context_bytes(device, free_before),
        graph_node_bytes=_graph_node_bytes(device),
    )


def gpu(device: torch.device) -> Gpu | None:
    """Return NVML's facts of this device; None for a CPU, or if NVML gives none."""
    if device.type == "cpu":
        return None
    return gpu_of(str(torch.cuda.get_device_properties(device).uuid))


def give_back_cached(device: torch.device) -> None:
    """Return memory to the system that was freed on the device or pinned for it, but is still cached by torch."""
    if device.type != "cpu":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # torch.accelerator.empty_host_cache begins with torch 2.12


def context_bytes(card: Gpu | None, free_before: int | None, reserved_bytes: int) -> int:
    """card: as it is now. free_before: on it, before this process had a context there; None where it had.
    reserved_bytes: what of this process's share torch holds for tensors."""
    if card is None:
        return UNKNOWN_CONTEXT_BYTES
    held = [card.own_bytes]
    if free_before is not None and card.free_bytes is not None:
        held.append(free_before - card.free_bytes)
    beside_tensors = (num_bytes - reserved_bytes for num_bytes in held if num_bytes is not None)
    return next((num_bytes for num_bytes in beside_tensors if num_bytes in _CONTEXT_BYTES), UNKNOWN_CONTEXT_BYTES)


def graph_node_bytes(taken_bytes: int) -> int:
    """taken_bytes: by the driver, for a graph of so many launches as are measured with."""
    each = taken_bytes // _GRAPH_NODES
    return each if each in _GRAPH_NODE_BYTES else UNKNOWN_GRAPH_NODE_BYTES


def _graph_node_bytes(device: torch.device) -> int:
    """Measure what the driver takes for each launch of a graph, once that has been replayed."""
    if device.type == "cpu":
        return UNKNOWN_GRAPH_NODE_BYTES
    x = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(_GRAPH_NODES):
            x.add_(1.0)

    def beside_tensors() -> int:
        give_back_cached(device)
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)

    before = beside_tensors()
    replay = recorded(device, launch_all)
    device_seconds(device, replay)
    return graph_node_bytes(before - beside_tensors())


def _free_before_context(device: torch.device) -> int | None:
    card = gpu(device)
    if card is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    has_context: bool = torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined]  # in no stub
    return None if has_context else card.free_bytes


def _context_bytes(device: torch.device, free_before: int | None) -> int:
    if device.type == "cpu":
        return 0
    x = torch.ones(512, 512, dtype=torch.bfloat16, device=device)
    device_seconds(device, lambda: torch.nn.functional.linear(x, x))  # from here on the library's kernels are there too
    give_back_cached(device)
    return context_bytes(gpu(device), free_before, torch.cuda.memory_reserved(device))


def _launch_s(device: torch.device) -> tuple[float, float]:
    """Return the seconds of a launch, one by one and in a graph."""
    x = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    one_by_one = _median_s(device, launch_all, _REPEATS) / _LAUNCHES
    return one_by_one, _median_s(device, recorded(device, launch_all), _REPEATS) / _LAUNCHES


def _hop_s(device: torch.device) -> float:
    there = torch.ones((1, _HIDDEN_SIZE), dtype=torch.bfloat16, device=device)
    here = page_locked((1, _HIDDEN_SIZE), torch.bfloat16, device)

    def hop() -> None:
        here.copy_(there, non_blocking=True)
        torch.get_device_module(device).synchronize(device)
        there.copy_(here, non_blocking=True)

    return _median_s(device, hop, _HOPS)


def _median_s(device: torch.device, action: Callable[[], object], times: int) -> float:
    warm_up(device, action)
    return statistics.median(device_seconds(device, action) for _ in range(times))
