"""Causal attention to pages of latents on a GPU: one kernel for decode, verification and prefill.

As in `attention`, with one head of keys that all heads of queries share, and with values that are the keys' first
features (arXiv:2405.04434). A page's bytes are taken as words of four of a token: byte j of 32 words are the operand of
one product, for scores as it is and for values the other way round; queries are read, and sums written, in that order
of the features. A program has 16 rows and up to 256 features of values, as registers hold no more: scores are made for
each such slice, and what of a page is read again comes from a cache.

A row has the same bits however many are computed beside it, for the reasons that `attention` has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import ALL_PAGES, DECODE_ROWS, FAR, AttentionHistory, softened
from localllm.kernels.gpu.attention_merge import LOG2_E, Parts, appended, before_pages, merge, with_page
from localllm.kernels.gpu.latent_store import latent_constants
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
from localllm.kernels.gpu.levels import nibble, signed_byte
from localllm.kernels.gpu.rope import INT4_ZERO, PAGE, TokenTables, page_at, scales_of
from localllm.kernels.kv_page import LatentLayout, PageLayout

_MOST_VALUES = 256  # features of values, of a program
_LANES = 32  # words of a tile at most


@triton.constexpr_function
def halves_of(coding: str) -> int:
    """Return the tiles that a word's byte gives: of INT4, one of each nibble."""
    return 2 if coding == "int4" else 1


@triton.constexpr_function
def words_of(features: int, coding: str) -> int:
    """Return the words of a run of features."""
    return features // (8 if coding == "int4" else 4)


@triton.constexpr_function
def lanes_of(features: int, coding: str) -> int:
    """Return the words of a tile: as many as tensor cores take at least."""
    lanes: int = max(16, min(_LANES, triton.next_power_of_2(words_of(features, coding))))
    return lanes


@triton.constexpr_function
def tiles_of(features: int, coding: str) -> int:
    tiles: int = -(-words_of(features, coding) // lanes_of(features, coding))
    return tiles


@triton.jit
def _words(i, FEATURES: tl.constexpr, CODING: tl.constexpr):
    """The words of tile i of a run."""
    LANES: tl.constexpr = lanes_of(FEATURES, CODING)
    return i * LANES + tl.arange(0, LANES)


@triton.jit
def _feature_of(byte, half, CODING: tl.constexpr):
    """The feature whose code is in this byte of a run, of INT4 in this half of it."""
    if CODING == "int4":
        byte = byte // 16 * 32 + byte % 16 + half * 16
    return byte


@triton.jit
def _fours(rows, i, half, mask, FEATURES: tl.constexpr, CODING: tl.constexpr):
    """Four tiles of the run at each of the pointers [N]: by the byte that a feature's code has in its word."""
    LANES: tl.constexpr = lanes_of(FEATURES, CODING)
    byte = i * (4 * LANES) + tl.arange(0, 4 * LANES)[None, :]
    is_there = mask[:, None] & (byte < 4 * words_of(FEATURES, CODING))
    x = tl.load(rows[:, None] + _feature_of(byte, half, CODING), mask=is_there, other=0.0)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], LANES, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dense_scores(
    scores, q, is_row, rows, is_held, FEATURES: tl.constexpr, CODING: tl.constexpr, OPERAND: tl.constexpr
):
    """scores [R, 64] and those of a run, which is at q, pointers [R], and at rows, pointers [64]."""
    for i in tl.range(0, tiles_of(FEATURES, CODING)):
        for half in tl.static_range(halves_of(CODING)):
            queries = _fours(q, i, half, is_row, FEATURES, CODING)
            four = _fours(rows, i, half, is_held, FEATURES, CODING)
            for j in tl.static_range(4):
                keys = tl.trans(four[j].to(OPERAND))
                scores = tl.dot(queries[j].to(OPERAND), keys, scores, input_precision="ieee")
    return scores


