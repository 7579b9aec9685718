"""Measure and store the rates that a plan needs: missing ones, and doubtful ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from localllm.config import user_directories
from localllm.kernels.cpu_matmul import is_available
from localllm.offload.measurements.device_rates import device_rates, give_back_cached
from localllm.offload.measurements.roofline import MemoryFloor, device_seconds, recorded, warm_up
from localllm.offload.planner import other_work
from localllm.offload.planner.disk_speed import disk_file
from localllm.offload.planner.profile import (
    CARD,
    UNKNOWN_DISK_GBS,
    FormatRates,
    Profile,
    Taken,
    can_be_device,
    can_be_disk,
    can_be_dram,
    can_be_format,
    keep,
    of_format,
)
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.quant.weight_format import WeightFormat

_MEMORY_BYTES = 256 << 20
_DISK_BYTES = 512 << 20
_DISK_READS = 3
_REPEATS = 5
# So long products are repeated: 5 of INT4 are over in 17 ms, in which a CPU that was idle gave 10 % less than later.
_LEAST_S = 0.3
_QUANTIZED_ROWS = 1024  # repeated to the whole matrix: to quantize all of it would take longer than all the products

_Measured = TypeVar("_Measured")


def measured(
    profile: Profile, weights: str, weight_format: WeightFormat, dtype: torch.dtype, say: Callable[[str], None]
) -> Profile:
    """Return the profile with everything that a plan for such weights needs.

    Missing figures are measured and stored now; so are doubtful ones if the machine is quiet.
    """
    before, again = profile, profile.again()
    if profile.dram_read_gbs is None or "memory" in again:
        say("measuring the memory")
        profile, dram_gbs = _sampled(profile, "memory", _dram_gbs, can_be_dram)
        profile = replace(profile, dram_read_gbs=dram_gbs)
    sure_gbs = profile.sure_dram_gbs
    if profile.disk_read_gbs is None or "disk" in again:
        say("measuring the disk")
        profile, disk_gbs = _sampled(
            profile, "disk", lambda: _disk_gbs(user_directories().cache), lambda gbs: can_be_disk(gbs, sure_gbs)
        )
        profile = replace(profile, disk_read_gbs=disk_gbs)
    if weights not in profile.formats or of_format(weights) in again:
        say(f"measuring {weights} matrices")
        profile, rates = _sampled(
            profile,
            of_format(weights),
            lambda: format_rates(weight_format, dtype, torch.device("cpu")),
            lambda rates: can_be_format(weights, rates, sure_gbs, has_kernels=is_available()),
        )
        profile = replace(profile, formats={**profile.formats, weights: rates}, has_kernels=int(is_available()))
    if profile != before:
        keep(profile)
        give_back_freed()
    return profile


def device_measured(
    profile: Profile,
    device: torch.device,
    weights: str,
    weight_format: WeightFormat,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> Profile:
    """Return the profile with everything that a plan for such weights needs of the device; missing ones are stored."""
    before, again, on_card = profile, profile.again(), of_format(weights, on_card=True)
    rates = profile.device
    if rates is None or CARD in again:
        say("measuring the graphics card")
        profile, found = _sampled(profile, CARD, lambda: device_rates(device), can_be_device)
        rates = found if rates is None else replace(found, formats=rates.formats)
    copy_gbs = rates.device_copy_gbs
    if weights not in rates.formats or on_card in again:
        say(f"measuring {weights} matrices on the graphics card")
        profile, measured_rates = _sampled(
            profile,
            on_card,
            lambda: format_rates(weight_format, dtype, device),
            lambda rates: can_be_format(weights, rates, copy_gbs, has_kernels=False),
        )
        rates = replace(rates, formats={**rates.formats, weights: measured_rates})
    profile = replace(profile, device=rates)
    if profile != before:
        keep(profile)
        give_back_cached(device)
        give_back_freed()
    return profile


def _sampled(
    profile: Profile, name: str, sample: Callable[[], _Measured], can_be: Callable[[_Measured], bool]
) -> tuple[Profile, _Measured]:
    """Return the profile with one figure measured now, and once more if the result is impossible."""
    before = other_work.counted()
    found = sample()
    found = found if can_be(found) else sample()
    others = other_work.others(before, other_work.counted())
    known = profile.taken.get(name)
    taken = Taken(time.time(), others, 1 if known is None else known.times + 1)
    # What runs have taught was of the figure before.
    return replace(profile, taken={**profile.taken, name: taken}, scores=profile.scores if known is None else {}), found


def _dram_gbs() -> float:
    floor = MemoryFloor(_MEMORY_BYTES)
    return statistics.median(floor.dram_read_gbs() for _ in range(_REPEATS))


def _disk_gbs(directory: Path) -> float:
    with disk_file(directory, _DISK_BYTES) as file:
        # The best of a few is what a disk gives in a burst: predictions from it came out a third too high.
        return UNKNOWN_DISK_GBS if file is None else statistics.median(file.read_gbs() for _ in range(_DISK_READS))


@dataclass(frozen=True)
class _Trial:
    """A matrix [N, K] that stands for all of a model's, copies of it beyond any cache, and how many rows are many."""

    N: int
    K: int
    working_set_bytes: int
    many_rows: int


