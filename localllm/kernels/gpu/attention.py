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

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import LOG2_E, NOTHING, Parts, appended, before_pages, merge, with_page
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
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
# The capabilities (H100, B200) whose tensor cores take 64 rows by an instruction of its own, with other sums; fewer
# rows are multiplied as elsewhere.
WARP_GROUPS, FEW_PREFILL_ROWS = (9, 10), 32


@dataclass(frozen=True)
class AttentionHistory:
    """The tasks and page tables of a forward, on the device.

    tasks int32 [N, 4]: see `tasks_of`; a task of no rows computes nothing.
    tables int64 [B, P]: the addresses of the pages that a task's rows see; what a window has left is not read.
    """

    tasks: Tensor
    tables: Tensor


@dataclass(frozen=True)
class ChosenTables:
    """What rows attend to that chose, each a task of its own, on the device.

    rows int64 [M, 4]: whose first word is 0 of those that did not, and whose last one is the place among the tables.
    tables int64 [C, KH, P]: addresses of pages, as those of `AttentionHistory`.
    """

    rows: Tensor
    tables: Tensor


def tasks_of(table: int, first_row: int, past: int, count: int, tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows [first_row, first_row + count) of a forward, a segment's tokens behind its first `past`, cut into tasks of
    at most so many tokens of one page: (first row, rows, table of pages, row of the first one's result)."""
    slot, end = past, past + count
    while slot < end:
        stop = min(end, slot + tokens, (slot // PAGE_TOKENS + 1) * PAGE_TOKENS)
        row = first_row + slot - past
        yield row, stop - slot, table, row
        slot = stop


def block_rows(group: int, *, is_prefill: bool) -> int:
    """Rows of a task, of which a page has no more than this; group: query heads a key head."""
    group = triton.next_power_of_2(group)
    return max(DECODE_ROWS, min(PREFILL_ROWS, PAGE_TOKENS * group) if is_prefill else group)


def _rows_at_once(rows: int, dense: PageLayout, device: torch.device) -> int:
    """Return the rows of a program: shared memory must hold their queries, and registers, as many as may be, their
    sums."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in WARP_GROUPS:
        rows = min(rows, FEW_PREFILL_ROWS)
    if dense.dtype is torch.float32:
        return min(rows, DECODE_ROWS)
    return min(rows, PREFILL_ROWS if dense.head_dim <= 128 else PREFILL_ROWS // 2)


def _num_warps(rows: int, head_dim: int, *, is_wide: bool) -> int:
    """is_wide: operands are in fp32, which need twice the warps."""
    if rows == DECODE_ROWS:
        return 8 if is_wide and head_dim > 64 else 4
    return rows // 16  # with more of them, two would compute the same


def _tokens_at_once(rows: int, head_dim: int) -> int:
    """Return the tokens of a page that a program of so many rows multiplies at once: of many rows, operands of more
    would take too many registers. Heads of 256 have too few in any case; more tokens take fewer instructions there. The
    interpreter's sums, unlike those of tensor cores, depend on it: one for all."""
    if rows == DECODE_ROWS or is_interpreted():
        return PAGE_TOKENS
    return 16 if head_dim <= 128 else 32


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
def _dense_keys(head, first, i, D: tl.constexpr, TOKENS: tl.constexpr):
    """Features i * 32 and on of the page's tokens from `first` on, [32, TOKENS]."""
    feature = i * GROUP + tl.arange(0, GROUP)[:, None]
    at = head + feature * PAGE + first + tl.arange(0, TOKENS)[None, :]
    if D // GROUP * GROUP == D:
        return tl.load(at)
    return tl.load(at, mask=feature < D, other=0.0)


@triton.jit
def _dense_values(head, first, held, i, D: tl.constexpr, TOKENS: tl.constexpr):
    """Features i * 32 and on, [TOKENS, 32], of the first `held` tokens: behind them may be any bits, and no weight of
    zero makes zero of a NaN."""
    token, feature = first + tl.arange(0, TOKENS)[:, None], i * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(head + D * PAGE + token * D + feature, mask=(token < held) & (feature < D), other=0.0)


@triton.jit
def _codes(codes, first, i, GROUPS: tl.constexpr, TOKENS: tl.constexpr, CODING: tl.constexpr, ARE_KEYS: tl.constexpr):
    """The codes of group i of the page's tokens from `first` on, two by two: INT8 of neighbours in a row, INT4 of
    features 16 apart."""
    each: tl.constexpr = 2 if CODING == "int8" else 1
    if CODING == "int8":
        codes = codes.to(tl.pointer_type(tl.int16))
    if ARE_KEYS:
        rows: tl.constexpr = GROUP if CODING == "int8" else HALF_GROUP
        row, column = tl.arange(0, rows)[:, None], tl.arange(0, TOKENS // each)[None, :]
        at = (i * rows + row) * (PAGE // each) + first // each + column
    else:
        row, column = first + tl.arange(0, TOKENS)[:, None], tl.arange(0, HALF_GROUP)[None, :]
        at = row * (GROUPS * HALF_GROUP) + i * HALF_GROUP + column
    return tl.load(codes + at)


@triton.jit
def _levels(codes, TOKENS: tl.constexpr, CODING: tl.constexpr, ARE_KEYS: tl.constexpr, OPERAND: tl.constexpr):
    """The integers, or halves, that the bytes of a group stand for: of keys [32, TOKENS], of values [TOKENS, 32]."""
    if CODING == "int8":
        both = tl.join(signed_byte(codes, OPERAND), signed_byte(codes >> 8, OPERAND))
    else:
        codes = codes.to(tl.int16)
        both = tl.join(nibble(codes & 15, INT4_ZERO, OPERAND), nibble(codes >> 4, INT4_ZERO, OPERAND))
        both = tl.permute(both, (2, 0, 1) if ARE_KEYS else (0, 2, 1))
    shape: tl.constexpr = (GROUP, TOKENS) if ARE_KEYS else (TOKENS, GROUP)
    return tl.reshape(both, shape)


@triton.jit
def _scales(scales, first, g, TOKENS: tl.constexpr):
    """fp32 [1, TOKENS]: of group g of the page's tokens from `first` on."""
    return scales_of(tl.load(scales + g * PAGE + first + tl.arange(0, TOKENS)))[None, :]


@triton.jit
def _seen(first, position, lowest, TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """bool [R, TOKENS]: which keys, of the positions from `first` on, the rows see. lowest: the first position that
    their windows show them."""
    key = first + tl.arange(0, TOKENS)[None, :]
    seen = key <= position[:, None]
    if HAS_WINDOW:
        seen = seen & (key >= lowest[:, None])
    return seen


@triton.jit
def _capped(scores, factor, cap, HAS_SOFTCAP: tl.constexpr):
    """Scores, capped and then to the base of two already, where there is a cap."""
    if HAS_SOFTCAP:  # cap * tanh, whose argument is half the exponent
        scores = cap - 2 * cap / (tl.exp2(scores * factor) + 1)
    return scores


@triton.jit
def softened(parts, factor, HAS_SOFTCAP: tl.constexpr):
    """The weights of a page's tokens relative to the row's largest, part by part, its score to the base of two, and
    the sum of the weights."""
    peak = tl.max(parts[0], 1)
    for p in tl.static_range(1, len(parts)):
        peak = tl.maximum(peak, tl.max(parts[p], 1))
    peak = tl.maximum(peak if HAS_SOFTCAP else peak * factor, NOTHING)
    weights, coarse_sum, fine_sum = (), 0.0, 0.0
    for p in tl.static_range(len(parts)):
        below = tl.broadcast_to(-peak[:, None], parts[p].shape)
        if HAS_SOFTCAP:
            some = tl.exp2(parts[p] + below)
        else:
            some = tl.exp2(tl.fma(parts[p], tl.full(parts[p].shape, 1.0, tl.float32) * factor, below))
        weights = appended(weights, some)
        # Another number of rows adds them up in another order. 64 weights of up to 1 in steps of 2^-17 sum up exactly
        # in any, and so does what is left of them in steps of 2^-35.
        coarse = (some + COARSE_STEP) - COARSE_STEP
        fine = ((some - coarse) + FINE_STEP) - FINE_STEP
        coarse_sum += tl.sum(coarse, 1)
        fine_sum += tl.sum(fine, 1)
    return weights, peak, coarse_sum + fine_sum


@triton.jit
def _dense_page(
    head, held, key, position, lowest, q, mixed, peak, total, factor, cap,
    D: tl.constexpr, TOKENS: tl.constexpr, OPERAND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """key: the position of its first token. TOKENS: multiplied at once."""
    parts = ()
    for p in tl.static_range(PAGE // TOKENS):
        seen = _seen(key + p * TOKENS, position, lowest, TOKENS, HAS_WINDOW)
        scores = tl.zeros(seen.shape, tl.float32)
        for i in tl.static_range(len(q)):
            keys = _dense_keys(head, p * TOKENS, i, D, TOKENS)
            scores = tl.dot(q[i], keys.to(OPERAND), scores, input_precision="ieee")
        scores = _capped(scores, factor, cap, HAS_SOFTCAP)
        parts = appended(parts, tl.where(seen, scores, float("-inf")))
    weights, own_peak, own_total = softened(parts, factor, HAS_SOFTCAP)
    sums = ()
    for i in tl.static_range(len(mixed)):
        own = tl.zeros(mixed[0].shape, tl.float32)
        for p in tl.static_range(PAGE // TOKENS):
            values = _dense_values(head, p * TOKENS, held, i, D, TOKENS)
            own = tl.dot(weights[p].to(OPERAND), values.to(OPERAND), own, input_precision="ieee")
        with_it, highest, sum_total = with_page(mixed[i], peak, total, own, own_peak, own_total)
        sums = appended(sums, with_it)
    return sums, highest, sum_total


@triton.jit
def _coded_page(
    head, key, position, lowest, q, mixed, peak, total, factor, cap,
    D: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr,
    OPERAND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Do as `_dense_page`. Scales are read where they are used: a thread multiplies those of many tokens, and each
    takes a register."""
    groups: tl.constexpr = D // GROUP
    parts = ()
    for p in tl.static_range(PAGE // TOKENS):
        scores = tl.zeros((q[0].shape[0], TOKENS), tl.float32)
        for g in tl.static_range(groups):
            levels = _levels(_codes(head, p * TOKENS, g, groups, TOKENS, KEYS, True), TOKENS, KEYS, True, OPERAND)
            products = tl.dot(q[g], levels, input_precision="ieee")
            scales = _scales(head + KEY_SCALES, p * TOKENS, g, TOKENS)
            scores = tl.fma(products, tl.broadcast_to(scales, products.shape), scores)
        scores = _capped(scores, factor, cap, HAS_SOFTCAP)
        if HAS_WINDOW:  # else all of it is seen
            seen = _seen(key + p * TOKENS, position, lowest, TOKENS, HAS_WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        parts = appended(parts, scores)
    weights, own_peak, own_total = softened(parts, factor, HAS_SOFTCAP)
    sums, codes = (), head + VALUE_CODES
    for g in tl.static_range(groups):
        own = tl.zeros(mixed[0].shape, tl.float32)
        for p in tl.static_range(PAGE // TOKENS):
            scaled = weights[p] * _scales(head + VALUE_SCALES, p * TOKENS, g, TOKENS)
            if HAS_WINDOW:  # a scale that is NaN concerns those alone who see its token
                seen = _seen(key + p * TOKENS, position, lowest, TOKENS, HAS_WINDOW)
                scaled = tl.where(seen, scaled, 0.0)
            levels = _levels(
                _codes(codes, p * TOKENS, g, groups, TOKENS, VALUES, False), TOKENS, VALUES, False, OPERAND
            )
            own = tl.dot(scaled.to(OPERAND), levels, own, input_precision="ieee")
        with_it, highest, sum_total = with_page(mixed[g], peak, total, own, own_peak, own_total)
        sums = appended(sums, with_it)
    return sums, highest, sum_total


@triton.jit
def _store(
    part, peaks, totals, task, r, kv_head, first, mixed, peak, total, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr
):
    """Store the rows. Their place is computed and read again: the loops need every register."""
    group: tl.constexpr = H // KH
    row = (tl.load(task + 3, volatile=True) + r // group) * H + kv_head * group + r % group
    mask = r < tl.load(task + 1, volatile=True) * group
    tl.store(peaks + first + row, peak, mask=mask)
    tl.store(totals + first + row, total, mask=mask)
    if part is not None:
        for i in tl.static_range(len(mixed)):
            feature = i * GROUP + tl.arange(0, GROUP)[None, :]
            at = part + first * D + row[:, None] * D + feature
            tl.store(at, mixed[i], mask=mask[:, None] & (feature < D))


@triton.jit
def _positions(positions, task, r, window, GROUP_HEADS: tl.constexpr):
    """The positions of rows of a task, -1 of none, the first that their windows show them, and the last of all."""
    is_row = r < tl.load(task + 1, volatile=True) * GROUP_HEADS
    token = tl.load(task, volatile=True) + r // GROUP_HEADS
    position = tl.load(positions + token, mask=is_row, other=-1, volatile=True)
    return position, tl.where(position >= 0, tl.maximum(position - window + 1, 0), FAR), tl.max(position)


@triton.jit
def _dense_head(
    pages, own, own_stride, task, number, own_page, layer, kv_head,
    KH: tl.constexpr, D: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Where a dense page has this head. Addresses are read here, not before: the loops need every register."""
    dense_head: tl.constexpr = 2 * D * PAGE
    dense_bytes: tl.constexpr = KH * dense_head * DENSE.primitive_bitwidth // 8
    address = tl.load(pages + number, mask=number < own_page, other=0) + layer.to(tl.int64) * dense_bytes
    if number == own_page:
        row = tl.load(task, volatile=True)
        address = tl.load(own + row) + layer.to(tl.int64) * tl.load(own_stride + row)
    return page_at(address, 0).to(tl.pointer_type(DENSE)) + kv_head * dense_head


@triton.jit(do_not_specialize=["layer", "window", "num_rows", "table_stride", "chosen_stride"])
def _attend(
    q, part, peaks, totals, sinks, positions, own, own_stride, tasks, tables, choices, chosen,
    layer, window, factor, cap, num_rows, table_stride, chosen_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DENSE: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, CODED_HEAD: tl.constexpr,
    OPERAND: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, SECTION: tl.constexpr,
    TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    task, kv_head, section = tasks + tl.program_id(0) // BLOCKS * 4, tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // KH
    is_coded: tl.constexpr = KEYS != "dense"
    r = tl.program_id(0) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    position, lowest, last = _positions(positions, task, r, window, group)
    own_page = last // PAGE
    begin = tl.maximum(section * SECTION, tl.min(lowest) // PAGE)
    end = tl.minimum(section * SECTION + SECTION, own_page + 1)
    if (last < 0) | (begin >= end):
        return
    row = (tl.load(task) + r // group) * H + kv_head * group + r % group
    queries = _queries(q + row * D, position >= 0, D, OPERAND)
    peak, total = before_pages(sinks, kv_head * group + r % group)
    mixed = _zeros(len(queries), BLOCK_R)
    pages = tables + tl.load(task + 2).to(tl.int64) * table_stride
    if chosen is not None:
        choice = choices + tl.load(task).to(tl.int64) * 4
        if tl.load(choice) != 0:
            pages = chosen + (tl.load(choice + 3) * KH + kv_head) * chosen_stride
    if is_coded:
        at = (layer.to(tl.int64) * KH + kv_head) * CODED_HEAD
        for number in range(tl.maximum(begin, 1), tl.minimum(end, own_page)):
            mixed, peak, total = _coded_page(
                page_at(tl.load(pages + number), at), number * PAGE, position, lowest,
                queries, mixed, peak, total, factor, cap,
                D, TOKENS, KEYS, VALUES, KEY_SCALES, VALUE_CODES, VALUE_SCALES, OPERAND, HAS_SOFTCAP, HAS_WINDOW,
            )  # fmt: skip
    # Of a coded format these are the last page and the first, in that order, where they are the program's.
    first_step, end_step = begin, end
    if is_coded:
        first_step = 1 - (end > own_page).to(tl.int32)
        end_step = 1 + ((begin == 0) & (own_page > 0)).to(tl.int32)
        # Read again, as it would take registers of the loop before.
        position, lowest, last = _positions(positions, task, r, window, group)
    for step in range(first_step, end_step):
        number = step
        if is_coded:
            number = tl.where(step == 0, own_page, 0)
        head_at = _dense_head(pages, own, own_stride, task, number, own_page, layer, kv_head, KH, D, DENSE)
        mixed, peak, total = _dense_page(
            head_at, last + 1 - number * PAGE, number * PAGE, position, lowest,
            queries, mixed, peak, total, factor, cap, D, TOKENS, OPERAND, HAS_SOFTCAP, HAS_WINDOW,
        )  # fmt: skip
    _store(part, peaks, totals, task, r, kv_head, section.to(tl.int64) * num_rows * H, mixed, peak, total, H, KH, D)


def _scaling(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor of a score and its cap, to the base of two. exp2(2 log2(e) x) is what tanh(x) is made of."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return 2 * scale * LOG2_E.value / softcap, softcap * LOG2_E.value


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
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    chosen: ChosenTables | None = None,
) -> list[KernelLaunch]:
    """q fp32 [M, H, D] from `rope_store` -> out fp32 [M, H * D], or its codes, see `attention_merge.can_code`.

    On a card queries and weights are rounded to bf16, but for models in fp32: 2e-3 of the norm as a rule, 4e-3 at most.
    parts: of one section, where a program has all pages of its task, or of as many as the longest segment has pages.
    rows: see `block_rows`. sinks: fp32 [H], scores without a value, which come before all pages. gate: see `merge`.
    chosen: what some rows attend to, whose positions are those in there. Rows of no task, and padding, stay as they
    are. Else see `paged_attention`.
    """
    assert parts.mixed.shape[1:] == q.shape
    pages = 1 if parts.sections > 1 else ALL_PAGES
    first, later = (sinks, None) if pages == ALL_PAGES else (None, sinks)
    reach = FAR.value if window is None else window
    attending = over_pages(
        q, tokens, history, parts, dense, coded, layer, pages, scale=scale, window=reach, softcap=softcap, rows=rows,
        sinks=first, chosen=chosen,
    )  # fmt: skip
    merging = merge(parts, out, tokens, reach, section_pages=pages, is_turned=coded is not None, sinks=later, gate=gate)
    return [attending, merging]


def over_pages(
    q: Tensor,
    tokens: TokenTables,
    history: AttentionHistory,
    parts: Parts,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    pages: int,
    *,
    scale: float,
    window: int = FAR.value,
    softcap: float | None = None,
    rows: int = DECODE_ROWS,
    sinks: Tensor | None = None,
    chosen: ChosenTables | None = None,
) -> KernelLaunch:
    """Return the launch of `attend` that fills the parts; pages: of a program. Parts may be without features, and have
    rows of their own."""
    assert q.is_contiguous()
    (_, H, _), block, (factor, cap) = q.shape, _rows_at_once(rows, dense, q.device), _scaling(scale, softcap)
    is_wide = is_interpreted() or dense.dtype is torch.float32  # the interpreter multiplies bf16 wrongly
    return KernelLaunch(
        kernel=_attend,
        grid=(len(history.tasks) * (rows // block), dense.num_kv_heads, parts.sections),
        arguments={
            "q": q, "part": parts.mixed if parts.mixed.shape[-1] else None, "peaks": parts.peaks,
            "totals": parts.totals, "sinks": sinks,
            **{name: getattr(tokens, name) for name in ("positions", "own", "own_stride")},
            "tasks": history.tasks, "tables": history.tables, "choices": None if chosen is None else chosen.rows,
            "chosen": None if chosen is None else chosen.tables, "layer": layer, "window": window, "factor": factor,
            "cap": cap, "num_rows": parts.mixed.shape[1], "table_stride": history.tables.stride(0),
            "chosen_stride": 0 if chosen is None else chosen.tables.stride(1),
        },
        constants={
            **page_constants(dense, coded), "H": H, "OPERAND": tl.float32 if is_wide else tl.bfloat16,
            "BLOCKS": rows // block, "BLOCK_R": block, "SECTION": pages,
            "TOKENS": _tokens_at_once(block, dense.head_dim),
            "HAS_SOFTCAP": softcap is not None, "HAS_WINDOW": window != FAR.value,
        },
        # A step's program has one page; of many rows the next one is on its way, but with more features its place would
        # leave too little for the queries.
        num_warps=_num_warps(block, dense.head_dim, is_wide=is_wide),
        num_stages=2 if block > DECODE_ROWS and dense.head_dim <= 128 else 1,
    )  # fmt: skip
