"""What this machine was measured to do, kept in the cache directory, and how well predictions made from it came true.

A profile is measured once, in a few seconds, and again when the machine is another: its processor, its threads, its
graphics card, the disk. Each part of it is measured when it is first needed; what cannot be, because another program
had the machine, is measured once more; where it comes out so again it is kept, and is `doubtful`. So is what was
measured beside other work, or came out differently each time. What is doubtful is measured again by whoever needs it
when the machine is quiet.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from localllm.config import user_directories
from localllm.kernels.cpu_linear import is_available
from localllm.offload.planner import other_work
from localllm.offload.planner.calibration import Corrections, Score, Term
from localllm.offload.planner.device_rates import DeviceRates, device_rates, give_back_cached, gpu
from localllm.offload.planner.disk_speed import disk_file
from localllm.offload.planner.format_rates import FormatRates, format_rates
from localllm.offload.planner.machine import Rates
from localllm.offload.planner.roofline import MemoryFloor
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.present import nearest
from localllm.quant.weight_format import WeightFormat

_VERSION = 4  # of the kept file: one of another version is measured anew
_MEMORY_BYTES = 256 << 20
_DISK_BYTES = 512 << 20
_DISK_READS = 3
_REPEATS = 5
_LEAST_DRAM_GBS = 1.0  # of anything that torch runs on
# Of what memory is read at. Compiled kernels reach a third and more, and beside other programs on all cores, for which
# each waits at every matrix, a twentieth. By plain operators, as NF4 is decoded on a CPU, it is a hundredth.
_LEAST_SHARE = 1 / 8
_LEAST_PLAIN_SHARE = 1 / 1000
UNKNOWN_DISK_GBS = 0.5  # where no file can be written: an old SATA disk
_MAY_BE_0 = ("_bytes", "_s", "others", "spread")
_MAY_BE_UNKNOWN = ("dram_read_gbs", "disk_read_gbs", "device")
_MOST_SPREAD = 0.3  # a machine of its own stays below a tenth
_CARD = "graphics card"
_LAST_S = 253_402_300_799  # in the year 9999
_MOST_TIMES = 4  # then a figure stays doubtful: some machines are never still, and measuring takes seconds

_Measured = TypeVar("_Measured")


@dataclass(frozen=True)
class Taken:
    """How a figure was measured. at_s: when, as `time.time` has it. others: processors that other programs kept busy
    meanwhile. times: how often it has been measured."""

    at_s: float
    others: float = 0.0
    times: int = 1


@dataclass(frozen=True)
class Profile:
    """machine: what the figures are of. scores: how predictions came true, by the weights and what was predicted.
    taken: how each figure was measured, by the name that `doubtful` has for it."""

    machine: str
    dram_read_gbs: float | None = None
    disk_read_gbs: float | None = None
    formats: Mapping[str, FormatRates] = field(default_factory=dict)  # on the CPU
    device: DeviceRates | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    taken: Mapping[str, Taken] = field(default_factory=dict)

    def rates(self, weights: str) -> Rates | None:
        """None where something is not measured yet."""
        found = self.formats.get(weights)
        if found is None or self.disk_read_gbs is None:
            return None
        return Rates(found.matrix_gbs, found.compute_gops, self.disk_read_gbs)

    @property
    def _sure_dram_gbs(self) -> float | None:
        """None also where it is doubtful: nothing is to be compared with it then."""
        return self.dram_read_gbs if _can_be_dram(self.dram_read_gbs) else None

    def of(self, weights: str) -> Profile:
        """With the figures that plans for such weights are predicted from, alone."""
        device, others = self.device, {*self.formats, *(self.device.formats if self.device else ())} - {weights}
        unused = {_of_format(name, on_card=on_card) for name in others for on_card in (False, True)}
        return replace(
            self,
            formats={name: rates for name, rates in self.formats.items() if name == weights},
            device=device
            and replace(device, formats={name: device.formats[name] for name in device.formats.keys() & {weights}}),
            taken={name: taken for name, taken in self.taken.items() if name not in unused},
        )

    @property
    def busy(self) -> tuple[str, ...]:
        """Which of the figures were measured beside other work, or came out differently each time."""
        spreads = {_of_format(name): rates.spread for name, rates in self.formats.items()}
        if self.device is not None:
            spreads |= {_of_format(name, on_card=True): rates.spread for name, rates in self.device.formats.items()}
        beside = {name for name, taken in self.taken.items() if other_work.is_much(taken.others)}
        return tuple(sorted(beside | {name for name, spread in spreads.items() if spread > _MOST_SPREAD}))

    @property
    def impossible(self) -> tuple[str, ...]:
        """Which of the figures cannot be, though they were measured again."""
        dram, device = self._sure_dram_gbs, self.device
        doubts = {"memory": dram != self.dram_read_gbs, "disk": not _can_be_disk(self.disk_read_gbs, dram)}
        doubts |= {_of_format(name): not _can_be_format(name, rates, dram) for name, rates in self.formats.items()}
        if device is not None:
            doubts[_CARD] = not _can_be_device(device)
            for name, rates in device.formats.items():
                can_be = _can_be_format(name, rates, device.device_copy_gbs, is_compiled=False)
                doubts[_of_format(name, on_card=True)] = not can_be
        return tuple(name for name, doubted in doubts.items() if doubted)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Which of the figures need not be what this machine can do."""
        return tuple(dict.fromkeys((*self.impossible, *self.busy)))

    @property
    def measured_at_s(self) -> float | None:
        """When the oldest of the figures was measured; None where there are none."""
        return min((taken.at_s for taken in self.taken.values()), default=None)

    def sampled(
        self, name: str, sample: Callable[[], _Measured], can_be: Callable[[_Measured], bool]
    ) -> tuple[Profile, _Measured]:
        """With a figure that is measured now, once more where what comes out cannot be."""
        before = other_work.counted()
        found = sample()
        found = found if can_be(found) else sample()
        others = other_work.others(before, other_work.counted())
        known = self.taken.get(name)
        taken = Taken(time.time(), others, 1 if known is None else known.times + 1)
        # What runs have taught was of the figure before.
        return replace(self, taken={**self.taken, name: taken}, scores=self.scores if known is None else {}), found

    def may_come_out_better(self, name: str) -> bool:
        """Whether a doubtful figure is to be measured again now."""
        return name in self.doubtful and name in self.taken and self.taken[name].times < _MOST_TIMES

    def corrections(self, weights: str) -> Corrections:
        named = ((name.split(), score) for name, score in self.scores.items())
        return Corrections({Term(*term): score.correction for (of, *term), score in named if of == weights})  # type: ignore[arg-type]

    def scored(self, weights: str, term: Term, ratio: float) -> Profile:
        """With a run taken in. ratio: its seconds over those that would have been predicted without a correction."""
        name = " ".join((weights, *term))
        known = self.corrections(weights).of(term)
        score = self.scores.get(name, Score(correction=known, first=known))
        return replace(self, scores={**self.scores, name: score.after(ratio)})

    def band(self, weights: str, term: Term) -> float:
        """The share by which such a prediction may be off."""
        return self.scores.get(" ".join((weights, *term)), Score()).band


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
    with suppress(OSError):
        write_whole(_path(), json.dumps(asdict(profile), indent=1))


