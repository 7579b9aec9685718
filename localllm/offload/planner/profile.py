"""The measured speeds of this machine, kept in the cache directory, and the accuracy of predictions made from them.

A profile is measured once, in a few seconds, and again if the machine changes: processor, threads, graphics card, disk.
Each figure is measured when it is first needed. An impossible figure, which other programs can cause, is measured once
more; if it comes out so again it is kept and is `doubtful`. So are figures measured beside other work, and those that
varied. Doubtful figures are measured again by the next run that needs them on a quiet machine.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import runpy
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from localllm.config import user_directories
from localllm.offload.planner import other_work
from localllm.offload.planner.calibration import Corrections, Score, Term
from localllm.offload.planner.machine import Rates
from localllm.offload.planner.nvml import gpu_of, gpus
from localllm.present import nearest

_VERSION = 4  # of the kept file: one of another version is measured anew
_LEAST_DRAM_GBS = 1.0  # of anything that torch runs on
# Of what memory is read at. Compiled kernels reach a third and more, and beside other programs on all cores, for which
# each waits at every matrix, a twentieth. By plain operators, as NF4 is decoded on a CPU, it is a hundredth.
_LEAST_SHARE = 1 / 8
_LEAST_PLAIN_SHARE = 1 / 1000
# Where the driver does not tell. A context and the library's kernels usually take 250 to 500 MiB; too much is only not
# used, while with too little an answer would end for want of memory.
UNKNOWN_CONTEXT_BYTES = 500 << 20
# As others measured: 24 MiB for a graph of 32 layers, and 60 MB with larger kernels.
UNKNOWN_GRAPH_NODE_BYTES = 128 << 10
UNKNOWN_DISK_GBS = 0.5  # where no file can be written: an old SATA disk
_MAY_BE_0 = ("_bytes", "_s", "others", "spread", "has_kernels")
_MAY_BE_UNKNOWN = ("dram_read_gbs", "disk_read_gbs", "device")
_MOST_SPREAD = 0.3  # a machine of its own stays below a tenth
CARD = "graphics card"
_LAST_S = 253_402_300_799  # in the year 9999
_MOST_TIMES = 4  # then a figure stays doubtful: some machines are never still, and measuring takes seconds


@dataclass(frozen=True)
class FormatRates:
    """Bytes of one row's matrices, operations of many rows', in 1e9 a second.

    workspace_bytes: of a device, beside the inputs and the output of such a product, at its peak. spread: of the
    samples, from the lower quartile to the upper one, as a share of the median.
    """

    matrix_gbs: float
    compute_gops: float
    workspace_bytes: int = 0
    spread: float = 0.0


@dataclass(frozen=True)
class DeviceRates:
    """device_copy_gbs: bytes read and bytes written, in 1e9 a second. h2d_gbs, d2h_gbs: from and to pinned memory.

    launch_s: from one small operator to the next; graph_launch_s: so in a graph that is replayed. hop_s: a token's
    hidden state to the CPU and back. context_bytes: what a process holds on the card without any tensor, the library's
    kernels included. graph_node_bytes: what the driver takes for each launch of a graph.
    """

    device_copy_gbs: float
    h2d_gbs: float
    d2h_gbs: float
    launch_s: float
    graph_launch_s: float
    hop_s: float
    context_bytes: int
    formats: Mapping[str, FormatRates] = field(default_factory=dict)
    graph_node_bytes: int = UNKNOWN_GRAPH_NODE_BYTES


@dataclass(frozen=True)
class Taken:
    """How a figure was measured.

    at_s: when, as `time.time` has it.
    others: processors that other programs kept busy meanwhile.
    times: how often it has been measured.
    """

    at_s: float
    others: float = 0.0
    times: int = 1


@dataclass(frozen=True)
class Profile:
    """The measured figures of one machine.

    machine: the key of the machine.
    scores: the accuracy of predictions, by weight format and predicted term.
    taken: how each figure was measured, by the name that `doubtful` has for it.
    """

    machine: str
    dram_read_gbs: float | None = None
    disk_read_gbs: float | None = None
    formats: Mapping[str, FormatRates] = field(default_factory=dict)  # on the CPU
    device: DeviceRates | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    taken: Mapping[str, Taken] = field(default_factory=dict)
    has_kernels: int = 1  # the CPU computes by compiled kernels

    def rates(self, weights: str) -> Rates | None:
        """Return the rates, or None if something is not measured yet."""
        found = self.formats.get(weights)
        if found is None or self.disk_read_gbs is None:
            return None
        return Rates(found.matrix_gbs, found.compute_gops, self.disk_read_gbs)

    @property
    def sure_dram_gbs(self) -> float | None:
        """Return the DRAM rate; None if it is missing or doubtful, because nothing should be compared with it then."""
        return self.dram_read_gbs if can_be_dram(self.dram_read_gbs) else None

    def of(self, weights: str) -> Profile:
        """Return the profile with only the figures that plans for such weights use."""
        device, others = self.device, {*self.formats, *(self.device.formats if self.device else ())} - {weights}
        unused = {of_format(name, on_card=on_card) for name in others for on_card in (False, True)}
        return replace(
            self,
            formats={name: rates for name, rates in self.formats.items() if name == weights},
            device=device
            and replace(device, formats={name: device.formats[name] for name in device.formats.keys() & {weights}}),
            taken={name: taken for name, taken in self.taken.items() if name not in unused},
        )

    def without_card(self) -> Profile:
        """Return the profile with only the figures of the host, for a plan with another card."""
        taken = {name: taken for name, taken in self.taken.items() if not name.endswith(CARD)}
        return replace(self, device=None, scores={}, taken=taken)

    @property
    def busy(self) -> tuple[str, ...]:
        """Return the figures that were measured beside other work, or that varied."""
        spreads = {of_format(name): rates.spread for name, rates in self.formats.items()}
        if self.device is not None:
            spreads |= {of_format(name, on_card=True): rates.spread for name, rates in self.device.formats.items()}
        beside = {name for name, taken in self.taken.items() if other_work.is_much(taken.others)}
        return tuple(sorted(beside | {name for name, spread in spreads.items() if spread > _MOST_SPREAD}))

    @property
    def impossible(self) -> tuple[str, ...]:
        """Return the figures that cannot be right although they were measured again."""
        dram, device = self.sure_dram_gbs, self.device
        doubts = {"memory": dram != self.dram_read_gbs, "disk": not can_be_disk(self.disk_read_gbs, dram)}
        doubts |= {
            of_format(name): not can_be_format(name, rates, dram, has_kernels=bool(self.has_kernels))
            for name, rates in self.formats.items()
        }
        if device is not None:
            doubts[CARD] = not can_be_device(device)
            for name, rates in device.formats.items():
                can_be = can_be_format(name, rates, device.device_copy_gbs, has_kernels=False)
                doubts[of_format(name, on_card=True)] = not can_be
        return tuple(name for name, doubted in doubts.items() if doubted)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Return the figures that may not be what this machine can do."""
        return tuple(dict.fromkeys((*self.impossible, *self.busy)))

    @property
    def measured_at_s(self) -> float | None:
        """When the oldest of the figures was measured; None if there are none."""
        return min((taken.at_s for taken in self.taken.values()), default=None)

    def lacks(self, weights: str) -> bool:
        """Return whether something has to be measured before a plan for such weights."""
        return self.dram_read_gbs is None or self.rates(weights) is None or bool(self.again())

    def again(self) -> tuple[str, ...]:
        """Return the figures to measure once more: doubtful ones, if the machine is quiet now."""
        doubtful = self.doubtful
        names = tuple(name for name, taken in self.taken.items() if name in doubtful and taken.times < _MOST_TIMES)
        return names if names and other_work.is_quiet() else ()

    def corrections(self, weights: str) -> Corrections:
        named = ((name.split(), score) for name, score in self.scores.items())
        return Corrections({Term(*term): score.correction for (of, *term), score in named if of == weights})  # type: ignore[arg-type]

    def scored(self, weights: str, term: Term, ratio: float) -> Profile:
        """Return the profile with one more run in its scores. ratio: its seconds over the uncorrected prediction."""
        name = " ".join((weights, *term))
        known = self.corrections(weights).of(term)
        score = self.scores.get(name, Score(correction=known, first=known))
        return replace(self, scores={**self.scores, name: score.after(ratio)})

    def band(self, weights: str, term: Term) -> float:
        """The share by which such a prediction may be off."""
        return self.scores.get(" ".join((weights, *term)), Score()).band


