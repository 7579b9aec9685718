"""From a forward to the next tokens of each sequence: drawn by a GPU's kernel where that knows how, else by the host.

Of a sequence whose chunk ends in guessed tokens there is one draw more than guesses: behind the token before each, and
behind the last. Each is drawn as it would be had the tokens before it been computed one by one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from localllm.engine.events import StepSplit, TokenLogprob
from localllm.engine.runner import Chunk, ModelRunner, with_branches
from localllm.engine.sampler import PlainDraw, penalised, sample, sample_with_margin, token_logprob
from localllm.engine.sequence import Sequence as Running
from localllm.errors import LocalLLMError

Scheduled = Sequence[tuple[Running, Chunk]]


class _Drawing(TypedDict):
    num_prompt_tokens: int
    seed: int
    breaker_ids: frozenset[int]


@dataclass(frozen=True)
class Outcome:
    """Of one chunk: fp32 logits [1 + guesses, V], or the tokens that were drawn from them. are_finite: of each row.
    all_logits: [T, V] of all of its tokens, where it wants these."""

    logits: Tensor | None
    token_ids: Sequence[int]
    are_finite: Sequence[bool]
    branch: Outcome | None = None  # of the chunk's
    all_logits: Tensor | None = None
    states: Tensor | None = None  # [T, hidden] of the chunk's tokens, where its sequence is pooled

    def token(self, row: int, sequence: Running, text_of: Callable[[int], str]) -> tuple[int, TokenLogprob | None]:
        """The next token of a sequence that has taken in those of the rows before, with its logprob where that is asked
        for."""
        if self.logits is None:
            return self.token_ids[row], None
        sampling, started = sequence.request.sampling, time.perf_counter()
        token_id = drawn(self.logits[row], sequence, sequence.token_ids)
        sequence.clock.split += StepSplit(sample_s=time.perf_counter() - started)
        if sequence.score is not None:
            sequence.score.take(float(self.logits[row].log_softmax(-1)[token_id]))
        if sampling.logprobs is None:
            return token_id, None
        return token_id, token_logprob(self.logits[row], token_id, sampling.logprobs, text_of)


def drawn(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> int:
    """What follows these tokens, the sequence's own and perhaps guessed ones behind them, by fp32 logits [V]."""
    sampling, constraint = sequence.request.sampling, sequence.constraint
    if constraint is not None:
        said = token_ids[sequence.num_prompt_tokens :]
        if forced := constraint.forced(said):
            return forced[0]
        if sampling.temperature == 0:
            # What is the likeliest of all and allowed is the likeliest of what is allowed: no mask is needed.
            best = sample(logits, sampling, token_ids, **_of(sequence))
            if constraint.allows(said, best):
                return best
    return sample(_allowed(logits, sequence, token_ids), sampling, token_ids, **_of(sequence))