def write_whole(path: Path, content: str) -> None:
    """The file is there with all of its content, or as it was before. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def measured(
    profile: Profile, weights: str, weight_format: WeightFormat, dtype: torch.dtype, say: Callable[[str], None]
) -> Profile:
    """The profile with all that a plan for such weights needs; what was missing is measured now, and kept; and what is
    doubtful, where the machine is quiet now."""
    before, again = profile, _again(profile)
    if profile.dram_read_gbs is None or "memory" in again:
        say("measuring the memory")
        profile, dram_gbs = profile.sampled("memory", _dram_gbs, _can_be_dram)
        profile = replace(profile, dram_read_gbs=dram_gbs)
    sure_gbs = profile._sure_dram_gbs
    if profile.disk_read_gbs is None or "disk" in again:
        say("measuring the disk")
        profile, disk_gbs = profile.sampled(
            "disk", lambda: _disk_gbs(user_directories().cache), lambda gbs: _can_be_disk(gbs, sure_gbs)
        )
        profile = replace(profile, disk_read_gbs=disk_gbs)
    if weights not in profile.formats or _of_format(weights) in again:
        say(f"measuring {weights} matrices")
        profile, rates = profile.sampled(
            _of_format(weights),
            lambda: format_rates(weight_format, dtype, torch.device("cpu")),
            lambda rates: _can_be_format(weights, rates, sure_gbs),
        )
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
    before, again, on_card = profile, _again(profile), _of_format(weights, on_card=True)
    rates = profile.device
    if rates is None or _CARD in again:
        say("measuring the graphics card")
        profile, found = profile.sampled(_CARD, lambda: device_rates(device), _can_be_device)
        rates = found if rates is None else replace(found, formats=rates.formats)
    copy_gbs = rates.device_copy_gbs
    if weights not in rates.formats or on_card in again:
        say(f"measuring {weights} matrices on the graphics card")
        profile, of_format = profile.sampled(
            on_card,
            lambda: format_rates(weight_format, dtype, device),
            lambda rates: _can_be_format(weights, rates, copy_gbs, is_compiled=False),
        )
        rates = replace(rates, formats={**rates.formats, weights: of_format})
    profile = replace(profile, device=rates)
    if profile != before:
        keep(profile)
        give_back_cached(device)
        give_back_freed()
    return profile


def _again(profile: Profile) -> tuple[str, ...]:
    """What is measured once more, as it is doubtful and the machine is quiet now."""
    names = tuple(name for name in profile.taken if profile.may_come_out_better(name))
    return names if names and other_work.is_quiet() else ()


def _of_format(weights: str, *, on_card: bool = False) -> str:
    return f"{weights} matrices on the {_CARD}" if on_card else f"{weights} matrices"


def _can_be_dram(dram_gbs: float | None) -> bool:
    return dram_gbs is None or dram_gbs >= _LEAST_DRAM_GBS


def _can_be_disk(disk_gbs: float | None, dram_gbs: float | None) -> bool:
    return disk_gbs is None or dram_gbs is None or disk_gbs <= dram_gbs


def _can_be_format(
    weights: str, rates: FormatRates, memory_gbs: float | None, *, is_compiled: bool | None = None
) -> bool:
    """Beside the memory that the matrices are read from. A matrix of 4 bytes a weight costs half an operation a byte,
    and many rows are not computed slower than one after the other. is_compiled: its kernels are; None: as a CPU's."""
    is_compiled = is_available() if is_compiled is None else is_compiled
    is_plain = weights == "nf4" or not is_compiled
    least_share = _LEAST_PLAIN_SHARE if is_plain else _LEAST_SHARE
    enough = memory_gbs is None or rates.matrix_gbs >= least_share * memory_gbs
    return enough and rates.compute_gops >= rates.matrix_gbs / 2


