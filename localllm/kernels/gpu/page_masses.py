"""The attention that pages get, on a GPU: the softmax weights of a token's heads, summed up for each page.

Where a program of attention has one page, it leaves the sum of the page's weights and the score that they are relative
to: nothing is computed again. Of many rows, whose programs have all pages, that is computed for the few that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.attention import AttentionHistory, block_rows, over_pages
from localllm.kernels.gpu.attention_merge import NOTHING, Parts, before_pages, new_parts
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.rope import PAGE, TokenTables
from localllm.kernels.kv_page import PageLayout

_PAGES = 64  # at once


@dataclass(frozen=True)
class Watched:
    """The tokens of a forward whose attention is summed up, on the device.

    tasks int32 [W, 4]: of one row each, see `tasks_of`, whose result is in the parts of `attend` or in parts of their
    own; one of no row is nobody's.
    sums int64 [W, 2]: the address of its sums, fp32 [KH, pages], and how many pages that are.
    """

    tasks: Tensor
    sums: Tensor


@triton.jit
def _of_pages(peaks, totals, page, count, stride, at):
    """Load what programs left of each of these pages, [pages, heads]; of a page behind the last one, nothing."""
    place, is_there = page.to(tl.int64)[:, None] * stride + at, page[:, None] < count
    return tl.load(peaks + place, mask=is_there, other=NOTHING), tl.load(totals + place, mask=is_there, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _page_masses(
    peaks, totals, sinks, positions, tasks, sums, num_rows,
    H: tl.constexpr, KH: tl.constexpr, HEADS: tl.constexpr, PAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    task, own_sums, kv_head = tasks + tl.program_id(0) * 4, sums + tl.program_id(0) * 2, tl.program_id(1)
    if tl.load(task + 1) == 0:
        return
    group: tl.constexpr = H // KH
    count = tl.load(positions + tl.load(task)) // PAGE + 1
    r, n = tl.arange(0, HEADS), tl.arange(0, PAGES)
    head = kv_head * group + tl.minimum(r, group - 1)
    at = tl.load(task + 3).to(tl.int64) * H + head[None, :]
    peak, total = before_pages(sinks, head)
    for first in range(0, count, PAGES):
        peaks_of, totals_of = _of_pages(peaks, totals, first + n, count, num_rows * H, at)
        highest = tl.maximum(peak, tl.max(peaks_of, 0))
        total = total * tl.exp2(peak - highest) + tl.sum(totals_of * tl.exp2(peaks_of - highest[None, :]), 0)
        peak = highest
    into = tl.load(own_sums).to(tl.pointer_type(tl.float32)) + kv_head * tl.load(own_sums + 1)
    for first in range(0, count, PAGES):
        peaks_of, totals_of = _of_pages(peaks, totals, first + n, count, num_rows * H, at)
        shares = totals_of * tl.exp2(peaks_of - peak[None, :]) / total[None, :]
        mass = tl.sum(tl.where(r[None, :] < group, shares, 0.0), 1)
        place = into + first + n
        tl.store(place, tl.load(place, mask=first + n < count, other=0.0) + mass, mask=first + n < count)


def watch(
    q: Tensor,
    tokens: TokenTables,
    history: AttentionHistory,
    watched: Watched,
    parts: Parts | None,
    pages: int,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> list[KernelLaunch]:
    """Add to the sums of each watched token the weights that its heads give to each page that it sees.

    parts: those that `attend` has filled, where a program had one page; None: they are computed, a row for each task.
    pages: of the longest segment. The rest: as `attend` has it.
    """
    H, KH, launches = q.shape[1], dense.num_kv_heads, list[KernelLaunch]()
    if parts is None:
        parts = new_parts(pages, len(watched.tasks), H, 0, q.device)
        own, rows = AttentionHistory(watched.tasks, history.tables), block_rows(H // KH, is_prefill=False)
        launches.append(
            over_pages(q, tokens, own, parts, dense, coded, layer, 1, scale=scale, softcap=softcap, rows=rows)
        )
    summing = KernelLaunch(
        kernel=_page_masses,
        grid=(len(watched.tasks), KH),
        arguments={
            "peaks": parts.peaks,
            "totals": parts.totals,
            "sinks": sinks,
            "positions": tokens.positions,
            "tasks": watched.tasks,
            "sums": watched.sums,
            "num_rows": parts.peaks.shape[1],
        },
        constants={"H": H, "KH": KH, "HEADS": triton.next_power_of_2(H // KH), "PAGES": _PAGES},
        num_warps=4,
    )
    return [*launches, summing]
