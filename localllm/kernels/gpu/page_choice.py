"""The choice of the pages that a token attends to, on a GPU (see `page_choice`): sketches of pages that have become
full, what a query finds in each, and for each token and key head a table of the pages with the largest shares.

The attention reads that table as if the sequence had no other pages: a token's position is its place in there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import kv_page
from localllm.kernels.gpu.attention import AttentionHistory
from localllm.kernels.gpu.attention_merge import LOG2_E, NOTHING, appended
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
from localllm.kernels.gpu.rope import (
    GROUP,
    HALF_GROUP,
    INT4_ZERO,
    PAGE,
    SCALE_BIAS,
    SCALE_HIGH,
    SCALE_LOW,
    SCALE_SHIFT,
    TokenTables,
    page_at,
    page_constants,
    scales_of,
)
from localllm.kernels.kv_page import PageLayout
from localllm.kernels.page_choice import FIXED_PAGES, NOISE
from localllm.kernels.sizes import SketchLayout

_SHARED = 8  # programs of a head that make sketches
_PAGES = 4  # of a program that scores them
_LEAST_ROWS = 16  # of a product
SCALE_NEAREST = tl.constexpr(1 << (SCALE_SHIFT.value - 1))
NO_PAGE = tl.constexpr(-1)  # the key of what is not to be chosen: below that of any share
FIRST_PAGES = tl.constexpr(1)  # in front of what is chosen
FIXED = tl.constexpr(FIXED_PAGES)
ABOVE_ALL = tl.constexpr(0x7FFFFFFF)
NAN_BITS = tl.constexpr(0x7FC0)


@dataclass(frozen=True)
class Choices:
    """What a forward's tokens choose among, on the device.

    choosers int32 [C]: the rows that choose; -1 is none.
    rows int64 [M, 4]: the address of the sketches of a row's sequence, 0 where it chooses nothing, for how many pages
    there is room, the table of pages, and which of the choosers it is.
    sketches int64 [B, 4]: of each table of pages, the same address and room, and the pages [first, end) whose sketches
    are to be made.
    pages: so many are chosen.
    """

    choosers: Tensor
    rows: Tensor
    sketches: Tensor
    pages: int


@triton.constexpr_function
def _lanes(g, D):
    """The features of group g."""
    return min(kv_page.GROUP, D - g * kv_page.GROUP)


@triton.constexpr_function
def _steps(lanes):
    """Those that mix as many features as `page_choice.mixed_together` says."""
    return (lanes & -lanes).bit_length() - 1


@triton.constexpr_function
def _unit(lanes):
    return (lanes & -lanes) ** -0.5


@triton.jit
def _mixed(x, LANES: tl.constexpr):
    """x fp32 [rows, 32], of which so many columns are features: times an orthonormal Hadamard matrix."""
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros(x.shape, tl.int32)
    for step in tl.static_range(_steps(LANES)):
        other = tl.gather(x, lane ^ (1 << step), 1)
        x = other + tl.where((lane & (1 << step)) == 0, x, -x)
    return x * _unit(LANES)


@triton.jit
def _keys(page, dense, scales, g: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr):
    """Features g * 32 and on of a page's keys, fp32 [64, 32], as queries are mixed; zeros behind the last one."""
    token, f = tl.arange(0, PAGE)[:, None], tl.arange(0, GROUP)[None, :]
    if KEYS == "dense":
        feature = g * GROUP + f
        keys = tl.load(dense + feature * PAGE + token, mask=feature < D, other=0.0).to(tl.float32)
        return _mixed(keys, _lanes(g, D))
    scale = scales_of(tl.load(scales + g * PAGE + tl.arange(0, PAGE)))[:, None]
    if KEYS == "int8":
        return tl.load(page + (g * GROUP + f) * PAGE + token).to(tl.int8, bitcast=True).to(tl.float32) * scale
    both = tl.load(page + (g * HALF_GROUP + f % HALF_GROUP) * PAGE + token).to(tl.int32)
    return (((both >> (f // HALF_GROUP * 4)) & 15).to(tl.float32) - INT4_ZERO) * scale


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _sketch(
    tables, sketches, layer, table_stride,
    KH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DENSE: tl.constexpr, KEY_SCALES: tl.constexpr,
    CODED_HEAD: tl.constexpr, SCALES: tl.constexpr, MEAN: tl.constexpr, BYTES: tl.constexpr, SHARED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """SCALES, MEAN, BYTES: of `SketchLayout`."""
    after_previous(OVERLAPS)
    words, head = sketches + tl.program_id(0) * 4, layer.to(tl.int64) * KH + tl.program_id(1)
    first, end = tl.load(words + 2), tl.load(words + 3)
    room = tl.load(words) + head * tl.load(words + 1) * BYTES
    pages = tables + tl.program_id(0).to(tl.int64) * table_stride
    t, f = tl.arange(0, PAGE), tl.arange(0, GROUP)
    for number in range(first + tl.program_id(2), end, SHARED):
        address, into = tl.load(pages + number), (room + number * BYTES).to(tl.pointer_type(tl.uint8))
        dense = page_at(address, head * (2 * D * PAGE * DENSE.primitive_bitwidth // 8)).to(tl.pointer_type(DENSE))
        page = page_at(address, head * CODED_HEAD)
        for g in tl.static_range((D + GROUP - 1) // GROUP):
            keys = _keys(page, dense, page + KEY_SCALES, g, D, KEYS)
            mean = tl.sum(keys, 0) / PAGE
            bits = mean.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where((mean - mean) == 0, rounded, NAN_BITS)
            beside = keys - (rounded << 16).to(tl.float32, bitcast=True)[None, :]
            below = (beside < 0).to(tl.int32)
            signs = tl.sum(tl.where(f[None, :] < _lanes(g, D), (1 - below) << f[None, :], 0), 1)
            wanted = tl.sum(tl.where(f[None, :] < _lanes(g, D), tl.abs(beside), 0.0), 1) / _lanes(g, D)
            wanted = tl.where(wanted == wanted, tl.minimum(tl.maximum(wanted, SCALE_LOW), SCALE_HIGH), SCALE_LOW)
            scale = (wanted.to(tl.int32, bitcast=True) - SCALE_BIAS + SCALE_NEAREST) >> SCALE_SHIFT
            tl.store(into.to(tl.pointer_type(tl.int32)) + g * PAGE + t, signs)
            tl.store(into + SCALES + g * PAGE + t, scale.to(tl.uint8))
            means = (into + MEAN).to(tl.pointer_type(tl.int16)) + g * GROUP + f
            tl.store(means, rounded.to(tl.int16), mask=f < _lanes(g, D))


@triton.jit
def _sought(q, is_head, noise, D: tl.constexpr, KEYS: tl.constexpr):
    """Load 32 features of each of the heads at q, pointers [R], as keys are mixed: [R, 32]; and for each of these
    tiles, what signs miss of it."""
    queries, missed = (), ()
    f = tl.arange(0, GROUP)
    for g in tl.static_range((D + GROUP - 1) // GROUP):
        is_there = is_head[:, None] & (f < _lanes(g, D))[None, :]
        query = tl.load(q[:, None] + g * GROUP + f[None, :], mask=is_there, other=0.0)
        if KEYS == "dense":
            query = _mixed(query, _lanes(g, D))
        queries, missed = appended(queries, query), appended(missed, noise * tl.sum(query * query, 1))
    return queries, missed


@triton.jit(do_not_specialize=["layer", "factor", "noise", "width"])
def _score(
    q, positions, choosers, rows, logs, layer, factor, noise, width,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SCALES: tl.constexpr, MEAN: tl.constexpr,
    BYTES: tl.constexpr, HEADS: tl.constexpr, PAGES: tl.constexpr, OPERAND: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The logarithm, to the base of two, of what each head gives to all keys of a page, by its sketch."""
    after_previous(OVERLAPS)
    row, kv_head = tl.load(choosers + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    if row < 0:
        return
    words, newest = rows + row * 4, tl.load(positions + row) // PAGE - 1
    begin = tl.program_id(2) * PAGES
    if begin >= newest:
        return
    group: tl.constexpr = H // KH
    r, t, f = tl.arange(0, HEADS), tl.arange(0, PAGE), tl.arange(0, GROUP)
    head, into = row * H + kv_head * group + r, (tl.program_id(0).to(tl.int64) * H + kv_head * group + r) * width
    queries, missed = _sought(q + head * D, r < group, noise, D, KEYS)
    room = tl.load(words) + (layer.to(tl.int64) * KH + kv_head) * tl.load(words + 1) * BYTES
    for number in range(tl.maximum(begin, 1), tl.minimum(begin + PAGES, newest)):
        page = (room + number * BYTES).to(tl.pointer_type(tl.uint8))
        logs_of, center = tl.zeros((HEADS, PAGE), tl.float32), tl.zeros((HEADS,), tl.float32)
        for g in tl.static_range((D + GROUP - 1) // GROUP):
            signs = tl.load(page.to(tl.pointer_type(tl.int32)) + g * PAGE + t)
            signs = (((signs[None, :] >> f[:, None]) & 1) * 2 - 1).to(OPERAND)
            scales = scales_of(tl.load(page + SCALES + g * PAGE + t))[None, :]
            products = tl.dot(queries[g].to(OPERAND), signs, input_precision="ieee")
            logs_of += factor * products * scales + missed[g][:, None] * scales * scales
            means = tl.load((page + MEAN).to(tl.pointer_type(tl.int16)) + g * GROUP + f, mask=f < _lanes(g, D), other=0)
            means = (means.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            center += tl.sum(queries[g] * means[None, :], 1)
        logs_of += factor * center[:, None]
        highest = tl.max(logs_of, 1)
        mass = highest + tl.log2(tl.sum(tl.exp2(logs_of - highest[:, None]), 1))
        tl.store(logs + into + number, mass, mask=r < group)


@triton.jit(do_not_specialize=["width", "count", "table_stride"])
def _select(
    logs, positions, choosers, rows, tables, chosen, width, count, table_stride,
    H: tl.constexpr, KH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the addresses of the first page, of the `count` with the largest shares, the first ones of those that are
    alike, and of the newest full page, by their numbers."""
    after_previous(OVERLAPS)
    row, kv_head = tl.load(choosers + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    if row < 0:
        return
    words, newest, number = rows + row * 4, tl.load(positions + row) // PAGE - 1, tl.arange(0, BLOCK)
    can_be = (number > 0) & (number < newest)
    shares, is_odd = tl.zeros((BLOCK,), tl.float32), number < 0
    for i in range(H // KH):
        at = logs + (tl.program_id(0).to(tl.int64) * H + kv_head * (H // KH) + i) * width + number
        mass = tl.load(at, mask=can_be, other=float("-inf"))
        is_number = mass == mass
        is_odd = is_odd | (is_number == 0)
        mass = tl.where(is_number, mass, float("-inf"))
        part = tl.exp2(mass - tl.maximum(tl.max(mass, 0), NOTHING))
        shares += part / tl.maximum(tl.sum(part, 0), 1e-30)
    keys = tl.where(is_odd, ABOVE_ALL, shares.to(tl.int32, bitcast=True))
    keys = tl.where(can_be, keys, NO_PAGE)
    least = newest.to(tl.int32) * 0
    for n in range(31):
        candidate = least | (tl.full((), 1, tl.int32) << (30 - n))
        least = tl.where(tl.sum((keys >= candidate).to(tl.int32), 0) >= count, candidate, least)
    is_above, is_alike = keys > least, (keys == least).to(tl.int32)
    ties = count - tl.sum(is_above.to(tl.int32), 0)
    is_chosen = is_above | ((is_alike != 0) & (tl.cumsum(is_alike, 0) <= ties))
    place = tl.cumsum(is_chosen.to(tl.int32), 0)
    pages = tables + tl.load(words + 2) * table_stride
    table = chosen + (tl.program_id(0).to(tl.int64) * KH + kv_head) * (count + FIXED)
    tl.store(table + place, tl.load(pages + number, mask=is_chosen, other=0), mask=is_chosen)
    tl.store(table, tl.load(pages))
    tl.store(table + count + FIRST_PAGES, tl.load(pages + newest))


def new_chosen(choosers: int, kv_heads: int, pages: int, device: torch.device | str = "cpu") -> Tensor:
    """Return room for the tables of what is chosen, int64 [C, KH, pages]: the last one's page is read elsewhere."""
    return torch.empty((choosers, kv_heads, pages + FIXED_PAGES), dtype=torch.int64, device=device)


def choose(
    q: Tensor,
    chosen: Tensor,
    tokens: TokenTables,
    history: AttentionHistory,
    choices: Choices,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
) -> list[KernelLaunch]:
    """q fp32 [M, H, D] from `rope_store` -> chosen, see `new_chosen`: for each row that chooses, the pages with the
    largest shares of attention. tokens: with the positions of the text. history: with the tables of all pages."""
    (_, H, D), KH, tables, count = q.shape, dense.num_kv_heads, history.tables, len(choices.choosers)
    layout, pages = SketchLayout(D), page_constants(dense, coded)
    sketch = {"SCALES": layout.scales, "MEAN": layout.mean, "BYTES": layout.nbytes}
    width = tables.shape[1]
    own = {"positions": tokens.positions, "choosers": choices.choosers, "rows": choices.rows}
    logs = torch.empty((count, H, width), device=q.device)
    making = KernelLaunch(
        kernel=_sketch,
        grid=(len(tables), KH, _SHARED),
        arguments={
            "tables": tables, "sketches": choices.sketches, "layer": layer, "table_stride": tables.stride(0),
        },
        constants={
            **{name: pages[name] for name in ("KH", "D", "KEYS", "DENSE", "KEY_SCALES", "CODED_HEAD")}, **sketch,
            "SHARED": _SHARED,
        },
    )  # fmt: skip
    scoring = KernelLaunch(
        kernel=_score,
        grid=(count, KH, -(-width // _PAGES)),
        arguments={
            "q": q, **own, "logs": logs, "layer": layer, "width": width, "factor": scale * LOG2_E.value,
            "noise": NOISE * scale * scale * LOG2_E.value,
        },
        constants={
            "H": H, "KH": KH, "D": D, "KEYS": pages["KEYS"], **sketch, "PAGES": _PAGES,
            "HEADS": max(_LEAST_ROWS, triton.next_power_of_2(H // KH)),
            "OPERAND": tl.float32 if is_interpreted() or dense.dtype is torch.float32 else tl.bfloat16,
        },
    )  # fmt: skip
    selecting = KernelLaunch(
        kernel=_select,
        grid=(count, KH),
        arguments={
            "logs": logs, **own, "tables": tables, "chosen": chosen,
            "width": width, "count": choices.pages, "table_stride": tables.stride(0),
        },
        constants={"H": H, "KH": KH, "BLOCK": triton.next_power_of_2(width)},
    )  # fmt: skip
    return [making, scoring, selecting]
