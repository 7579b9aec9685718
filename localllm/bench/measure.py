"""How everything is measured: warm up, interleave A B A B, report medians with min and max. Knows no model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.config import format_figure


@dataclass(frozen=True)
class Spread:
    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{format_figure(self.median)} ({format_figure(self.min)} to {format_figure(self.max)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def paired(ours: Sequence[float], other: Sequence[float]) -> Spread:
    """The ratio within each round: what disturbs the machine for a while disturbs both sides."""
    return spread([a / b for a, b in zip(ours, other, strict=True)])


def interleaved(measurements: dict[str, Callable[[], float]], rounds: int = 5) -> dict[str, list[float]]:
    """Each measurement once to warm up, then `rounds` times in turn; what each returned."""
    for measure in measurements.values():
        measure()
    values: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure in measurements.items():
            values[name].append(measure())
    return values
