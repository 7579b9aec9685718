"""The layers whose pages are needed, and let go, together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from localllm.cache.extents import EXTENT_PAGES
from localllm.cache.kv_eviction import Eviction, most_pages
from localllm.cache.kv_format import DENSE_PAGES
from localllm.cache.pages import HOST, PagePool
from localllm.kernels.kv_page import PAGE_TOKENS, KVShape, pages_of


@dataclass(frozen=True)
class Spill:
    """Where pages of running sequences rest that memory has no room for.

    directory: on the disk, of those that the host uses.
    resident_tokens: of a sequence, that stay in memory: the newest ones, and those of the first page.
    device: where they are used; those of a GPU rest in the host's memory.
    """

    directory: Path
    resident_tokens: int
    device: torch.device = HOST

    @property
    def resident_pages(self) -> int:
        return max(pages_of(self.resident_tokens), 3)  # the first, the open one, and one that leaves

    @property
    def extent_pages(self) -> int:
        """Return how many leave memory at a time."""
        return max(1, min(EXTENT_PAGES, self.resident_pages // 4))


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one window and shape, and their pools. coded: None where every page is dense. spill: where
    pages of a sequence rest beyond those that stay in memory; None: all stay. eviction: what leaves of a long sequence,
    where they have no window; None: nothing does."""

    window: int | None
    shape: KVShape  # of each layer
    layers: tuple[int, ...]
    dense: PagePool
    coded: PagePool | None
    scratch: PagePool  # of one layer: open pages that are full before the forward ends
    spill: Spill | None = None
    eviction: Eviction | None = None

    @property
    def sealed(self) -> PagePool:
        """The pool of pages that are not a sequence's first."""
        return self.coded or self.dense

    @property
    def homes(self) -> list[torch.device]:
        """The device of each layer."""
        return [device for device, _ in self.sealed.rows]

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return (self.dense, self.scratch) if self.coded is None else (self.dense, self.coded, self.scratch)

    def unseen(self, position: int) -> range:
        """Return the pages before this position of which no token from there on sees any, as positions alone tell."""
        if self.eviction is not None:
            return self.eviction.unseen(position // PAGE_TOKENS)
        return range(0 if self.window is None else max(0, position - self.window + 1) // PAGE_TOKENS)

    def may_let_go(self, number: int) -> bool:
        """Return whether a sequence may let go of a page that others still have."""
        leaves = self.eviction is not None or self.spill is not None
        return self.window is not None or (leaves and number > 0)

    def num_pages(self, capacity: int) -> int:
        """Pages that a sequence of so many tokens has at most at one time, but for its dense ones."""
        total, most = pages_of(capacity), most_pages(self.window, self.eviction)
        if self.spill is not None:
            most = self.spill.resident_pages
        return total if most is None else min(total, most)

    @property
    def num_dense(self) -> int:
        """Beside those of `num_pages`."""
        return 0 if self.coded is None else DENSE_PAGES
