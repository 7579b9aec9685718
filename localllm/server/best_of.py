"""Answers that are chosen out of more than a client is given: the best of several, or of a beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from localllm.chat.answer import MAX_ANSWERS, best
from localllm.engine.request import MAX_BEAMS, MAX_LENGTH_PENALTY, EarlyStopping, SamplingParams
from localllm.server.bodies import Body
from localllm.server.errors import RequestError
from localllm.server.tools.deltas import Delta

# Settings of greedy decoding.
_NEUTRAL: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


class BestOfBody(Body):
    """Fields of requests for several answers, or the best of several."""

    n: Annotated[int | None, Field(ge=1, le=MAX_ANSWERS)] = None
    best_of: Annotated[
        int | None,
        Field(ge=0, le=MAX_ANSWERS, description="So many are computed, the `n` likeliest per token are given; 0: `n`."),
    ] = None
    beam_width: Annotated[
        int | None,
        Field(ge=1, le=MAX_BEAMS, description="The answer is searched by so many beams, not drawn; `n`: the n best."),
    ] = None
    length_penalty: Annotated[
        float | None,
        Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, description="Of a search: score = sum / tokens ** this."),
    ] = None
    early_stopping: Annotated[
        EarlyStopping | None,
        Field(description='Of a search: whether the first whole answers end it. "never": only where none can win.'),
    ] = None
    stream: bool | None = None


@dataclass(frozen=True)
class BestOf:
    """The choice of n answers to each prompt.

    best_of: so many are computed; 0: no more than n
    beams: more than 1 has the n best found by a beam search
    """

    best_of: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def num_requests(self, n: int) -> int:
        """Return the number of the engine's requests for each prompt."""
        return 1 if self.beams > 1 else self.best_of or n

    def rows(self, n: int) -> int:
        """Return the rows of a step for each prompt."""
        return max(self.num_requests(n), self.beams)

    def chosen(self, answers: Sequence[Delta], n: int) -> list[list[Delta]]:
        """Return the answers that are given, by prompt; a beam search may have found fewer than n."""
        if self.beams > 1:
            return [[answer, *answer.others] for answer in answers]
        count = self.num_requests(n)
        groups = [answers[first : first + count] for first in range(0, len(answers), count)]
        return [best(group, n, _end) if count > n else list(group) for group in groups]


NO_BEST_OF = BestOf()


def requested_best_of(body: BestOfBody, sampling: SamplingParams) -> tuple[BestOf, SamplingParams]:
    """Return how answers are chosen, and the sampling that goes with it. Raises RequestError for contradictions."""
    n = body.n or 1
    if (body.beam_width or 1) > 1:
        return _searching(body, n), replace(sampling, **_NEUTRAL)
    for field in ("length_penalty", "early_stopping"):
        if getattr(body, field) is not None:
            raise _refused(field, "it says how beams are searched, and there is no 'beam_width' of 2 or more")
    count = body.best_of or n
    if count < n:
        raise _refused("best_of", f"it is {count}, and 'n' {n}: no more can be given than there are")
    if body.stream and count > n:
        raise _refused("best_of", "which answers are the best is known when all are whole: there is nothing to stream")
    return BestOf(count), sampling


def _searching(body: BestOfBody, n: int) -> BestOf:
    beams = body.beam_width or 1
    if body.best_of:
        raise _refused("best_of", "'beam_width' has the best of many more answers found")
    if n > beams:
        raise _refused("n", f"it is {n}, and 'beam_width' {beams}: no more answers are found than there are beams")
    if body.stream and n > 1:
        raise _refused("stream", "the answers of a search are known when it ends, and 'n' of 1 alone can be streamed")
    for field, neutral in _NEUTRAL.items():
        if getattr(body, field) not in (None, neutral):
            raise _refused(field, f"a search by 'beam_width' draws nothing: leave it out, or send {neutral:g}")
    searched = {field: getattr(body, field) for field in ("length_penalty", "early_stopping")}
    return BestOf(beams=beams, **{field: value for field, value in searched.items() if value is not None})


def _refused(param: str, why: str) -> RequestError:
    return RequestError(400, f"{param!r} cannot be honoured", why=why, param=param, name="invalid_value")


def _end(answer: Delta) -> Any:
    return answer.end
