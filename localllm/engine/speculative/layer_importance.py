"""How much of what a model says is lost with each of its blocks: learnt from trials in which some were left out.

Blocks are taken to do harm independently: of a share exp(-h) of tokens that stay the same without one block, and
exp(-g) without another, exp(-h - g) do without both. What the h are is a Bayesian linear regression over the trials;
its samples propose what to try next (Thompson sampling, where SWIFT, arXiv:2410.06916, has a Gaussian process).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Published sets skip half of the attention and a quarter to half of the MLPs, and nothing at either end.
_ATTENTION_HARM, _MLP_HARM, _EDGE_FACTOR, _EDGE_SHARE = 0.02, 0.06, 5.0, 0.1
_PRIOR_SPREAD = 0.2  # by which a block's harm may well differ from what is thought of it
_LEAST_NOISE = 1e-3
_MOST_TRIALS = 400


@dataclass(frozen=True)
class Trial:
    """Of `count` tokens, `same` were drawn again without these blocks."""

    skipped: frozenset[str]
    same: int
    count: int


class Harm:
    def __init__(self, names: Sequence[str], trials: Sequence[Trial] = ()) -> None:
        """names: of the blocks in order, attention and MLP in turn."""
        self.names = tuple(names)
        self._index = {name: i for i, name in enumerate(self.names)}
        known = [trial for trial in trials if trial.skipped <= self._index.keys() and trial.count > 0]
        self.trials = known[-_MOST_TRIALS:]
        self._prior = np.array([_thought(i, len(self.names)) for i in range(len(self.names))])

    def learn(self, trial: Trial) -> None:
        self.trials = [*self.trials, trial][-_MOST_TRIALS:]

    def expected(self) -> dict[str, float]:
        """Of each block, never below 0."""
        mean, _ = self._posterior()
        return {name: max(0.0, float(value)) for name, value in zip(self.names, mean, strict=True)}

    def sampled(self, generator: random.Random) -> dict[str, float]:
        """As it may be, by what is known."""
        mean, precision = self._posterior()
        noise = np.array([generator.gauss(0, 1) for _ in self.names])
        drawn = mean + np.linalg.solve(np.linalg.cholesky(precision).T, noise)
        return {name: max(0.0, float(value)) for name, value in zip(self.names, drawn, strict=True)}

    def _posterior(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean, and inverse covariance."""
        precision = np.diag((_PRIOR_SPREAD + self._prior) ** -2)
        weighted = precision @ self._prior
        for trial in self.trials:
            row = np.zeros(len(self.names))
            row[[self._index[name] for name in trial.skipped]] = 1
            share = (trial.same + 0.5) / (trial.count + 1)
            certainty = 1 / ((1 - share) / (share * (trial.count + 1)) + _LEAST_NOISE)
            precision += certainty * np.outer(row, row)
            weighted += certainty * -math.log(share) * row
        return np.linalg.solve(precision, weighted), precision


def least_harmful(harm: Mapping[str, float], cost: Mapping[str, float], most_harm: float) -> frozenset[str]:
    """The blocks to leave out for the most cost saved, as long as they do so much harm together."""
    chosen: set[str] = set()
    total = 0.0
    for name in sorted(harm, key=lambda name: harm[name] / cost[name]):
        if total + harm[name] <= most_harm:
            chosen.add(name)
            total += harm[name]
    return frozenset(chosen)


def _thought(index: int, count: int) -> float:
    """Of a block's harm, before any trial."""
    usual = _ATTENTION_HARM if index % 2 == 0 else _MLP_HARM
    place = (index + 0.5) / count
    return usual * (_EDGE_FACTOR if min(place, 1 - place) < _EDGE_SHARE else 1.0)
