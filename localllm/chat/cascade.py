"""A cascade of models: the first answers where it is sure, else the next one (FrugalGPT, arXiv:2305.05176).

Knows answers and how sure of them a model is. Knows no engine, and not where the models are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localllm.chat.context import is_cut_by_context
from localllm.engine.events import FinishedEvent

DEFAULT_ACCEPT = 0.7


@dataclass(frozen=True)
class Bar:
    """What an answer must pass. accept: the least confidence, above 0. drafts: answers that must agree; 1: the one
    answer's tokens must be likely."""

    accept: float
    drafts: int = 1

    @property
    def is_scored(self) -> bool:
        """The value of `Request.is_scored`."""
        return self.drafts == 1


@dataclass(frozen=True)
class Tried:
    """A model that was asked. confidence: in its answer, 0 to 1; None where nothing was judged. fault: as of
    `Judgement`."""

    model: str
    confidence: float | None
    is_accepted: bool
    fault: str = ""

    def fields(self) -> dict[str, Any]:
        """Return it for the JSON forms."""
        confidence = None if self.confidence is None else round(self.confidence, 4)
        return {"model": self.model, "confidence": confidence, "accepted": self.is_accepted}

    def reason(self, bar: Bar) -> str:
        """Return in words how the confidence compares."""
        if self.confidence is None:
            return self.fault
        return f"confidence {self.confidence:.2f}, {bar.accept:g} is enough"

    def __str__(self) -> str:
        return self.model if self.confidence is None else f"{self.model} {self.confidence:.3f}"


@dataclass(frozen=True)
class Judgement:
    """place: of the answer that is given if it is accepted. confidence: None where none could be given. fault: why
    the first of them could not."""

    place: int = 0
    confidence: float | None = None
    is_accepted: bool = False
    fault: str = ""


def judged(bar: Bar, texts: Sequence[str], endings: Sequence[FinishedEvent]) -> Judgement:
    """Return how the answers of one model to one prompt are judged. texts: what each says.

    The confidence in one answer is the geometric mean of its tokens' probabilities; in several it is the share that
    says the same, in other cases and blanks perhaps, as the most frequent one. An answer that is empty, misses its
    grammar or was cut by its model's context is not given.
    """
    said = {
        place: " ".join(text.casefold().split()).rstrip(".!")
        for place, (text, finished) in enumerate(zip(texts, endings, strict=True))
        if not _fault(text, finished)
    }
    if not said:
        return Judgement(fault=_fault(texts[0], endings[0]))
    most, votes = Counter(said.values()).most_common(1)[0]
    place = next(place for place, text in said.items() if text == most)
    confidence = votes / len(texts)
    if bar.is_scored:
        mean = endings[place].mean_logprob
        confidence = 0.0 if mean is None else math.exp(mean)
    return Judgement(place, confidence, confidence >= bar.accept)


def _fault(text: str, finished: FinishedEvent) -> str:
    """Return why an answer cannot be given; "" where it can."""
    if finished.ctx is not None and is_cut_by_context(finished, finished.ctx):
        return f"its answer was cut, as its context of {finished.ctx} tokens is full"
    if finished.meets_grammar is False:
        num_tokens = finished.usage.completion_tokens
        cut = f"was cut after {num_tokens} token{'s' * (num_tokens != 1)}, and "
        return f"its answer {cut if finished.finish_reason == 'length' else ''}does not have the form"
    return "" if text.strip() else "its answer is empty"
