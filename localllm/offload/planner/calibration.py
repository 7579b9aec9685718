"""Compare predictions with measured runs, and correct later predictions. Knows no model and no machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Bound = Literal["memory", "compute", "disk", "link"]

_MOST = 4.0  # beyond, it is not a rate that is off: the machine was stopped, or did something else
_MOST_AT_ONCE = 1.25
_KEPT = 9  # runs; four that were disturbed do not move the one in the middle
_FEWEST = 3  # that say how far off a prediction may be
_UNKNOWN_BAND, _LEAST_BAND, _MOST_BAND = 0.25, 0.05, 0.5


class Term(NamedTuple):
    """The key of a correction, for one weight format.

    where: who computes the blocks.
    phase: a step of few tokens, or the prefill of a prompt.
    bound: the resource that is waited for.
    """

    where: Literal["cpu", "gpu", "both"]
    phase: Literal["step", "prompt"]
    bound: Bound


@dataclass(frozen=True)
class Corrections:
    """The factors of one weight format by which predicted seconds are multiplied."""

    factors: Mapping[Term, float] = field(default_factory=dict)

    def of(self, term: Term) -> float:
        """Return the factor of a term; 1 before any run. Prompts use the disk's and link's factor of a step until one
        has waited for them."""
        if term not in self.factors and term.bound in ("disk", "link"):
            term = term._replace(phase="step")
        return self.factors.get(term, 1.0)


@dataclass(frozen=True)
class Score:
    """The corrections that the last runs would have needed.

    ratios: measured over uncorrected predicted seconds, of the last runs.
    correction: the factor for predicted seconds. Each run moves it a quarter of the way to the median of the ratios.
    first: the correction before any run.
    """

    ratios: tuple[float, ...] = ()
    correction: float = 1.0
    first: float = 1.0

    def after(self, ratio: float) -> Score:
        """Return the score with one more run. ratio: its seconds over the uncorrected prediction."""
        ratios = (*self.ratios, min(max(ratio, 1 / _MOST), _MOST))[-_KEPT:]
        # What was measured at first counts as a run, until there are enough others.
        middle = math.exp(statistics.median(math.log(each) for each in (self.first, *ratios)[-_KEPT:]))
        correction = min(max(middle, self.correction / _MOST_AT_ONCE), self.correction * _MOST_AT_ONCE)
        return Score(ratios, correction, self.first)

    @property
    def band(self) -> float:
        """Return the share by which a prediction may be off: twice the usual error of the last runs."""
        if len(self.ratios) < _FEWEST:
            return _UNKNOWN_BAND
        off = statistics.median(abs(math.log(ratio / self.correction)) for ratio in self.ratios)
        return min(max(2 * off, _LEAST_BAND), _MOST_BAND)