def machine_key() -> str:
    """Return everything whose change makes the figures those of another machine."""
    torch = sys.modules.get("torch")  # which says it all where it is loaded; without it a key may be another's
    version, cuda = torch_build()
    threads = _usual_threads() if torch is None else torch.get_num_threads()
    parts = [str(_VERSION), _cpu_name(), str(threads), str(psutil.virtual_memory().total >> 28)]
    if torch is None:
        card = next(iter(gpus()), None) if cuda else None
        parts += [str(card.name), str(cuda)] if card is not None else []
    elif torch.cuda.is_available():
        card = gpu_of(str(torch.cuda.get_device_properties("cuda").uuid))
        parts += [torch.cuda.get_device_name(), str(cuda)]
    else:
        card = None
    if card is not None:
        parts += [f"driver {card.driver_version}", f"PCIe {card.pcie_generation_max} x{card.pcie_width_max}"]
    return ", ".join((*parts, f"torch {version}", f"disk {_disk_number()}"))


def torch_build() -> tuple[str, str | None]:
    """Return torch's version, and that of its CUDA, or "ROCm 6.4"; None where it has neither. Does not import torch."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    named = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    hip = named.get("hip")
    return named["__version__"], named["cuda"] or (f"ROCm {hip}" if hip else None)


def _usual_threads() -> int:
    """As many as torch takes by default."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(wanted) if wanted.isdigit() else min(psutil.cpu_count(logical=False) or usable, usable)


