"""How everything here is measured: warm up, interleave A B A B, report medians with min and max."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Spread:
    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.min:.4g} to {self.max:.4g})"


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def interleaved(measurements: dict[str, Callable[[], float]], rounds: int = 5) -> dict[str, list[float]]:
    """Each measurement once to warm up, then `rounds` times in turn; what each returned."""
    for measure in measurements.values():
        measure()
    values: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure in measurements.items():
            values[name].append(measure())
    return values


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def dram_read_gbs(buffer: torch.Tensor) -> float:
    """GB/s of reading a buffer far larger than the caches, with all of torch's threads."""
    return buffer.nbytes / seconds(buffer.sum) / 1e9


def machine() -> dict[str, object]:
    cpu = platform.processor() or platform.machine()
    for line in (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def save(name: str, result: dict[str, object]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, default=_plain) + "\n", encoding="utf-8")
    return path


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value)} is not JSON")
