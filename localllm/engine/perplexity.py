"""The perplexity of a text: how well a model predicts its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from localllm.cache.paged_kv import PagedKV
from localllm.engine.events import ignore
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk, StepCancelledError
from localllm.errors import UsageError
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.models.load import Progress

CHUNK_TOKENS = 256  # logits of all of them at once: 150 MB of fp32 at a vocabulary of 150,000


@dataclass(frozen=True)
class Perplexity:
    nll: float  # mean natural-log surprise
    tokens: int  # that were predicted
    ctx: int  # the window's length

    @classmethod
    def of_all(cls, texts: Sequence[Perplexity]) -> Perplexity:
        """Return that of the tokens of several texts, of which each was read from its beginning."""
        tokens = sum(each.tokens for each in texts)
        return cls(sum(each.nll * each.tokens for each in texts) / tokens, tokens, texts[0].ctx)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf


def perplexity(
    runner: ModelRunner,
    token_ids: Sequence[int],
    *,
    ctx: int,
    new_kv: Callable[[int], PagedKV],
    progress: Progress = ignore,
) -> Perplexity:
    """Measure windows of `ctx` tokens, side by side; in each, every token but the first is predicted from those before
    it.

    A last window of one token predicts nothing and is left out. Raises UsageError for a text of fewer than two tokens
    or a window that short, NonFiniteError where the model computes a NaN.
    """
    if len(token_ids) < 2 or ctx < 2:
        raise UsageError(
            "there is nothing to predict",
            why=f"the text has {len(token_ids)} tokens, the window {ctx}; both must be 2 or more",
        )
    surprise, predicted = 0.0, 0
    with closing(new_kv(min(ctx, len(token_ids)))) as kv:
        kv.attend_from = 0  # where tokens of an answer choose their pages, all of a window do
        count = CHUNK_TOKENS if kv.masses is None else PAGE_TOKENS  # behind each page one may leave
        for begin in range(0, len(token_ids) - 1, ctx):
            window = list(token_ids[begin : begin + ctx])
            kv.trim(0)
            of_window = 0.0
            while kv.length < len(window):
                first = kv.length
                chunk = Chunk(window, kv, min(count, len(window) - first), all_logits=True)
                try:
                    of_window += _surprise(runner, chunk, window[first + 1 : first + chunk.num_tokens + 1])
                except StepCancelledError:  # kernels of a GPU failed within a hybrid: nothing of the window is left
                    of_window = 0.0
                progress(begin + kv.length, len(token_ids))
            surprise += of_window
            predicted += len(window) - 1
    return Perplexity(surprise / predicted, predicted, ctx)


def _surprise(runner: ModelRunner, chunk: Chunk, targets: Sequence[int]) -> float:
    """Return the sum of -log p(target) over the chunk; the last row of a window has no target."""
    logits = runner.forward([chunk])[: len(targets)]
    logprobs = logits.log_softmax(-1)
    surprise = (
        -logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None]).sum().item() if targets else 0.0
    )
    if not math.isfinite(surprise):
        raise runner.locate_non_finite(chunk)
    return surprise
