"""The attention that the pages of one sequence get, by which the least wanted of them leaves (H2O, arXiv:2306.14048).

All layers and heads share a page, so they decide together: a page's mass is the softmax weights of its tokens, summed
up over queries, heads and layers. Of a forward the last few tokens of a sequence count: each page then gets as many
looks, whichever of them stood before it, and a long prompt costs hardly more. Of a draft what is accepted counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.cache.pages import HOST
from localllm.kernels.kv_page import pages_of

WATCHED_TOKENS = 16  # of a forward


class PageMasses:
    def __init__(self, capacity: int, kv_heads: int) -> None:
        """capacity: tokens of the sequence. kv_heads: of the layers that have most."""
        self._pages, self._kv_heads = pages_of(capacity), kv_heads
        self._masses: dict[torch.device, Tensor] = {}  # of each device that has added to them, fp64 [pages]
        self.are_known = False  # not yet where a sequence begins with pages that were computed for another
        self._numbers: list[int] = []  # of the pages that the watched tokens see
        self._numbers_on: dict[torch.device, Tensor] = {}
        self._watched = range(0)
        self._rows: dict[torch.device, Tensor] = {}  # of each watched token

    def watch(self, length: int, end: int, numbers: Sequence[int]) -> None:
        """Begin a forward of the tokens from `length` to `end`, the last of which see the pages of these numbers."""
        self._watched = range(max(length, end - WATCHED_TOKENS), end)
        self._rows = {}
        if self._numbers != list(numbers):
            self._numbers, self._numbers_on = list(numbers), {}

    def watched(self, past: int, end: int) -> range:
        """Return the positions of those of the tokens from `past` to `end` that count."""
        return range(max(past, self._watched.start), min(end, self._watched.stop))

    def row(self, position: int, device: torch.device = HOST) -> Tensor:
        """Return where a device is to add the attention of a token, fp32 [key heads, pages]."""
        if device not in self._rows:
            shape = len(self._watched), self._kv_heads, len(self._numbers)
            self._rows[device] = torch.zeros(shape, device=device)
        return self._rows[device][position - self._watched.start]

    def settle(self, length: int) -> None:
        """Count what the last forward's tokens have looked at, as far as they are among the first `length`. Nothing of
        it is waited for."""
        for device, rows in self._rows.items():
            if device not in self._numbers_on:
                self._numbers_on[device] = torch.tensor(self._numbers).to(device)
            for row in rows[: max(0, length - self._watched.start)]:  # in the same order however many come at once
                self._of(device).index_add_(0, self._numbers_on[device], row.sum(0, dtype=torch.float64))
                self.are_known = True
        self._rows, self._watched = {}, range(0)

    def _of(self, device: torch.device) -> Tensor:
        if device not in self._masses:
            with torch.inference_mode(mode=False):  # it is changed outside of a forward, too
                self._masses[device] = torch.zeros(self._pages, dtype=torch.float64, device=device)
        return self._masses[device]

    def least(self, numbers: Sequence[int]) -> int:
        """Return the one of these pages that got least; of equals the first. Waits for what devices have added."""
        masses = [own.tolist() for own in self._masses.values()]
        return min(numbers, key=lambda number: sum(own[number] for own in masses))

    def trim(self, length: int) -> None:
        """Count the last forward, as far as it is kept, and forget pages that are not."""
        self.settle(length)
        for own in self._masses.values():
            own[pages_of(length) :] = 0

    def take_from(self, other: PageMasses) -> None:
        """Go on from what another sequence's pages got."""
        count, self.are_known = min(self._pages, other._pages), other.are_known
        for device, masses in other._masses.items():
            self._of(device)[:count] = masses[:count]
