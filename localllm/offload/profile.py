"""What this machine was measured to do, kept in the cache directory, and how well predictions made from it came true.

A profile is measured once, in a few seconds, and again when the machine is another: its processor, its threads, its
graphics card, the disk. Each part of it is measured when it is first needed.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from localllm.config import user_directories
from localllm.offload.device_rates import DeviceRates, device_rates, give_back_cached, gpu
from localllm.offload.disk_speed import disk_file
from localllm.offload.floors import MemoryFloor
from localllm.offload.format_rates import FormatRates, format_rates
from localllm.offload.host_buffer import give_back_freed
from localllm.offload.plan import Bound, Rates
from localllm.quant.weight_format import WeightFormat

_VERSION = 2
_MEMORY_BYTES = 256 << 20
_DISK_BYTES = 512 << 20
_DISK_READS = 3
_REPEATS = 5
# A new prediction error counts so much: five runs that agree have most of the say, one that was disturbed has little.
_NEW_WEIGHT = 0.3
_MOST_CORRECTION = 4.0


@dataclass(frozen=True)
class Profile:
    """machine: what the figures are of. corrections: measured over predicted seconds, by what bound the step."""

    machine: str
    dram_read_gbs: float | None = None
    disk_read_gbs: float | None = None
    formats: Mapping[str, FormatRates] = field(default_factory=dict)  # on the CPU
    device: DeviceRates | None = None
    corrections: Mapping[Bound, float] = field(default_factory=dict)
    errors: Mapping[Bound, tuple[float, ...]] = field(default_factory=dict)  # of the last predictions, as shares

    def rates(self, weights: str) -> Rates | None:
        """None where something is not measured yet."""
        found = self.formats.get(weights)
        if found is None or self.disk_read_gbs is None:
            return None
        return Rates(found.matrix_gbs, found.compute_gops, self.disk_read_gbs)

    def scored(self, bound: Bound, ratio: float) -> Profile:
        """With a prediction's error taken in. ratio: measured seconds over those predicted with these corrections."""
        before = self.corrections.get(bound, 1.0)
        now = before * ratio**_NEW_WEIGHT
        now = min(max(now, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        errors = (*self.errors.get(bound, ()), ratio - 1)[-8:]
        return replace(self, corrections={**self.corrections, bound: now}, errors={**self.errors, bound: errors})

    def band(self, bound: Bound) -> float:
        """The share by which a prediction may be off: twice the usual error of the last ones, a quarter at first."""
        errors = [abs(error) for error in self.errors.get(bound, ())]
        return min(max(2 * statistics.median(errors), 0.05), 0.5) if len(errors) >= 3 else 0.25


def machine_key() -> str:
    """Everything whose change makes the figures those of another machine."""
    parts = [str(_VERSION), _cpu_name(), str(torch.get_num_threads()), str(psutil.virtual_memory().total >> 28)]
    if torch.cuda.is_available():
        parts += [torch.cuda.get_device_name(), str(torch.version.cuda)]
        if (card := gpu(torch.device("cuda"))) is not None:
            parts += [f"driver {card.driver_version}", f"PCIe {card.pcie_generation_max} x{card.pcie_width_max}"]
    return ", ".join((*parts, f"torch {torch.__version__}", f"disk {_disk_number()}"))


def kept_profile() -> Profile:
    """The profile of this machine as far as it is measured; nothing of it where that is unreadable or another's."""
    machine = machine_key()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if found["machine"] == machine:
            return _parsed(found)
    return Profile(machine)


def keep(profile: Profile) -> None:
    """A cache that cannot be written is done without."""
    path = _path()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".profile", delete=False) as file:
            file.write(json.dumps(asdict(profile), indent=1))
        Path(file.name).replace(path)


def measured(
    profile: Profile, weights: str, weight_format: WeightFormat, dtype: torch.dtype, say: Callable[[str], None]
) -> Profile:
    """The profile with all that a plan for such weights needs; what was missing is measured now, and kept."""
    before = profile
    if profile.dram_read_gbs is None:
        say("measuring the memory")
        floor = MemoryFloor(_MEMORY_BYTES)
        profile = replace(profile, dram_read_gbs=_best(floor.dram_read_gbs))
        del floor
    if profile.disk_read_gbs is None:
        say("measuring the disk")
        profile = replace(profile, disk_read_gbs=_disk_gbs(user_directories().cache))
    if weights not in profile.formats:
        say(f"measuring {weights} matrices")
        rates = format_rates(weight_format, dtype, torch.device("cpu"))
        profile = replace(profile, formats={**profile.formats, weights: rates})
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
    rates = profile.device
    if rates is None:
        say("measuring the graphics card")
        rates = device_rates(device)
    if weights not in rates.formats:
        say(f"measuring {weights} matrices on the graphics card")
        found = format_rates(weight_format, dtype, device)
        rates = replace(rates, formats={**rates.formats, weights: found})
    if rates != profile.device:
        profile = replace(profile, device=rates)
        keep(profile)
        give_back_cached(device)
        give_back_freed()
    return profile


def _best(sample: Callable[[], float]) -> float:
    return statistics.median(sample() for _ in range(_REPEATS))


def _disk_gbs(directory: Path) -> float:
    with disk_file(directory, _DISK_BYTES) as file:
        # The best of a few is what a disk gives in a burst: predictions from it came out a third too high.
        return UNKNOWN_DISK_GBS if file is None else statistics.median(file.read_gbs() for _ in range(_DISK_READS))


UNKNOWN_DISK_GBS = 0.5  # where no file can be written: an old SATA disk


def _parsed(found: Mapping[str, Any]) -> Profile:
    device = found["device"]
    if device is not None:
        device = DeviceRates(**{**device, "formats": _parsed_formats(device["formats"])})
    errors = {bound: tuple(values) for bound, values in found["errors"].items()}
    return Profile(**{**found, "formats": _parsed_formats(found["formats"]), "device": device, "errors": errors})


def _parsed_formats(found: Mapping[str, Any]) -> dict[str, FormatRates]:
    return {name: FormatRates(**rates) for name, rates in found.items()}


def _path() -> Path:
    return user_directories().cache / "profile.json"


def _disk_number() -> int:
    folder = user_directories().cache
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.stat().st_dev


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
