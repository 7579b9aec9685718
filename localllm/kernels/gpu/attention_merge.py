"""The last step of attention on a GPU: what the programs of one row have found, put together and turned back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import kv_page
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.rope import GROUP, TokenTables, hadamard

NOTHING = tl.constexpr(-1e30)  # a maximum over no key: finite, so that differences of it are
_BLOCK_SECTIONS = 32  # on their way at once: of 8k tokens


@dataclass(frozen=True)
class Parts:
    """The result of each section's program for each row: mixed fp32 [S, M, H, D], not yet divided by the sum of the
    weights, totals fp32 [S, M, H], whose base is the largest score, peaks fp32 [S, M, H], to the base of two."""

    mixed: Tensor
    peaks: Tensor
    totals: Tensor

    @property
    def sections(self) -> int:
        return self.mixed.shape[0]


def new_parts(sections: int, rows: int, heads: int, head_dim: int, device: torch.device | str = "cpu") -> Parts:
    stats = torch.empty(2, sections, rows, heads, device=device)
    return Parts(torch.empty(sections, rows, heads, head_dim, device=device), stats[0], stats[1])


@triton.jit(do_not_specialize=["window", "num_rows"])
def _merge(
    part, peaks, totals, out, positions, window, num_rows,
    H: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, SECTION_TOKENS: tl.constexpr, BLOCK_S: tl.constexpr,
    IS_TURNED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    begin = tl.maximum(position - window + 1, 0) // SECTION_TOKENS
    end = position // SECTION_TOKENS + 1
    feature = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = feature < D
    peak, total = tl.full((), NOTHING, tl.float32), tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((GROUPS, GROUP), tl.float32)
    # Blocks begin at multiples of their length: a row's sums have one order, whatever its window.
    for first in range(begin // BLOCK_S * BLOCK_S, end, BLOCK_S):
        section = first + tl.arange(0, BLOCK_S)
        is_there = (section >= begin) & (section < end)
        row = (section.to(tl.int64) * num_rows + token) * H + head
        some = tl.load(part + row[:, None, None] * D + feature, mask=is_there[:, None, None] & mask, other=0.0)
        their_peaks = tl.load(peaks + row, mask=is_there, other=NOTHING)
        their_totals = tl.load(totals + row, mask=is_there, other=0.0)
        highest = tl.maximum(peak, tl.max(their_peaks))
        old, new = tl.exp2(peak - highest), tl.exp2(their_peaks - highest)
        total = total * old + tl.sum(their_totals * new)
        mixed = mixed * old + tl.sum(some * new[:, None, None], 0)
        peak = highest
    mixed = mixed / total
    if IS_TURNED:
        mixed = hadamard(mixed)
    tl.store(out + (token * H + head) * D + feature, mixed, mask=mask)


def merge(
    parts: Parts, out: Tensor, tokens: TokenTables, window: int, *, section_tokens: int, is_turned: bool
) -> KernelLaunch:
    """out fp32 [M, H * D]: of a row of the sections that it sees."""
    _, M, H, D = parts.mixed.shape
    return KernelLaunch(
        kernel=_merge,
        grid=(M, H),
        arguments={
            "part": parts.mixed,
            "peaks": parts.peaks,
            "totals": parts.totals,
            "out": out,
            "positions": tokens.positions,
            "window": window,
            "num_rows": M,
        },
        constants={
            "H": H,
            "D": D,
            "GROUPS": triton.next_power_of_2(triton.cdiv(D, kv_page.GROUP)),
            "SECTION_TOKENS": section_tokens,
            # The same for any number of sections but one, as sums are in its order.
            "BLOCK_S": 1 if parts.sections == 1 else _BLOCK_SECTIONS,
            "IS_TURNED": is_turned,
        },
        num_warps=1 if parts.sections == 1 else 4,
    )