_CPU = _Trial(8192, 4096, 128 << 20, 128)
# 8192 rows of INT4 take a GPU of 1 TB/s 19 us, not much more than a launch, which a plan counts for itself. And 128 MiB
# would be no more than some cards' cache.
_DEVICE = _Trial(32768, 4096, 384 << 20, 512)


@torch.inference_mode()
def format_rates(weight_format: WeightFormat, dtype: torch.dtype, device: torch.device) -> FormatRates:
    """Matrices of this format times one row and times many."""
    trial = _CPU if device.type == "cpu" else _DEVICE
    one = _matrix(weight_format, trial, device)
    num_bytes = sum(tensor.nbytes for tensor in one.values())
    copies = [one] + [
        {name: tensor.clone() for name, tensor in one.items()} for _ in range(trial.working_set_bytes // num_bytes)
    ]

    def sampled(x: Tensor, count: int) -> tuple[float, float]:
        """Return products a second, timed `count` at a time, and their spread."""
        turns = cycle(copies)

        def multiply() -> None:
            for tensors in islice(turns, count):
                weight_format.linear(x, tensors, trial.N, None)

        run = recorded(device, multiply)
        warm_up(device, run)
        samples: list[float] = []
        while len(samples) < _REPEATS or sum(samples) < _LEAST_S:
            samples.append(device_seconds(device, run))
        lower, middle, upper = statistics.quantiles(samples, n=4)
        return count / middle, (upper - lower) / middle

    row, rows = (torch.randn(count, trial.K).to(device, dtype) for count in (1, trial.many_rows))
    of_row, spread = sampled(row, len(copies))
    # One by one on a CPU: without instructions for bf16 a product takes 0.15 s. On a GPU no copy is to stay in a cache.
    of_rows, spread_of_rows = sampled(rows, 1 if device.type == "cpu" else len(copies))
    return FormatRates(
        matrix_gbs=of_row * num_bytes / 1e9,
        compute_gops=of_rows * trial.many_rows * 2 * trial.N * trial.K / 1e9,
        workspace_bytes=_workspace_bytes(weight_format, rows, one, trial.N),
        spread=max(spread, spread_of_rows),
    )


def _matrix(weight_format: WeightFormat, trial: _Trial, device: torch.device) -> dict[str, Tensor]:
    """Every format has its output rows in dimension 0, so that a part repeated is a matrix."""
    part = weight_format.quantize(torch.randn(_QUANTIZED_ROWS, trial.K) * trial.K**-0.5)
    times = trial.N // _QUANTIZED_ROWS
    return {name: torch.cat([tensor.to(device)] * times) for name, tensor in part.items()}


def _workspace_bytes(weight_format: WeightFormat, x: Tensor, tensors: dict[str, Tensor], out_features: int) -> int:
    """0 on a CPU, whose allocations torch does not count."""
    if x.device.type == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # kept since the first product, and then no part of a peak
    before_bytes = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    y = weight_format.linear(x, tensors, out_features, None)
    return max(0, torch.cuda.max_memory_allocated(x.device) - before_bytes - y.nbytes)
