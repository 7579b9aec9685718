"""Several answers to one prompt: the seed of each, and which are given out of more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from localllm.engine.events import FinishedEvent
from localllm.engine.request import SamplingParams

T = TypeVar("T")

MAX_ANSWERS = 16  # to one request


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Of several answers to one prompt, each has its own noise."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**63)


def best(answers: Sequence[T], count: int, ending: Callable[[T], FinishedEvent]) -> list[T]:
    """Those with the highest log-probability per token, as OpenAI has it, the best first; of equals, the first."""

    def mean_logprob(answer: T) -> float:
        mean = ending(answer).mean_logprob
        return float("-inf") if mean is None else mean

    return sorted(answers, key=mean_logprob, reverse=True)[:count]
