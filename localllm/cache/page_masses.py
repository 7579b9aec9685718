"""The attention that the pages of one sequence get, by which the least wanted of them leaves (H2O, arXiv:2306.14048).

All layers and heads share a page, so they decide together: a page's mass is the softmax weights of its tokens, summed
up over queries, heads and layers. Of a forward the last few tokens of a sequence count: each page then gets as many
looks, whichever of them stood before it, and a long prompt costs hardly more. Of a draft what is accepted counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.kv_page import pages_of

WATCHED_TOKENS = 16  # of a forward


class PageMasses:
    def __init__(self, capacity: int, kv_heads: int) -> None:
        """capacity: tokens of the sequence. kv_heads: of the layers that have most."""
        self._masses = torch.zeros(pages_of(capacity), dtype=torch.float64)
        self._kv_heads = kv_heads
        self.are_known = False  # not yet where a sequence begins with pages that were computed for another
        self._numbers: Tensor | None = None  # of the pages that the watched tokens see
        self._first = 0
        self._rows = torch.zeros(0, kv_heads, 0)  # of each watched token

    def watch(self, length: int, end: int, numbers: Sequence[int]) -> None:
        """Begin a forward of the tokens from `length` to `end`, the last of which see the pages of these numbers."""
        self._first = max(length, end - WATCHED_TOKENS)
        self._numbers = torch.tensor(numbers)
        self._rows = torch.zeros(end - self._first, self._kv_heads, len(numbers))

    def watched(self, past: int, end: int) -> range:
        """Return the positions of those of the tokens from `past` to `end` that count."""
        return range(max(past, self._first), min(end, self._first + len(self._rows)))

    def row(self, position: int) -> Tensor:
        """Return where the attention of a token is to be added, fp32 [key heads, pages]."""
        return self._rows[position - self._first]

    def settle(self, length: int) -> None:
        """Count what the last forward's tokens have looked at, as far as they are among the first `length`."""
        if self._numbers is not None:
            for row in self._rows[: max(0, length - self._first)]:  # in the same order however many come at once
                self._masses[self._numbers] += row.sum(0, dtype=torch.float64)
                self.are_known = True
        self._numbers = None

    def least(self, numbers: Sequence[int]) -> int:
        """Return the one of these pages that got least; of equals the first."""
        return min(numbers, key=lambda number: float(self._masses[number]))

    def trim(self, length: int) -> None:
        """Count the last forward, as far as it is kept, and forget pages that are not."""
        self.settle(length)
        self._masses[pages_of(length) :] = 0

    def take_from(self, other: PageMasses) -> None:
        """Go on from what another sequence's pages got."""
        count = min(len(self._masses), len(other._masses))
        self._masses[:count], self.are_known = other._masses[:count], other.are_known
