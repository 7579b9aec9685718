"""The tokens of a prompt by their experts, grouped on a GPU for products of many rows: one launch, nothing of the host.

A pair is a token and one of its slots, numbered as `Routes.experts` has them. However they are routed there are no more
blocks of pairs than `most_blocks`; programs of those beyond the last end at once, so that a graph can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.sizes import most_blocks

_BLOCK = 1024  # pairs that a program looks at together
_WARP = 32  # fewer bins than it has threads no histogram is made of everywhere
NOBODY = -1  # instead of an expert, of a block beyond the last


@dataclass(frozen=True)
class ExpertRows:
    """pairs int32 [pairs]: by their experts, in their own order, and room for those of nobody. blocks int32 [3, most
    blocks]: the expert of each, its first place among the pairs, and how many follow each other there. each: the most
    of a block."""

    pairs: Tensor
    blocks: Tensor
    each: int

    @classmethod
    def empty(cls, pairs: int, experts: int, each: int, device: torch.device) -> ExpertRows:
        room = torch.empty(pairs, dtype=torch.int32, device=device)
        return cls(room, torch.empty((3, most_blocks(pairs, experts, each)), dtype=torch.int32, device=device), each)


@triton.jit(do_not_specialize=["count", "num_experts", "most"])
def _group_rows(
    experts, table, pairs, blocks, count, num_experts, most,
    EACH: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program sorts the pairs of one expert; all count those of every expert, which takes less than a launch."""
    after_previous(OVERLAPS)
    own, expert, lane = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, count, BLOCK):
        found = tl.load(experts + first + lane, mask=first + lane < count, other=-1)
        counts += tl.histogram(tl.maximum(found, 0), EXPERTS, mask=found >= 0)
    address = tl.load(table + expert, mask=expert < num_experts, other=0)
    own_blocks = tl.where(address != 0, (counts + EACH - 1) // EACH, 0)
    before = expert < own
    place, number = tl.sum(tl.where(before, counts, 0), axis=0), tl.sum(tl.where(before, own_blocks, 0), axis=0)
    own_count = tl.sum(tl.where(expert == own, counts, 0), axis=0)
    end, all_blocks = number + tl.sum(tl.where(expert == own, own_blocks, 0), axis=0), tl.sum(own_blocks, axis=0)
    for first in range(0, end - number, BLOCK):
        block = first + lane
        is_block, at = number + block < end, blocks + number + block
        tl.store(at, own + tl.zeros_like(lane), mask=is_block)
        tl.store(at + most, place + block * EACH, mask=is_block)
        tl.store(at + 2 * most, tl.minimum(own_count - block * EACH, EACH), mask=is_block)
    if own == num_experts - 1:
        for first in range(all_blocks, most, BLOCK):
            tl.store(blocks + first + lane, -1 + tl.zeros_like(lane), mask=first + lane < most)
    for first in range(0, count, BLOCK):
        is_own = tl.load(experts + first + lane, mask=first + lane < count, other=-1) == own
        rank = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(pairs + place + rank - 1, first + lane, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)


def group_rows(experts: Tensor, table: Tensor, rows: ExpertRows) -> KernelLaunch:
    """experts int32 [T, top_k], of nobody below 0. table int64 [E]: experts with an address of 0 have no blocks."""
    return KernelLaunch(
        _group_rows,
        (len(table),),
        {
            "experts": experts, "table": table, "pairs": rows.pairs, "blocks": rows.blocks, "count": experts.numel(),
            "num_experts": len(table), "most": rows.blocks.shape[1],
        },
        {"EACH": rows.each, "BLOCK": _BLOCK, "EXPERTS": max(_WARP, triton.next_power_of_2(len(table)))},
    )  # fmt: skip
