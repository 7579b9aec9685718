"""From a forward to the next token of each sequence: drawn by a GPU's kernel where that knows how, else by the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from localllm.engine.events import StepSplit, TokenLogprob
from localllm.engine.runner import Chunk, ModelRunner
from localllm.engine.sampler import PlainDraw, sample, token_logprob
from localllm.engine.sequence import Sequence as Running

Scheduled = Sequence[tuple[Running, Chunk]]


@dataclass(frozen=True)
class Outcome:
    """Of one chunk: fp32 logits [V] behind it, or the token that was drawn from them."""

    logits: Tensor | None
    token_id: int | None
    is_finite: bool

    def token(self, sequence: Running, text_of: Callable[[int], str]) -> tuple[int, TokenLogprob | None]:
        """The next token of a sequence, with its logprob where that is asked for."""
        if self.token_id is not None:
            return self.token_id, None
        assert self.logits is not None
        sampling, started = sequence.request.sampling, time.perf_counter()
        token_id = sample(
            self.logits,
            sampling,
            sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            seed=sequence.seed,
            breaker_ids=sequence.breaker_ids,
        )
        sequence.clock.split += StepSplit(sample_s=time.perf_counter() - started)
        if sampling.logprobs is None:
            return token_id, None
        return token_id, token_logprob(self.logits, token_id, sampling.logprobs, text_of)


def outcomes_of(logits: Tensor) -> list[Outcome]:
    """logits fp32 [chunks, V]. Waits for them."""
    totals = logits.sum(dim=-1).tolist()  # a NaN or an infinity stays what it is in a sum
    return [Outcome(row, None, math.isfinite(total)) for row, total in zip(logits, totals, strict=True)]


def drawn_on_device(runner: ModelRunner, scheduled: Scheduled, *, is_alone: bool) -> list[Outcome] | None:
    """One token for each, where all of them can be drawn so; None where not. is_alone: nobody waits to run beside them.

    Raises as `ModelRunner.draw`.
    """
    draws = [PlainDraw.of(sequence.request.sampling, sequence.seed) for sequence, _ in scheduled]
    plain = [draw for draw in draws if draw is not None]
    chunks = [chunk for _, chunk in scheduled]
    reach_ends = all(chunk.kv.length + chunk.num_tokens == len(chunk.token_ids) for chunk in chunks)
    if len(plain) < len(draws) or not reach_ends or not runner.draws(chunks):
        return None
    goes_on = is_alone and all(len(sequence.token_ids) + 1 < sequence.max_length for sequence, _ in scheduled)
    tokens = runner.draw(chunks, plain, goes_on=goes_on and runner.model.config.rope_switch_length is None)
    return None if tokens is None else [Outcome(None, token, token >= 0) for token in tokens]