def drawn_with_margin(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> tuple[int, float]:
    """As `drawn`, with the margin of `sample_with_margin`."""
    logits, sampling = _allowed(logits, sequence, token_ids), sequence.request.sampling
    return sample_with_margin(logits, sampling, token_ids, **_of(sequence))


def log_probabilities(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> Tensor:
    """fp32 [V] of what may follow these tokens, where nothing is drawn. Penalties and masks change them as they would
    change logits: they need not sum up to 1 then. Raises LocalLLMError where nothing may follow."""
    logprobs = penalised(
        logits.log_softmax(-1),
        sequence.request.sampling,
        token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        breaker_ids=sequence.breaker_ids,
    )
    return _allowed(logprobs, sequence, token_ids)


def _of(sequence: Running) -> _Drawing:
    return {
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "seed": sequence.seed,
        "breaker_ids": sequence.breaker_ids,
    }


def _allowed(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> Tensor:
    """-inf where a mask or a grammar forbids. Raises LocalLLMError where it allows nothing."""
    request = sequence.request
    if sequence.constraint is not None:
        return sequence.constraint.held(logits, token_ids[sequence.num_prompt_tokens :])
    if request.mask is None:
        return logits
    allowed = request.mask(token_ids[sequence.num_prompt_tokens :]).to(logits.device)
    if not bool(allowed.any()):
        why = f"nothing may follow after {len(token_ids) - sequence.num_prompt_tokens} tokens of the answer"
        raise LocalLLMError("the answer cannot go on as it must", why=why)
    return logits.masked_fill(~allowed, -torch.inf)


def num_rows(scheduled: Scheduled) -> int:
    """Of a step, but for guesses."""
    return sum(chunk.num_tokens - chunk.num_drafted for _, chunk in scheduled)


def plain_draw(sequence: Running) -> PlainDraw | None:
    """None where a GPU's kernel cannot draw for it."""
    is_free = sequence.request.mask is None and sequence.constraint is None and sequence.pool is None
    is_free = is_free and sequence.score is None and sequence.search is None  # which look at logits
    return PlainDraw.of(sequence.request.sampling, sequence.seed) if is_free else None


def _joined(scheduled: Scheduled, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """outcomes: of each chunk, and of its branch."""
    rest = iter(outcomes)
    return [replace(next(rest), branch=None if chunk.branch is None else next(rest)) for _, chunk in scheduled]


def compute(
    runner: ModelRunner,
    scheduled: Scheduled,
    *,
    goes_on: bool,
    cancelled: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> list[Outcome]:
    """Of one forward. goes_on: the next step is very likely one of a token for each of the same. Raises as
    `ModelRunner.forward` and `ModelRunner.draw`."""
    outcomes = _drawn_on_device(runner, scheduled, goes_on=goes_on)
    if outcomes is not None:
        return outcomes
    chunks = [chunk for _, chunk in scheduled]
    if all(sequence.pool is None for sequence, _ in scheduled):
        return _outcomes_of(runner.forward(chunks, cancelled=cancelled, progress=progress), scheduled)
    logits, states = runner.forward_with_states(chunks, cancelled=cancelled, progress=progress)
    parts = torch.split(states, [chunk.num_tokens for chunk in chunks])
    return [replace(outcome, states=part) for outcome, part in zip(_outcomes_of(logits, scheduled), parts, strict=True)]


def _outcomes_of(logits: Tensor, scheduled: Scheduled) -> list[Outcome]:
    """logits fp32 [R, V], as `ModelRunner.forward` has them. Waits for them."""
    are_finite = [math.isfinite(total) for total in logits.sum(dim=-1).tolist()]  # a sum with a NaN is none
    chunks = with_branches(chunk for _, chunk in scheduled)
    ends = itertools.accumulate((chunk.num_logits for chunk in chunks), initial=0)
    of_chunks = zip(chunks, itertools.pairwise(ends), strict=True)
    return _joined(scheduled, (_outcome_of(chunk, logits[a:b], are_finite[a:b]) for chunk, (a, b) in of_chunks))


def _outcome_of(chunk: Chunk, logits: Tensor, are_finite: Sequence[bool]) -> Outcome:
    if not chunk.all_logits:
        return Outcome(logits, (), are_finite)
    return Outcome(logits[-1:], (), [all(are_finite)], all_logits=logits)


def _drawn_on_device(runner: ModelRunner, scheduled: Scheduled, *, goes_on: bool) -> list[Outcome] | None:
    """None where not all of them can be drawn so."""
    draws = [plain_draw(sequence) for sequence, chunk in scheduled for _ in with_branches([chunk])]
    plain = [draw for draw in draws if draw is not None]
    chunks = with_branches(chunk for _, chunk in scheduled)
    reach_ends = all(chunk.end == len(chunk.token_ids) for chunk in chunks)
    if len(plain) < len(draws) or not reach_ends or not runner.draws(chunks):
        return None
    goes_on = goes_on and all(len(sequence.token_ids) + 1 < sequence.max_length for sequence, _ in scheduled)
    tokens = runner.draw(chunks, plain, goes_on=goes_on and runner.model.config.rope_switch_length is None)
    if tokens is None:
        return None
    return _joined(scheduled, (Outcome(None, row, [token >= 0 for token in row]) for row in tokens))
