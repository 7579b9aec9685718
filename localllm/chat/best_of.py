"""Several answers to one prompt: the seed of each, and the choice of the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from localllm.engine.events import FinishedEvent
from localllm.engine.request import SamplingParams

T = TypeVar("T")

MAX_ANSWERS = 16  # to one request


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of one of several answers to a prompt: each has its own noise."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**63)


def best(answers: Sequence[T], count: int, ending: Callable[[T], FinishedEvent]) -> list[T]:
    """Return the answers with the highest log-probability per token, the best first; of equals, the first.

    An answer that meets its grammar comes before one that was cut.
    """

    def rank(answer: T) -> tuple[bool, float]:
        finished = ending(answer)
        mean = float("-inf") if finished.mean_logprob is None else finished.mean_logprob
        return finished.meets_grammar is not False, mean

    return sorted(answers, key=rank, reverse=True)[:count]
