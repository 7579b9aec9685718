"""Guesses that a model makes one after the other, each with the noise that the draw at its place will have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from localllm.cache.paged_kv import PagedKV
from localllm.engine.drawing import drawn_with_margin
from localllm.engine.memory import is_out_of_memory
from localllm.engine.runner import Chunk, ModelRunner
from localllm.engine.sequence import Sequence as Running

# By how much a guess won, in doublings from an eighth on: what it says of a guess is learnt for each grade.
_GRADES = 8
_KEPT = 0.98  # of what was learnt, at each new guess: some fifty count
_PRIOR_WEIGHT = 4.0


class Confidence:
    """How often guesses that won by a margin were right."""

    def __init__(self) -> None:
        self._guessed: dict[int, tuple[int, list[tuple[int, float]]]] = {}  # by request: where, and what, the last time
        # Before anything is known: a coin's throw where two tokens were level, nearly certain where none came close.
        self._rates = [
            (_PRIOR_WEIGHT * (0.5 + 0.48 * grade / (_GRADES - 1)), _PRIOR_WEIGHT) for grade in range(_GRADES)
        ]

    def of(self, margin: float) -> float:
        right, all_told = self._rates[_grade(margin)]
        return right / all_told

    def guessed(self, sequence: Running, draft: list[tuple[int, float]]) -> None:
        self._guessed[sequence.request_id] = len(sequence.token_ids), draft

    def learn(self, sequence: Running) -> None:
        """From the last guesses, as far as they were right, and the first that was not."""
        first, draft = self._guessed.pop(sequence.request_id, (0, []))
        for (token, margin), own in zip(draft, sequence.token_ids[first:], strict=False):
            right, all_told = self._rates[_grade(margin)]
            self._rates[_grade(margin)] = (_KEPT * right + (token == own), _KEPT * all_told + 1)
            if token != own:
                return

    def forget(self, sequence: Running) -> None:
        self._guessed.pop(sequence.request_id, None)


def _drawn(row: Tensor, sequence: Running, token_ids: Sequence[int]) -> tuple[int, float] | None:
    """None where there is none: logits that are no numbers, a mask that has no answer behind guesses that may be wrong.
    Whether the answer itself ends of it, its own draws tell."""
    try:
        token, margin = drawn_with_margin(row, sequence, token_ids)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return None if math.isnan(margin) else (token, margin)


def _grade(margin: float) -> int:
    if margin < 0.125:
        return 0
    return min(_GRADES - 1, 1 + int(math.log2(min(margin, 1e9) / 0.125)))


def guesses(
    runner: ModelRunner,
    sequences: Sequence[Running],
    kvs: Sequence[PagedKV],
    limits: Sequence[int],
    confidence: Confidence,
    least: float,
    *,
    cancelled: Callable[[], bool],
    vocab_size: int | None = None,
) -> list[list[tuple[int, float]]]:
    """Tokens with their margins. kvs: what the runner's model has computed of each sequence, all but its last token or
    the last few; they do not advance. `limits`, `least`: as at `Drafter.propose`. vocab_size: of the logits that these
    stand for, where a model pads its own to another size."""
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
        rows = runner.forward(chunks, cancelled=cancelled, advances=False)
        if vocab_size is not None and rows.shape[-1] != vocab_size:
            rows = functional.pad(rows, (0, vocab_size - rows.shape[-1]), value=-math.inf)
        for index, chunk, row in zip(live, chunks, rows, strict=True):
            guess = _drawn(row, sequences[index], chunk.token_ids)
            if guess is None:
                sure[index] = -1.0
                continue
            drafts[index].append(guess)
            sure[index] *= confidence.of(guess[1])
        live = [index for index in live if len(drafts[index]) < limits[index] and sure[index] >= max(least, 0.0)]
    for sequence, draft in zip(sequences, drafts, strict=True):
        confidence.guessed(sequence, draft)
    return drafts
