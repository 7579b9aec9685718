"""Which pages a token attends to where it does not attend to all: a few that are chosen by what it looks for.

Of every page but the first, its own and the one before that, the least and the largest number of each key feature are
known. They bound what a query may find there: q . k <= sum of max(q * least, q * largest). The pages with the largest
bounds are attended to, beside those three (Quest, arXiv:2406.10774). Query heads that share a key head choose together,
by the sum of their bounds, so that a page is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.sizes import BOUND_BYTES as BOUND_BYTES
from localllm.kernels.sizes import BOUND_PAGES as BOUND_PAGES
from localllm.kernels.sizes import FIXED_PAGES as FIXED_PAGES
from localllm.kernels.sizes import PAGE_TOKENS, KVShape, attended_tokens, bound_bytes


@dataclass(frozen=True)
class PageChoice:
    """pages: so many are chosen. first_token: those in front of it attend to all, as a prompt's do."""

    pages: int
    first_token: int

    @property
    def first_position(self) -> int:
        """The first position at which there is something to choose."""
        return max(self.first_token, attended_tokens(self.pages) or 0)


class PageBounds:
    """The bounds of a sequence's pages in all layers of a group: bf16 [layers, KH, blocks, D, 2, 16], the least of 16
    pages beside their largest, a line of the cache. Room for them is not touched before they are made."""

    def __init__(self, layers: int, shape: KVShape, pages: int) -> None:
        self.blocks = -(-pages // BOUND_PAGES)
        sizes = layers, shape.num_heads, self.blocks, shape.head_dim, 2, BOUND_PAGES
        self.bounds = torch.zeros(sizes, dtype=torch.bfloat16)
        self.made = torch.zeros(layers, dtype=torch.int64)  # of each layer, pages from the first on
        self.nbytes = layers * bound_bytes(shape, self.blocks * BOUND_PAGES)

    def trim(self, pages: int) -> None:
        """Forget what was made of pages from this number on."""
        self.made.clamp_(max=pages)


def bounds_of(keys: Tensor) -> Tensor:
    """keys [KH, pages * 64, D] -> fp32 [KH, pages, 2, D], rounded to bf16; NaN where a key is not finite."""
    paged = keys.float().view(len(keys), -1, PAGE_TOKENS, keys.shape[-1])
    is_finite = paged.isfinite().all(2)
    bounds = torch.stack((paged.amin(2), paged.amax(2)), dim=2).bfloat16().float()
    return torch.where(is_finite.unsqueeze(2), bounds, torch.nan)


def chosen_pages(q: Tensor, keys: Tensor, choice: PageChoice) -> Tensor:
    """q [H, D] of one token; keys [KH, pages * 64, D]: all pages that are full. Returns the numbers of those that it
    attends to, int64 [KH, count + 2], ascending: all but its own."""
    KH, D = len(keys), q.shape[-1]
    bounds = bounds_of(keys[:, PAGE_TOKENS:-PAGE_TOKENS])
    heads = q.float().view(KH, -1, 1, D)
    scores = torch.maximum(heads * bounds[:, None, :, 0], heads * bounds[:, None, :, 1]).sum((1, 3))
    ranked = torch.where(scores.isnan(), torch.inf, scores).sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : choice.pages].sort(dim=1).values + 1
    last = keys.shape[1] // PAGE_TOKENS - 1
    return torch.cat((chosen.new_zeros(KH, 1), chosen, chosen.new_full((KH, 1), last)), dim=1)
