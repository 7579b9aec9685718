"""The last step of attention on a GPU: what the programs of one row have found, put together page by page and turned
back, as floats or as codes for the matrix that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import kv_page
from localllm.kernels.gpu.activations import Codes, code_place, coded
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.rope import GROUP, PAGE, TokenTables, hadamard

NOTHING = tl.constexpr(-1e30)  # a maximum over no key: finite, so that differences of it are
LOG2_E = tl.constexpr(math.log2(math.e))
_COLUMNS_A_WARP = 256  # that a warp has registers for, so often
_AHEAD = 16  # pages on their way at once: 8 KB of heads of 128


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


@triton.jit
def appended(tiles, tile):
    return tiles + (tile,)


@triton.jit
def before_pages(sinks, heads):
    """What rows of these heads have before any page, [R]: the largest score, to the base of two, and the sum of the
    weights. A sink is a score whose value is zero; it is rounded by itself, so that no compiler joins what follows."""
    peak, total = tl.full(heads.shape, NOTHING, tl.float32), tl.zeros(heads.shape, tl.float32)
    if sinks is not None:
        peak = tl.fma(tl.load(sinks + heads), tl.full(heads.shape, LOG2_E, tl.float32), total)
        total += 1
    return peak, total


@triton.jit
def with_page(mixed, peak, total, page_mixed, page_peak, page_total):
    """Rows with a page put to what they have: mixed [R, features], peak and total [R]. Each operation is rounded where
    it stands: in whatever kernel, the sum has the same bits."""
    highest = tl.maximum(peak, page_peak)
    old, new = tl.exp2(peak - highest), tl.exp2(page_peak - highest)
    mixed = tl.fma(mixed, tl.broadcast_to(old[:, None], mixed.shape), page_mixed * new[:, None])
    return mixed, highest, tl.fma(total, old, page_total * new)


@triton.jit
def store_codes(
    values, out, code_scale, code_bias, token, first, features, code_stride,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """values fp32 [GROUPS, GROUP]: the columns from `first` on, of so many, of a token."""
    q, scale, bias = coded(values)
    at = (first // GROUP + tl.arange(0, GROUPS)) * code_stride + token
    tl.store(code_scale + at, scale)
    tl.store(code_bias + at, bias)
    column = first + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out + token * features + code_place(column, GROUP, BITS), q)


@triton.jit(do_not_specialize=["window", "num_rows", "code_stride", "gate_stride"])
def _merge(
    part, peaks, totals, sinks, gate, out, code_scale, code_bias, positions, window, num_rows, code_stride, gate_stride,
    H: tl.constexpr, D: tl.constexpr, GATE_DIM: tl.constexpr, FEATURES: tl.constexpr, SECTION_PAGES: tl.constexpr,
    AHEAD: tl.constexpr, IS_TURNED: tl.constexpr, CODE_GROUP: tl.constexpr, CODE_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    section_tokens: tl.constexpr = SECTION_PAGES * PAGE
    begin = tl.maximum(position - window + 1, 0) // section_tokens
    count = position // section_tokens + 1 - begin
    feature = tl.arange(0, FEATURES)[None, :]
    mask = feature < D
    peak, total = before_pages(sinks, head + tl.arange(0, 1))
    mixed = tl.zeros((1, FEATURES), tl.float32)
    for first in range(0, count, AHEAD):
        some, own_peaks, own_totals = (), (), ()
        for i in tl.static_range(AHEAD):
            section, is_there = begin + first + i, first + i < count
            if IS_TURNED:  # the first page, which is dense, comes last
                section = tl.where(begin == 0, (first + i + 1) % count, section)
            row = (section.to(tl.int64) * num_rows + token) * H + head + tl.arange(0, 1)
            some = appended(some, tl.load(part + row[:, None] * D + feature, mask=is_there & mask, other=0.0))
            own_peaks = appended(own_peaks, tl.load(peaks + row, mask=is_there, other=NOTHING))
            own_totals = appended(own_totals, tl.load(totals + row, mask=is_there, other=0.0))
        for i in tl.static_range(AHEAD):
            mixed, peak, total = with_page(mixed, peak, total, some[i], own_peaks[i], own_totals[i])
    mixed = mixed / total[:, None]
    if IS_TURNED:
        mixed = tl.reshape(hadamard(tl.reshape(mixed, (FEATURES // GROUP, GROUP))), (1, FEATURES))
    if gate is not None:
        opens = gate + token * gate_stride + head * GATE_DIM + (feature if GATE_DIM == D else feature * 0)
        opened = tl.load(opens, mask=mask, other=0.0).to(tl.float32)
        mixed = mixed / (1 + tl.exp(-opened))
    if CODE_GROUP > 0:
        values = tl.reshape(mixed, (FEATURES // CODE_GROUP, CODE_GROUP))
        store_codes(
            values, out, code_scale, code_bias, token, head * D, H * D, code_stride,
            FEATURES // CODE_GROUP, CODE_GROUP, CODE_BITS,
        )  # fmt: skip
    else:
        tl.store(out + (token * H + head) * D + feature, mixed, mask=mask)


def can_code(head_dim: int, group: int) -> bool:
    """Return whether a head has whole groups of a matrix's codes."""
    return head_dim % group == 0 and head_dim == triton.next_power_of_2(head_dim)


def merge(
    parts: Parts,
    out: Tensor | Codes,
    tokens: TokenTables,
    window: int,
    *,
    section_pages: int,
    is_turned: bool,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> KernelLaunch:
    """out fp32 [M, H * D], or its codes: of a row of the sections that it sees. sinks fp32 [H]: where no section has
    them. gate [M, H * D] or [M, H], in rows of any stride: by its sigmoid all is multiplied."""
    _, M, H, D = parts.mixed.shape
    codes = out if isinstance(out, Codes) else None
    assert codes is None or codes.q.shape[1] == H * D
    return KernelLaunch(
        kernel=_merge,
        grid=(M, H),
        arguments={
            "part": parts.mixed,
            "peaks": parts.peaks,
            "totals": parts.totals,
            "sinks": sinks,
            "gate": gate,
            "out": out.q if isinstance(out, Codes) else out,
            "code_scale": None if codes is None else codes.scale,
            "code_bias": None if codes is None else codes.bias,
            "positions": tokens.positions,
            "window": window,
            "num_rows": M,
            "code_stride": 0 if codes is None else codes.scale.stride(0),
            "gate_stride": 0 if gate is None else gate.stride(0),
        },
        constants={
            "H": H,
            "D": D,
            "GATE_DIM": 0 if gate is None else gate.shape[1] // H,
            "FEATURES": max(kv_page.GROUP, triton.next_power_of_2(D)),
            "SECTION_PAGES": section_pages,
            "AHEAD": 1 if parts.sections == 1 else _AHEAD,
            "IS_TURNED": is_turned,
            "CODE_GROUP": 0 if codes is None else codes.group,
            "CODE_BITS": 0 if codes is None else codes.bits,
        },
        num_warps=max(1, triton.next_power_of_2(D) // _COLUMNS_A_WARP),
    )