def _can_be_device(rates: DeviceRates) -> bool:
    return max(rates.h2d_gbs, rates.d2h_gbs) <= rates.device_copy_gbs


def _dram_gbs() -> float:
    floor = MemoryFloor(_MEMORY_BYTES)
    return statistics.median(floor.dram_read_gbs() for _ in range(_REPEATS))


def _disk_gbs(directory: Path) -> float:
    with disk_file(directory, _DISK_BYTES) as file:
        # The best of a few is what a disk gives in a burst: predictions from it came out a third too high.
        return UNKNOWN_DISK_GBS if file is None else statistics.median(file.read_gbs() for _ in range(_DISK_READS))


def _parsed(found: Mapping[str, Any]) -> Profile:
    """Raises ValueError for a figure that is none: a plan would divide by it."""
    _require_figures(found)
    device = found["device"]
    if device is not None:
        device = DeviceRates(**{**device, "formats": _parsed_formats(device["formats"])})
    scores = {name: _parsed_score(name, score) for name, score in found["scores"].items()}
    parts = {"formats": _parsed_formats(found["formats"]), "device": device, "scores": scores}
    taken = {name: Taken(**each) for name, each in found["taken"].items()}
    if any(each.at_s > _LAST_S for each in taken.values()):
        raise ValueError("no date is as late")
    return Profile(**{**found, **parts, "taken": taken})


def _parsed_score(name: str, found: Mapping[str, Any]) -> Score:
    _, *term = name.split()
    if len(term) != len(Term._fields):
        raise ValueError(f"{name} is no kind of run")
    return Score(tuple(found["ratios"]), found["correction"], found["first"])


def _require_figures(found: object, name: str = "") -> None:
    """Every figure in it is a number, finite and above 0, but for bytes and seconds that may be none."""
    if isinstance(found, Mapping | list):
        for key, value in found.items() if isinstance(found, Mapping) else enumerate(found):
            _require_figures(value, str(key))
    elif isinstance(found, int | float):
        if not math.isfinite(found) or found < 0 or (found == 0 and not name.endswith(_MAY_BE_0)):
            raise ValueError(f"{name} is {found}")
    elif name not in (_MAY_BE_UNKNOWN if found is None else ("machine",)):
        raise ValueError(f"{name} is no number")


def _parsed_formats(found: Mapping[str, Any]) -> dict[str, FormatRates]:
    return {name: FormatRates(**rates) for name, rates in found.items()}


def _path() -> Path:
    return user_directories().cache / "profile.json"


def _disk_number() -> int:
    return nearest(user_directories().cache).stat().st_dev


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
