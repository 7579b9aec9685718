"""Drafts that are right as often as is asked for, and other ways to set what an engine drafts with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from localllm.engine.engine import Engine
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.controller import Controller, Option, Situation, StepTimes
from localllm.engine.speculative.drafter import Draft
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.speculator import Speculation, speculation
from localllm.models.layout import EMBED, HEAD


class Oracle(NgramLookup):
    """Offers the tokens that will be sampled, each wrong with a probability of 1 - alpha, at no cost.

    streams: prompt and answer, by the prompt.
    """

    name = "oracle"

    def __init__(self, streams: Mapping[tuple[int, ...], Sequence[int]], alpha: float, vocab_size: int, seed: int = 0):
        super().__init__()
        self._streams, self._alpha, self._vocab_size = streams, alpha, vocab_size
        self._random = random.Random(seed)

    def read(self, _sequences: Sequence[Running]) -> None:
        """No-op: it needs no text."""

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        return [self._offer(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]

    def _offer(self, sequence: Running, limit: int) -> Draft:
        length = len(sequence.token_ids)
        right = self._streams[sequence.request.prompt_ids][length : length + limit]
        drafted = (t if self._random.random() < self._alpha else (t + 1) % self._vocab_size for t in right)
        return Draft(tuple(drafted), self.name)

    def hindsight(self, _sequence: Running, _since: int, _limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        return iter(())


class Wrong(Oracle):
    """Always offers a draft, and never the right one."""

    name = "wrong"

    def __init__(self, streams: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        super().__init__(streams, 0.0, vocab_size)

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        return [replace(offer, source="ngram-16") for offer in super().offers(sequences, limits)]

    def hindsight(self, sequence: Running, since: int, limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        token_ids = sequence.token_ids
        for end in range(max(since, len(token_ids) - 8), len(token_ids)):
            yield Draft(((token_ids[end] + 1) % 1000,), "ngram-16"), token_ids[end : end + limit]


class FixedCount(Controller):
    """Drafts as many tokens as may be in every step."""

    def __init__(self) -> None:
        super().__init__(StepTimes())

    def choose(self, situation: Situation, drafters: Sequence[str]) -> Option | None:
        most, drafter = situation.most, drafters[0] if drafters else None
        are_offered = tuple(bool(offer.token_ids) for offer in situation.offers)
        counts = tuple(
            max(0, min(most, limit, len(offer.token_ids) if offer.token_ids or drafter is None else limit))
            for limit, offer in zip(situation.limits, situation.offers, strict=True)
        )
        if not any(counts):
            return None
        return Option(counts, are_offered, None if all(are_offered) else drafter, 1.0, 1.0)


def draft_with(engine: Engine, wish: Speculate, lookup: NgramLookup | None = None) -> None:
    """Draft so from now on. lookup: that drafts in place of the wish's."""
    engine.speculation.close()
    if lookup is None:
        engine.speculation = speculation(wish, engine.residency, engine.plan)
    else:
        engine.speculation = Speculation(engine.residency, lookup, (), wish.most_tokens)


def stream(engine: Engine, is_streamed: Callable[[str], bool]) -> None:
    """Read these blocks, by their names, from the disk at every step; embedding and head stay in memory."""
    blocks = engine.residency.blocks
    tiers = ["disk" if block.name not in (EMBED, HEAD) and is_streamed(block.name) else "ram" for block in blocks]
    engine.residency.move([replace(block, tier=tier) for block, tier in zip(blocks, tiers, strict=True)])  # type: ignore[arg-type]