def kept_profile() -> Profile:
    """Return the stored profile of this machine; an empty one if it is unreadable or another machine's."""
    machine = machine_key()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if found["machine"] == machine:
            return _parsed(found)
    return Profile(machine)


def keep(profile: Profile) -> None:
    """Store a profile. A cache that cannot be written is ignored."""
    with suppress(OSError):
        from localllm.whole_file import write_whole  # which a plan of a known machine does without

        path = _path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(profile), indent=1))


def of_format(weights: str, *, on_card: bool = False) -> str:
    return f"{weights} matrices on the {CARD}" if on_card else f"{weights} matrices"


def can_be_dram(dram_gbs: float | None) -> bool:
    return dram_gbs is None or dram_gbs >= _LEAST_DRAM_GBS


def can_be_disk(disk_gbs: float | None, dram_gbs: float | None) -> bool:
    return disk_gbs is None or dram_gbs is None or disk_gbs <= dram_gbs


def can_be_format(weights: str, rates: FormatRates, memory_gbs: float | None, *, has_kernels: bool) -> bool:
    """Beside the memory that the matrices are read from. A matrix of 4 bytes a weight costs half an operation a byte,
    and many rows are not computed slower than one after the other. has_kernels: they are compiled."""
    is_plain = weights == "nf4" or not has_kernels
    least_share = _LEAST_PLAIN_SHARE if is_plain else _LEAST_SHARE
    enough = memory_gbs is None or rates.matrix_gbs >= least_share * memory_gbs
    return enough and rates.compute_gops >= rates.matrix_gbs / 2


def can_be_device(rates: DeviceRates) -> bool:
    return max(rates.h2d_gbs, rates.d2h_gbs) <= rates.device_copy_gbs


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
        raise ValueError(f"{name} is not a kind of run")
    return Score(tuple(found["ratios"]), found["correction"], found["first"])


def _require_figures(found: object, name: str = "") -> None:
    """Raises ValueError unless every figure is finite and above 0; some bytes and seconds may be 0."""
    if isinstance(found, Mapping | list):
        for key, value in found.items() if isinstance(found, Mapping) else enumerate(found):
            _require_figures(value, str(key))
    elif isinstance(found, int | float):
        if not math.isfinite(found) or found < 0 or (found == 0 and not name.endswith(_MAY_BE_0)):
            raise ValueError(f"{name} is {found}")
    elif name not in (_MAY_BE_UNKNOWN if found is None else ("machine",)):
        raise ValueError(f"{name} is not a number")


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
