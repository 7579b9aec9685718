"""Guesses that are right as often as is asked for: what speculation gives by itself, whoever guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.drafter import Draft


class Oracle:
    """Offers what will be said, each token wrong with a probability of 1 - alpha; at no cost."""

    name = "oracle"

    def __init__(self, streams: Mapping[tuple[int, ...], Sequence[int]], alpha: float, vocab_size: int, seed: int = 0):
        """streams: by the prompt, prompt and answer."""
        self._streams, self._alpha, self._vocab_size = streams, alpha, vocab_size
        self._random = random.Random(seed)

    def read(self, _sequences: Sequence[Running]) -> None:
        """It needs no text."""

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        return [self._offer(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]

    def _offer(self, sequence: Running, limit: int) -> Draft:
        length = len(sequence.token_ids)
        right = self._streams[sequence.request.prompt_ids][length : length + limit]
        guesses = (t if self._random.random() < self._alpha else (t + 1) % self._vocab_size for t in right)
        return Draft(tuple(guesses), self.name)

    def hindsight(self, _sequence: Running, _since: int, _limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        return iter(())

    def forget(self, _sequence: Running) -> None:
        """It keeps nothing."""
