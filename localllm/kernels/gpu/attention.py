"""Causal grouped-query attention over KV pages on a GPU: one kernel for decode, verification and prefill.

A row is one query head of one token; the rows of a task share a key head, and so each load of its keys and values, and
stand in one page. Coded pages are multiplied as they are: codes are small integers, exact in bf16, a key's scale is
applied to its group's sum, a value's to the weight.

A page is softened by itself, its weights relative to its own largest score, and then put together with the pages before
it, one after the other. Where there are few rows a program has one page (arXiv:2311.01282), and `attention_merge` puts
them together; where there are many, a program does both for all pages of its rows, by the same formula. So a row has
the same bits however many are computed beside it: what it cannot see adds exact zeros, the tensor cores take a row's
columns in one order, and the sum of a page's weights is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import NOTHING, Parts, appended, merge, with_page
from localllm.kernels.gpu.launch import KernelLaunch, is_interpreted
from localllm.kernels.gpu.levels import nibble, signed_byte
from localllm.kernels.gpu.rope import (
    GROUP,
    HALF_GROUP,
    INT4_ZERO,
    PAGE,
    TokenTables,
    page_at,
    page_constants,
    scales_of,
)
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout

ALL_PAGES = 1 << 20  # of a program where they are not shared out
FAR = tl.constexpr(1 << 30)  # beyond every position
COARSE_STEP = tl.constexpr(96.0)  # of a number of fp32 between 64 and 128, the last bit is worth 2^-17
FINE_STEP = tl.constexpr(1.5 * 2.0**-12)  # and of this one 2^-35
DECODE_ROWS, PREFILL_ROWS = 16, 128
STEP_ROWS = tl.constexpr(DECODE_ROWS)
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionHistory:
    """The tasks and page tables of a forward, on the device.

    tasks int32 [N, 4]: see `tasks_of`; a task of no rows computes nothing.
    tables int64 [B, P]: the addresses of each segment's pages; what a window has left is not read.
    """

    tasks: Tensor
    tables: Tensor


def tasks_of(segment: int, first_row: int, past: int, count: int, tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows [first_row, first_row + count) of a forward, a segment's tokens behind its first `past`, cut into tasks of
    at most so many tokens of one page: (first row, rows, segment, 0)."""
    slot, end = past, past + count
    while slot < end:
        stop = min(end, slot + tokens, (slot // PAGE_TOKENS + 1) * PAGE_TOKENS)
        yield first_row + slot - past, stop - slot, segment, 0
        slot = stop


def block_rows(group: int, *, is_prefill: bool) -> int:
    """Rows of a task, of which a page has no more than this; group: query heads a key head."""
    group = triton.next_power_of_2(group)
    return max(DECODE_ROWS, min(PREFILL_ROWS, PAGE_TOKENS * group) if is_prefill else group)


def _rows_at_once(rows: int, dense: PageLayout) -> int:
    """Return the rows of a program: shared memory must hold their queries, and registers, as many as may be, their
    sums."""
    if dense.dtype is torch.float32:
        return min(rows, DECODE_ROWS)
    return min(rows, PREFILL_ROWS if dense.head_dim <= 128 else PREFILL_ROWS // 2)


@triton.jit
def _zeros(COUNT: tl.constexpr, R: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = appended(tiles, tl.zeros((R, GROUP), tl.float32))
    return tiles


@triton.jit
def _queries(q, mask, D: tl.constexpr, OPERAND: tl.constexpr):
    """Load 32 features of each of the rows at q, pointers [R]: [R, 32]."""
    tiles = ()
    for i in tl.static_range((D + GROUP - 1) // GROUP):
        feature = i * GROUP + tl.arange(0, GROUP)[None, :]
        tile = tl.load(q[:, None] + feature, mask=mask[:, None] & (feature < D), other=0.0)
        tiles = appended(tiles, tile.to(OPERAND))
    return tiles


@triton.jit
def _dense_keys(head, D: tl.constexpr):
    """32 features each, [32, 64]."""
    num_tiles: tl.constexpr = (D + GROUP - 1) // GROUP
    tiles = ()
    for i in tl.static_range(num_tiles):
        feature = i * GROUP + tl.arange(0, GROUP)[:, None]
        at = head + feature * PAGE + tl.arange(0, PAGE)[None, :]
        if num_tiles * GROUP == D:
            tiles = appended(tiles, tl.load(at))
        else:
            tiles = appended(tiles, tl.load(at, mask=feature < D, other=0.0))
    return tiles


@triton.jit
def _dense_values(head, held, D: tl.constexpr):
    """32 features each, [64, 32], of the first `held` tokens: behind them may be any bits, and no weight of zero
    makes zero of a NaN."""
    token = tl.arange(0, PAGE)[:, None]
    tiles = ()
    for i in tl.static_range((D + GROUP - 1) // GROUP):
        feature = i * GROUP + tl.arange(0, GROUP)[None, :]
        at = head + D * PAGE + token * D + feature
        tiles = appended(tiles, tl.load(at, mask=(token < held) & (feature < D), other=0.0))
    return tiles


@triton.jit
def _code_tiles(codes, GROUPS: tl.constexpr, CODING: tl.constexpr, ARE_KEYS: tl.constexpr):
    """The codes of one group each, two by two: INT8 of neighbours in a row, INT4 of features 16 apart."""
    rows: tl.constexpr = HALF_GROUP if ARE_KEYS and CODING == "int4" else (GROUP if ARE_KEYS else PAGE)
    columns: tl.constexpr = (PAGE if CODING == "int4" else PAGE // 2) if ARE_KEYS else HALF_GROUP
    if CODING == "int8":
        codes = codes.to(tl.pointer_type(tl.int16))
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    tiles = ()
    for i in tl.static_range(GROUPS):
        if ARE_KEYS:
            at = codes + (i * rows + row) * columns + column
        else:
            at = codes + row * (GROUPS * columns) + i * columns + column
        tiles = appended(tiles, tl.load(at))
    return tiles


@triton.jit
def _levels(codes, CODING: tl.constexpr, ARE_KEYS: tl.constexpr, OPERAND: tl.constexpr):
    """The integers, or halves, that the bytes of a group stand for: of keys [32, 64], of values [64, 32]."""
    if CODING == "int8":
        both = tl.join(signed_byte(codes, OPERAND), signed_byte(codes >> 8, OPERAND))
    else:
        codes = codes.to(tl.int16)
        both = tl.join(nibble(codes & 15, INT4_ZERO, OPERAND), nibble(codes >> 4, INT4_ZERO, OPERAND))
        both = tl.permute(both, (2, 0, 1) if ARE_KEYS else (0, 2, 1))
    shape: tl.constexpr = (GROUP, PAGE) if ARE_KEYS else (PAGE, GROUP)
    return tl.reshape(both, shape)


@triton.jit
def _seen(number, position, lowest, HAS_WINDOW: tl.constexpr):
    """bool [R, 64]: which tokens of a page the rows see. lowest: the first position that their windows show them."""
    key = tl.arange(0, PAGE)[None, :] + number * PAGE
    seen = key <= position[:, None]
    if HAS_WINDOW:
        seen = seen & (key >= lowest[:, None])
    return seen


@triton.jit
def _softened(scores, seen, factor, cap, HAS_SOFTCAP: tl.constexpr):
    """The weights of a page's tokens relative to the row's largest, that score, and the sum of the weights. Scores are
    to the base of two from here on."""
    if HAS_SOFTCAP:  # cap * tanh, whose argument is half the exponent
        scores = cap - 2 * cap / (tl.exp2(scores * factor) + 1)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    if HAS_SOFTCAP:
        peak = tl.maximum(tl.max(scores, 1), NOTHING)
        weights = tl.exp2(scores - peak[:, None])
    else:
        peak = tl.maximum(tl.max(scores, 1) * factor, NOTHING)
        below = tl.broadcast_to(-peak[:, None], scores.shape)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, below))
    # Another number of rows adds them up in another order. 64 weights of up to 1 in steps of 2^-17 sum up exactly in
    # any, and so does what is left of them in steps of 2^-35.
    coarse = (weights + COARSE_STEP) - COARSE_STEP
    fine = ((weights - coarse) + FINE_STEP) - FINE_STEP
    return weights, peak, tl.sum(coarse, 1) + tl.sum(fine, 1)


@triton.jit
def _dense_page(
    head, held, seen, q, mixed, peak, total, factor, cap,
    D: tl.constexpr, OPERAND: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    keys = _dense_keys(head, D)
    values = _dense_values(head, held, D)
    scores = tl.zeros(seen.shape, tl.float32)
    for i in tl.static_range(len(keys)):
        scores = tl.dot(q[i], keys[i].to(OPERAND), scores, input_precision="ieee")
    weights, own_peak, own_total = _softened(scores, seen, factor, cap, HAS_SOFTCAP)
    weights = weights.to(OPERAND)
    sums = ()
    for i in tl.static_range(len(values)):
        own = tl.dot(weights, values[i].to(OPERAND), input_precision="ieee")
        with_it, highest, sum_total = with_page(mixed[i], peak, total, own, own_peak, own_total)
        sums = appended(sums, with_it)
    return sums, highest, sum_total


@triton.jit
def _coded_page(
    head, seen, q, mixed, peak, total, factor, cap,
    D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr,
    OPERAND: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = D // GROUP
    keys = _code_tiles(head, groups, KEYS, True)
    is_step: tl.constexpr = q[0].shape[0] <= STEP_ROWS
    if is_step:  # all on their way at once, where registers are left
        values = _code_tiles(head + VALUE_CODES, groups, VALUES, False)
    # Scales are read where they are used: a thread multiplies those of many tokens, and each takes a register.
    key_scales, value_scales = head + KEY_SCALES + tl.arange(0, PAGE), head + VALUE_SCALES + tl.arange(0, PAGE)
    scores = tl.zeros((q[0].shape[0], PAGE), tl.float32)
    for g in tl.static_range(groups):
        products = tl.dot(q[g], _levels(keys[g], KEYS, True, OPERAND), input_precision="ieee")
        scales = scales_of(tl.load(key_scales + g * PAGE))[None, :]
        scores = tl.fma(products, tl.broadcast_to(scales, products.shape), scores)
    weights, own_peak, own_total = _softened(scores, seen, factor, cap, HAS_SOFTCAP)
    if not is_step:
        values = _code_tiles(head + VALUE_CODES, groups, VALUES, False)
    sums = ()
    for g in tl.static_range(groups):
        scaled = weights * scales_of(tl.load(value_scales + g * PAGE))[None, :]
        if seen is not None:  # a scale that is NaN concerns those alone who see its token
            scaled = tl.where(seen, scaled, 0.0)
        own = tl.dot(scaled.to(OPERAND), _levels(values[g], VALUES, False, OPERAND), input_precision="ieee")
        with_it, highest, sum_total = with_page(mixed[g], peak, total, own, own_peak, own_total)
        sums = appended(sums, with_it)
    return sums, highest, sum_total


@triton.jit
def _store(
    part, peaks, totals, task, r, kv_head, first, mixed, peak, total, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr
):
    """Store the rows. Their place is computed and read again: the loops need every register."""
    group: tl.constexpr = H // KH
    row = (tl.load(task, volatile=True) + r // group) * H + kv_head * group + r % group
    mask = r < tl.load(task + 1, volatile=True) * group
    tl.store(peaks + first + row, peak, mask=mask)
    tl.store(totals + first + row, total, mask=mask)
    for i in tl.static_range(len(mixed)):
        feature = i * GROUP + tl.arange(0, GROUP)[None, :]
        at = part + first * D + row[:, None] * D + feature
        tl.store(at, mixed[i], mask=mask[:, None] & (feature < D))


@triton.jit(do_not_specialize=["layer", "window", "num_rows", "table_stride"])
def _attend(
    q, part, peaks, totals, positions, own, own_stride, tasks, tables,
    layer, window, factor, cap, num_rows, table_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DENSE: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, CODED_HEAD: tl.constexpr,
    OPERAND: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, SECTION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    task, kv_head, section = tasks + tl.program_id(0) // BLOCKS * 4, tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // KH
    is_coded: tl.constexpr = KEYS != "dense"
    r = tl.program_id(0) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = tl.load(task) + r // group, kv_head * group + r % group
    mask = r < tl.load(task + 1) * group
    position = tl.load(positions + token, mask=mask, other=-1)
    mask = position >= 0
    last = tl.max(position)
    lowest = tl.where(mask, tl.maximum(position - window + 1, 0), FAR)
    own_page = last // PAGE
    begin = tl.maximum(section * SECTION, tl.min(lowest) // PAGE)
    end = tl.minimum(section * SECTION + SECTION, own_page + 1)
    if (last < 0) | (begin >= end):
        return
    row = token * H + head
    queries = _queries(q + row * D, mask, D, OPERAND)
    peak, total = tl.full((BLOCK_R,), NOTHING, tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    mixed = _zeros(len(queries), BLOCK_R)
    pages = tables + tl.load(task + 2).to(tl.int64) * table_stride
    if is_coded:
        at = (layer.to(tl.int64) * KH + kv_head) * CODED_HEAD
        for number in range(tl.maximum(begin, 1), tl.minimum(end, own_page)):
            seen = None
            if HAS_WINDOW:
                seen = _seen(number, position, lowest, HAS_WINDOW)
            mixed, peak, total = _coded_page(
                page_at(tl.load(pages + number), at), seen,
                queries, mixed, peak, total, factor, cap,
                D, KEYS, VALUES, KEY_SCALES, VALUE_CODES, VALUE_SCALES, OPERAND, HAS_SOFTCAP,
            )  # fmt: skip
    # Of a coded format these are the last page and the first, in that order, where they are the program's.
    dense_head: tl.constexpr = 2 * D * PAGE
    dense_bytes: tl.constexpr = KH * dense_head * DENSE.primitive_bitwidth // 8
    first_step, end_step = begin, end
    if is_coded:
        first_step = 1 - (end > own_page).to(tl.int32)
        end_step = 1 + ((begin == 0) & (own_page > 0)).to(tl.int32)
    if is_coded:  # read again, as it would take registers of the loop before
        is_row = r < tl.load(task + 1, volatile=True) * group
        token = tl.load(task, volatile=True) + r // group
        position = tl.load(positions + token, mask=is_row, other=-1, volatile=True)
        last = tl.max(position)
        lowest = tl.where(position >= 0, tl.maximum(position - window + 1, 0), FAR)
    for step in range(first_step, end_step):
        number = step
        if is_coded:
            number = tl.where(step == 0, own_page, 0)
        # Addresses are read here, not before: the loops need every register.
        is_own = number == own_page
        address = tl.load(pages + number, mask=number < own_page, other=0) + layer.to(tl.int64) * dense_bytes
        if is_own:
            first_row = tl.load(task, volatile=True)
            address = tl.load(own + first_row) + layer.to(tl.int64) * tl.load(own_stride + first_row)
        head_at = page_at(address, 0).to(tl.pointer_type(DENSE)) + kv_head * dense_head
        mixed, peak, total = _dense_page(
            head_at, last + 1 - number * PAGE, _seen(number, position, lowest, HAS_WINDOW),
            queries, mixed, peak, total, factor, cap, D, OPERAND, HAS_SOFTCAP,
        )  # fmt: skip
    _store(part, peaks, totals, task, r, kv_head, section.to(tl.int64) * num_rows * H, mixed, peak, total, H, KH, D)


def _scaling(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor of a score and its cap, to the base of two. exp2(2 log2(e) x) is what tanh(x) is made of."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * scale * LOG2_E / softcap, softcap * LOG2_E


def attend(
    q: Tensor,
    out: Tensor | Codes,
    tokens: TokenTables,
    history: AttentionHistory,
    parts: Parts,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: int = DECODE_ROWS,
) -> list[KernelLaunch]:
    """q fp32 [M, H, D] from `rope_store` -> out fp32 [M, H * D], or its codes, see `attention_merge.can_code`.

    On a card queries and weights are rounded to bf16, but for models in fp32: 2e-3 of the norm as a rule, 4e-3 at most.
    parts: of one section, where a program has all pages of its task, or of as many as the longest segment has pages.
    rows: see `block_rows`. Rows of no task, and padding, stay as they are. Else see `paged_attention`.
    """
    assert q.is_contiguous() and parts.mixed.shape[1:] == q.shape
    pages = 1 if parts.sections > 1 else ALL_PAGES
    reach = FAR.value if window is None else window
    (M, H, _), block, (factor, cap) = q.shape, _rows_at_once(rows, dense), _scaling(scale, softcap)
    is_wide = is_interpreted() or dense.dtype is torch.float32  # the interpreter multiplies bf16 wrongly
    attending = KernelLaunch(
        kernel=_attend,
        grid=(len(history.tasks) * (rows // block), dense.num_kv_heads, parts.sections),
        arguments={
            "q": q,
            "part": parts.mixed,
            "peaks": parts.peaks,
            "totals": parts.totals,
            **{name: getattr(tokens, name) for name in ("positions", "own", "own_stride")},
            "tasks": history.tasks,
            "tables": history.tables,
            "layer": layer,
            "window": reach,
            "factor": factor,
            "cap": cap,
            "num_rows": M,
            "table_stride": history.tables.stride(0),
        },
        constants={"H": H}
        | page_constants(dense, coded)
        | {
            "OPERAND": tl.float32 if is_wide else tl.bfloat16,
            "BLOCKS": rows // block,
            "BLOCK_R": block,
            "SECTION": pages,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_WINDOW": reach != FAR.value,
        },
        # Many sums need twice the warps. A step's program has one page; of many rows the next one is on its way, but
        # with more features its place would leave too little for the queries.
        num_warps=8 if block * max(128, dense.head_dim) >= 8192 else 4,
        num_stages=2 if block > DECODE_ROWS and dense.head_dim <= 128 else 1,
    )
    merging = merge(parts, out, tokens, reach, section_pages=pages, is_turned=coded is not None)
    return [attending, merging]
