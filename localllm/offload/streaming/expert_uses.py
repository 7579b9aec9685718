"""How soon a token's experts are wanted again: counted while a model writes, for the plans of its later runs.

Knows no slots and no files.
"""

from __future__ import annotations

from collections.abc import Sequence

BINS = 20  # of the share of a block's experts that were used since


class ExpertUses:
    """hits, wanted: of the experts of single tokens, those that were in memory and not because they were foreseen, and
    all of them.

    counts: of these, by how many other experts of their block had been used since their last use, in `BINS` equal
    shares of all; behind them those that had not been used before. A prompt counts for nothing, but its experts have
    been used.
    """

    def __init__(self) -> None:
        self.hits = self.wanted = 0
        self.counts = [0] * (BINS + 1)
        self._recent: dict[str, list[int]] = {}  # of each block, the expert that was used last at first

    def see(self, block: str, experts: Sequence[int], num_experts: int, hits: int | None) -> None:
        """Count a step's experts of a block, which are different ones: 1 µs each.

        num_experts: of the block. hits: those that are in memory; None where the step is not of a single token.
        """
        recent = self._recent.setdefault(block, [])
        places = [recent.index(index) if index in recent else num_experts for index in experts]
        for place in sorted(places, reverse=True):
            del recent[place : place + 1]  # nothing where it was not used before
        recent[:0] = experts
        if hits is None:
            return
        self.hits += hits
        self.wanted += len(experts)
        for place in places:
            self.counts[BINS * place // num_experts] += 1