@triton.jit
def _dense_page(
    head, held, key, position, q, first, mixed, peak, total, factor,
    LATENT: tl.constexpr, SLICE: tl.constexpr, D: tl.constexpr, CODING: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """held: tokens that are there; behind them may be any bits. key: the position of its first token. first: of the
    features of values, of which there are SLICE."""
    token = tl.arange(0, PAGE)
    rows, is_held, is_row = head + token * D, token < held, position >= 0
    scores = tl.zeros((mixed[0].shape[0], PAGE), tl.float32)
    scores = _dense_scores(scores, q, is_row, rows, is_held, LATENT, CODING, OPERAND)
    scores = _dense_scores(scores, q + LATENT, is_row, rows + LATENT, is_held, D - LATENT, CODING, OPERAND)
    scores = tl.where(key + token[None, :] <= position[:, None], scores, float("-inf"))
    weights, own_peak, own_total = softened((scores,), factor, False)
    operand, sums = weights[0].to(OPERAND), ()
    halves: tl.constexpr = halves_of(CODING)
    for i in tl.static_range(tiles_of(SLICE, CODING)):
        for half in tl.static_range(halves):
            four = _fours(rows + first, i, half, is_held, SLICE, CODING)
            for j in tl.static_range(4):
                own = tl.dot(operand, four[j].to(OPERAND), input_precision="ieee")
                so_far = mixed[(i * halves + half) * 4 + j]
                with_it, highest, sum_total = with_page(so_far, peak, total, own, own_peak, own_total)
                sums = appended(sums, with_it)
    return sums, highest, sum_total


@triton.jit
def _codes(run, i, half, FEATURES: tl.constexpr, CODING: tl.constexpr, STORED: tl.constexpr):
    """int32 [LANES, 64]: the words of tile i of the run at this address. STORED: how the page is coded; where it is
    INT8 and others are INT4, those of the features that these have in this half of such words."""
    word = _words(i, FEATURES, CODING)[:, None]
    at = word
    if STORED != CODING:
        at = word // 4 * 8 + word % 4 + half * 4
    at = run.to(tl.pointer_type(tl.int32)) + at * PAGE + tl.arange(0, PAGE)[None, :]
    if words_of(FEATURES, CODING) % lanes_of(FEATURES, CODING) == 0:
        return tl.load(at)
    return tl.load(at, mask=word < words_of(FEATURES, CODING), other=0)


@triton.jit
def _levels(words, half, j, STORED: tl.constexpr, OPERAND: tl.constexpr):
    """What byte j of each word stands for."""
    byte = (words >> (8 * j)).to(tl.int16)
    if STORED == "int8":
        return signed_byte(byte, OPERAND)
    return nibble((byte >> (4 * half)) & 15, INT4_ZERO, OPERAND)


@triton.jit
def _coded_scores(
    scores, q, is_row, run, scales,
    FEATURES: tl.constexpr, CODING: tl.constexpr, STORED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """scores [R, 64] and those of a run of codes, each token's times its scale."""
    products = tl.zeros(scores.shape, tl.float32)
    for i in tl.range(0, tiles_of(FEATURES, CODING)):
        for half in tl.static_range(halves_of(CODING)):
            words = _codes(run, i, half, FEATURES, CODING, STORED)
            queries = _fours(q, i, half, is_row, FEATURES, CODING)
            for j in tl.static_range(4):
                levels = _levels(words, half, j, STORED, OPERAND)
                products = tl.dot(queries[j].to(OPERAND), levels, products, input_precision="ieee")
    return tl.fma(products, tl.broadcast_to(scales[None, :], scores.shape), scores)


@triton.jit
def _coded_page(
    page, key, position, q, first, mixed, peak, total, factor,
    LATENT: tl.constexpr, SLICE: tl.constexpr, D: tl.constexpr, CODING: tl.constexpr, STORED: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Do as `_dense_page`, of any page. STORED: its own coding. Queries beyond a run are zeros, whatever codes are
    there."""
    token, is_row = tl.arange(0, PAGE), position >= 0
    scales = page + words_of(D, STORED) * 4 * PAGE + token
    latent_scales = scales_of(tl.load(scales))
    scores = tl.zeros((mixed[0].shape[0], PAGE), tl.float32)
    scores = _coded_scores(scores, q, is_row, page, latent_scales, LATENT, CODING, STORED, OPERAND)
    behind, shared_scales = page + words_of(LATENT, STORED) * 4 * PAGE, scales_of(tl.load(scales + PAGE))
    scores = _coded_scores(
        scores, q + LATENT, is_row, behind, shared_scales, D - LATENT, CODING, STORED, OPERAND
    )  # fmt: skip
    seen = key + token[None, :] <= position[:, None]
    weights, own_peak, own_total = softened((tl.where(seen, scores, float("-inf")),), factor, False)
    # A scale that is NaN concerns those alone who see its token.
    operand, sums = tl.where(seen, weights[0] * latent_scales[None, :], 0.0).to(OPERAND), ()
    halves: tl.constexpr = halves_of(CODING)
    values = page + first // (4 * halves_of(STORED)) * (4 * PAGE)
    for i in tl.static_range(tiles_of(SLICE, CODING)):
        for half in tl.static_range(halves):
            words = _codes(values, i, half, SLICE, CODING, STORED)
            for j in tl.static_range(4):
                levels = tl.trans(_levels(words, half, j, STORED, OPERAND))
                own = tl.dot(operand, levels, input_precision="ieee")
                so_far = mixed[(i * halves + half) * 4 + j]
                with_it, highest, sum_total = with_page(so_far, peak, total, own, own_peak, own_total)
                sums = appended(sums, with_it)
    return sums, highest, sum_total


@triton.jit
def _store(out, mask, mixed, SLICE: tl.constexpr, CODING: tl.constexpr):
    """The sums to the rows at out, pointers [R]."""
    halves: tl.constexpr = halves_of(CODING)
    for i in tl.static_range(tiles_of(SLICE, CODING)):
        for half in tl.static_range(halves):
            word = _words(i, SLICE, CODING)[None, :]
            at = out[:, None] + _feature_of(4 * word, half, CODING)
            is_there = mask[:, None] & (word < words_of(SLICE, CODING))
            for j in tl.static_range(4):
                tl.store(at + j, mixed[(i * halves + half) * 4 + j], mask=is_there)


@triton.jit
def _zeros(R: tl.constexpr, SLICE: tl.constexpr, CODING: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(tiles_of(SLICE, CODING) * halves_of(CODING) * 4):
        tiles = appended(tiles, tl.zeros((R, lanes_of(SLICE, CODING)), tl.float32))
    return tiles


@triton.jit(do_not_specialize=["layer", "num_rows", "table_stride"])
def _attend_latents(
    q, part, peaks, totals, positions, own, own_stride, tasks, tables, layer, factor, num_rows, table_stride,
    H: tl.constexpr, D: tl.constexpr, LATENT: tl.constexpr, SLICE: tl.constexpr, CODING: tl.constexpr,
    OWN: tl.constexpr, DENSE: tl.constexpr, OWN_BYTES: tl.constexpr, CODED_BYTES: tl.constexpr,
    OPERAND: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, SECTION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    task, first, section = tasks + tl.program_id(0) // BLOCKS * 4, tl.program_id(1) * SLICE, tl.program_id(2)
    r = tl.program_id(0) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    first_token = tl.load(task)
    is_row = r < tl.load(task + 1) * H
    position = tl.load(positions + first_token + r // H, mask=is_row, other=-1)
    last = tl.max(position)
    own_page = last // PAGE
    begin, end = section * SECTION, tl.minimum(section * SECTION + SECTION, own_page + 1)
    if (last < 0) | (begin >= end):
        return
    row = first_token.to(tl.int64) * H + r
    q += row * D
    peak, total = before_pages(None, r)
    mixed = _zeros(BLOCK_R, SLICE, CODING)
    pages = tables + tl.load(task + 2).to(tl.int64) * table_stride
    # Of a coded format the last page and the first are INT8, and come last, in that order.
    first_step, end_step = begin, end
    if CODING != "dense":
        for number in range(tl.maximum(begin, 1), tl.minimum(end, own_page)):
            page = page_at(tl.load(pages + number), layer.to(tl.int64) * CODED_BYTES)
            mixed, peak, total = _coded_page(
                page, number * PAGE, position, q, first, mixed, peak, total, factor,
                LATENT, SLICE, D, CODING, CODING, OPERAND,
            )  # fmt: skip
        first_step = 1 - (end > own_page).to(tl.int32)
        end_step = 1 + ((begin == 0) & (own_page > 0)).to(tl.int32)
    for step in range(first_step, end_step):
        number = step
        if CODING != "dense":
            number = tl.where(step == 0, own_page, 0)
        address = tl.load(pages + number, mask=number < own_page, other=0) + layer.to(tl.int64) * OWN_BYTES
        if number == own_page:
            address = tl.load(own + first_token) + layer.to(tl.int64) * tl.load(own_stride + first_token)
        if CODING == "dense":
            mixed, peak, total = _dense_page(
                page_at(address, 0).to(tl.pointer_type(DENSE)), last + 1 - number * PAGE, number * PAGE, position,
                q, first, mixed, peak, total, factor, LATENT, SLICE, D, CODING, OPERAND,
            )  # fmt: skip
        else:
            mixed, peak, total = _coded_page(
                page_at(address, 0), number * PAGE, position, q, first, mixed, peak, total, factor,
                LATENT, SLICE, D, CODING, OWN, OPERAND,
            )  # fmt: skip
    row += section.to(tl.int64) * num_rows * H
    if first == 0:  # as all slices have them
        tl.store(peaks + row, peak, mask=is_row)
        tl.store(totals + row, total, mask=is_row)
    _store(part + row * LATENT + first, is_row, mixed, SLICE, CODING)


def is_wide(own: PageLayout) -> bool:
    """Return whether operands are in fp32, else in bf16, which the interpreter multiplies wrongly."""
    return is_interpreted() or own.dtype is torch.float32


def new_queries(rows: int, heads: int, own: PageLayout, device: torch.device | str = "cpu") -> Tensor:
    """Return room for queries [M, H, D], as they are multiplied."""
    dtype = torch.float32 if is_wide(own) else torch.bfloat16
    return torch.empty((rows, heads, own.head_dim), dtype=dtype, device=device)


def _slice_of(latent_dim: int) -> int:
    """Return the features of values of a program: registers hold no sums of more. All programs of a row compute its
    scores."""
    return _MOST_VALUES if latent_dim % _MOST_VALUES == 0 else latent_dim


def attend_latents(
    q: Tensor,
    out: Tensor | Codes,
    tokens: TokenTables,
    history: AttentionHistory,
    parts: Parts,
    own: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
    rows: int = DECODE_ROWS,
) -> list[KernelLaunch]:
    """q [M, H, D] from `latent_store`, see `new_queries` -> out fp32 [M, H * latent], or its codes. Else see
    `attention.attend`."""
    M, H, D = q.shape
    assert isinstance(own, LatentLayout) and q.is_contiguous() and D == own.head_dim
    assert parts.mixed.shape[1:] == (M, H, own.latent_dim)
    pages = 1 if parts.sections > 1 else ALL_PAGES
    block, values = rows if is_interpreted() else DECODE_ROWS, _slice_of(own.latent_dim)
    attending = KernelLaunch(
        kernel=_attend_latents,
        grid=(len(history.tasks) * (rows // block), own.latent_dim // values, parts.sections),
        arguments={
            "q": q, "part": parts.mixed, "peaks": parts.peaks, "totals": parts.totals,
            **{name: getattr(tokens, name) for name in ("positions", "own", "own_stride")},
            "tasks": history.tasks, "tables": history.tables, "layer": layer, "factor": scale * LOG2_E.value,
            "num_rows": M, "table_stride": history.tables.stride(0),
        },
        constants={
            **latent_constants(own, coded), "OWN_BYTES": own.layer_bytes, "H": H, "SLICE": values,
            "OPERAND": tl.float32 if is_wide(own) else tl.bfloat16, "BLOCKS": rows // block, "BLOCK_R": block,
            "SECTION": pages,
        },
        num_warps=8 if is_wide(own) else 4,
        num_stages=1,
    )  # fmt: skip
    return [attending, merge(parts, out, tokens, FAR.value, section_pages=pages, is_turned=coded is not None)]
