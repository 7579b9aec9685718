"""Drafts that a model makes token by token, each with the noise that sampling at its place will have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from localllm.cache.paged_kv import PagedKV
from localllm.engine.memory import is_out_of_memory
from localllm.engine.runner import ModelRunner
from localllm.engine.sampler import next_token_with_margin
from localllm.engine.sequence import Sequence as Running
from localllm.engine.step_types import Chunk

# The margin by which a token won, in doublings from an eighth on: its acceptance is learnt for each grade.
_GRADES = 8
_KEPT = 0.98  # of what was learnt, at each new token: some fifty count
_PRIOR_WEIGHT = 4.0


class Confidence:
    """How often drafted tokens that won by a margin were accepted."""

    def __init__(self) -> None:
        self._drafted: dict[int, tuple[int, list[tuple[int, float]]]] = {}  # by request: where, and what, the last time
        # Before anything is known: a coin's throw where two tokens were level, nearly certain where none came close.
        self._rates = [
            (_PRIOR_WEIGHT * (0.5 + 0.48 * grade / (_GRADES - 1)), _PRIOR_WEIGHT) for grade in range(_GRADES)
        ]

    def of(self, margin: float) -> float:
        accepted, total = self._rates[_grade(margin)]
        return accepted / total

    def drafted(self, sequence: Running, draft: list[tuple[int, float]]) -> None:
        self._drafted[sequence.request_id] = len(sequence.token_ids), draft

    def learn(self, sequence: Running) -> None:
        """Learn from the last draft, as far as it was accepted, and from the first token that was not."""
        first, draft = self._drafted.pop(sequence.request_id, (0, []))
        for (token, margin), own in zip(draft, sequence.token_ids[first:], strict=False):
            accepted, total = self._rates[_grade(margin)]
            self._rates[_grade(margin)] = (_KEPT * accepted + (token == own), _KEPT * total + 1)
            if token != own:
                return

    def forget(self, sequence: Running) -> None:
        self._drafted.pop(sequence.request_id, None)


def _sampled(row: Tensor, sequence: Running, token_ids: Sequence[int]) -> tuple[int, float] | None:
    """Return None where there is no token: logits are no numbers, or a mask allows nothing behind drafts that may be
    wrong. Whether the answer itself fails of it, its own sampling decides."""
    try:
        token, margin = next_token_with_margin(row, sequence, token_ids)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return None if math.isnan(margin) else (token, margin)


def _grade(margin: float) -> int:
    if margin < 0.125:
        return 0
    return min(_GRADES - 1, 1 + int(math.log2(min(margin, 1e9) / 0.125)))


def draft_tokens(
    runner: ModelRunner,
    sequences: Sequence[Running],
    kvs: Sequence[PagedKV],
    limits: Sequence[int],
    confidence: Confidence,
    least: float,
    *,
    is_cancelled: Callable[[], bool],
    vocab_size: int | None = None,
) -> list[list[tuple[int, float]]]:
    """Return tokens with their margins.

    kvs: what the runner's model has computed of each sequence, all but its last token or the last few; they do not
        advance.
    limits, least: as `Drafter.propose` has them.
    vocab_size: of the logits that these stand for, where a model pads its own to another size.
    """
    drafts: list[list[tuple[int, float]]] = [[] for _ in sequences]
    sure = [1.0] * len(sequences)
    live = [index for index, limit in enumerate(limits) if limit > 0]
    for sequence in sequences:
        confidence.learn(sequence)
    while live:
        chunks = []
        for index in live:
            token_ids = [*sequences[index].token_ids, *(token for token, _ in drafts[index])]
            begin = len(token_ids) - 1 if drafts[index] else kvs[index].length
            chunks.append(Chunk(token_ids, kvs[index], len(token_ids) - begin, num_ahead=begin - kvs[index].length))
        rows = runner.forward(chunks, cancelled=is_cancelled, advances=False)
        if vocab_size is not None and rows.shape[-1] != vocab_size:
            rows = functional.pad(rows, (0, vocab_size - rows.shape[-1]), value=-math.inf)
        for index, chunk, row in zip(live, chunks, rows, strict=True):
            token = _sampled(row, sequences[index], chunk.token_ids)
            if token is None:
                sure[index] = -1.0
                continue
            drafts[index].append(token)
            sure[index] *= confidence.of(token[1])
        live = [index for index in live if len(drafts[index]) < limits[index] and sure[index] >= max(least, 0.0)]
    for sequence, draft in zip(sequences, drafts, strict=True):
        confidence.drafted(sequence, draft)
    return drafts
