"""What a plan needs to know of this machine and nobody has measured yet, or what is doubtful: measured, and kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from localllm.config import user_directories
from localllm.kernels.cpu_matmul import is_available
from localllm.offload.measuring.device_rates import device_rates, give_back_cached
from localllm.offload.measuring.format_rates import format_rates
from localllm.offload.measuring.roofline import MemoryFloor
from localllm.offload.planner import other_work
from localllm.offload.planner.disk_speed import disk_file
from localllm.offload.planner.profile import (
    CARD,
    UNKNOWN_DISK_GBS,
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

_Measured = TypeVar("_Measured")


def measured(
    profile: Profile, weights: str, weight_format: WeightFormat, dtype: torch.dtype, say: Callable[[str], None]
) -> Profile:
    """The profile with all that a plan for such weights needs; what was missing is measured now, and kept; and what is
    doubtful, where the machine is quiet now."""
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
    """The profile with all that a plan for such weights needs to know of the device; what was missing is kept."""
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
    """Return the profile with a figure that is measured now, once more where what comes out cannot be."""
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
