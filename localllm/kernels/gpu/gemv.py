"""y = x @ W.T on a GPU for few rows: packed weights times INT8 activations by 8-bit dot products (dp4a).

A warp has a tile of 16 rows of W. Its threads stand as SLICES x 4: slice s has the groups s, s + SLICES, ... of the
columns, four rows of W a thread, so that a group's sum of integers never leaves its thread, and each thread has all
words of a group on their way at once. At the end the slices are added up one after the other.

That order is a property of the matrix alone: a row of y has the same bits however many rows there are beside it, from
here or from `gemm`, whose sums of integers are as exact and which adds the same floats in the same order. Every
product and sum of floats is rounded where it stands (`fma` or nothing), as the compiler may not choose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
from localllm.kernels.gpu.product_end import End, Gate, finished, store_finished, store_gated, tiles_of
from localllm.kernels.gpu.weight_codes import byte_scale, high_bytes, is_signed, low_bytes, words_of
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE

MOST_ROWS = 4  # of a program; more are further programs, for which the weights are in the second cache
# Of a program, one a warp. ptxas gives a program of one warp the registers to have 8 KB of weights on their way, where
# it gives one of four a third of them.
_TILES = 1
GATED_TILES = 4  # of each half, at least: a group of codes


@triton.jit
def _dot4(w, x, acc, IS_SIGNED: tl.constexpr, ASM: tl.constexpr):
    """acc + the dot product of 4 bytes of w, signed or not, and 4 signed bytes of x, in each element."""
    if ASM:
        dp4a: tl.constexpr = "dp4a.s32.s32 $0, $1, $2, $3;" if IS_SIGNED else "dp4a.u32.s32 $0, $1, $2, $3;"
        acc = tl.inline_asm_elementwise(dp4a, "=r,r,r,r", [w, x, acc], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for b in tl.static_range(4):
            byte = (w << (24 - 8 * b)) >> 24
            if not IS_SIGNED:
                byte = byte & 0xFF
            acc += byte * ((x << (24 - 8 * b)) >> 24)
    return acc


@triton.jit
def added_up(slices, SLICES: tl.constexpr):
    """fp32 [TILES, SLICES, 16]: in each slice the sum of all, added from the first to the last."""
    total = tl.zeros(slices.shape, tl.float32)
    at = tl.zeros(slices.shape, tl.int32)
    for s in tl.static_range(SLICES):
        total = total + tl.gather(slices, at + s, 1)
    return total


@triton.jit
def rows_of(tile, TILES: tl.constexpr, SLICES: tl.constexpr):
    """The rows of W of these tiles, [TILES, SLICES, 16]."""
    n = tile[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    return tl.broadcast_to(n, (TILES, SLICES, 16))


@triton.jit
def fetch_lines(lines):
    """Bring what is at these pointers, which no kernel writes, to the second cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _fetch(qweight, tile, tiles, groups, WORDS: tl.constexpr, SLICES: tl.constexpr):
    """Bring what a program reads first of its weights, which no kernel writes, to the second cache."""
    lines: tl.constexpr = SLICES * WORDS // 2  # of 128 bytes, of a tile
    first = qweight + (tl.minimum(tile, tiles - 1).to(tl.int64) * groups * WORDS * 16)[:, None]
    line = first + tl.minimum(tl.arange(0, lines) * 32, groups * WORDS * 16 - 1)[None, :]
    fetch_lines(line)


@triton.jit
def _beside_rows(values, EACH: tl.constexpr):
    """Of slices, [SLICES], or already of tiles and slices: of a shape that stands beside the rows of W."""
    if not EACH:
        values = values[None, :, None]
    return values


@triton.jit
def slice_sums(
    qweight, scale, bias, q, x_scale, x_bias, first, tile, rows, tiles, groups, x_stride,
    ROWS: tl.constexpr, TILES: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, UNROLL: tl.constexpr,
    ASM: tl.constexpr, EACH: tl.constexpr = False, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """fp32 [TILES, SLICES, 16] for each of the ROWS from `first` on: the sums of their slices. tile [TILES]. FORM: the
    `Weights`. EACH: the tiles are of matrices of their own, with rows of their own; pointers to them and `first` are
    [TILES, 1, 1]. HEADS: that share a row of x, which q and the scales' pointers begin in."""
    lanes, slices = tl.arange(0, 16), tl.arange(0, SLICES)
    WORDS: tl.constexpr = words_of(FORM)
    x_words: tl.constexpr = FORM.columns // 4  # words of a group's codes
    SIGNED: tl.constexpr = is_signed(FORM)
    totals = (tl.zeros((TILES, SLICES, 16), tl.float32),) * ROWS
    is_tile = (tile < tiles)[:, None, None]
    for begin in tl.range(0, groups, SLICES, loop_unroll_factor=UNROLL):
        group = begin + slices
        is_group = group < groups
        is_there = is_tile & is_group[None, :, None]
        at = (tile.to(tl.int64) * groups)[:, None, None] + group[None, :, None]
        if EACH:
            group = group[None, :, None]
            is_group = is_group[None, :, None]
        weights = qweight + at * (WORDS * 16) + lanes[None, None, :]
        dots = (tl.zeros((TILES, SLICES, 16), tl.int32),) * ROWS
        for j in tl.static_range(WORDS):
            w = tl.load(weights + j * 16, mask=is_there, other=0)
            for r in tl.static_range(ROWS):
                x = q + (first + r).to(tl.int64) * HEADS * groups * x_words + group * x_words + j
                is_row = is_group & (first + r < rows)
                low = tl.broadcast_to(_beside_rows(tl.load(x, mask=is_row, other=0), EACH), w.shape)
                if FORM.bits == 4:
                    high = tl.broadcast_to(_beside_rows(tl.load(x + WORDS, mask=is_row, other=0), EACH), w.shape)
                    dot = _dot4(low_bytes(w, FORM, ASM), low, dots[r], SIGNED, ASM)
                    dot = _dot4(high_bytes(w, FORM, ASM), high, dot, SIGNED, ASM)
                else:
                    dot = _dot4(w, low, dots[r], SIGNED, ASM)
                dots = dots[:r] + (dot,) + dots[r + 1 :]
        at = at * 16 + lanes[None, None, :]
        for r in tl.static_range(ROWS):
            x_at = group * x_stride + first + r
            is_row = is_group & (first + r < rows)
            by = _beside_rows(tl.load(x_scale + x_at, mask=is_row, other=0), EACH)
            part = dots[r].to(tl.float32)
            if FORM.group is not None:
                part = part * byte_scale(tl.load(scale + at, mask=is_there, other=0), FORM)
            total = tl.fma(tl.broadcast_to(by, part.shape), part, totals[r])
            if FORM.has_bias:
                offset = _beside_rows(tl.load(x_bias + x_at, mask=is_row, other=0), EACH)
                own = tl.load(bias + at, mask=is_there, other=0).to(tl.float32)
                total = tl.fma(tl.broadcast_to(offset, own.shape), own, total)
            totals = totals[:r] + (total,) + totals[r + 1 :]
    return totals


@triton.jit
def store_halves(
    out, m, column, rows, features, y_stride, code_stride, y, code_scale, code_bias,
    TILES: tl.constexpr, GROUP: tl.constexpr, CODE_BITS: tl.constexpr, GLU: tl.constexpr,
):  # fmt: skip
    """out [TILES, SLICES, 16], of the row m: half of the tiles are a gate's, from `column` on."""
    halves = tl.reshape(tl.max(out, axis=1), (2, 1, TILES * 8))  # all slices have the same
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    m += tl.arange(0, 1)
    store_gated(
        gate, up, m, column, m < rows, features, y_stride, code_stride, y, code_scale, code_bias,
        TILES * 8, 1, GROUP, CODE_BITS, GLU,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "groups", "out_features", "features", "x_stride", "code_stride"])
def _gemv(
    qweight, scale, bias, linear_bias, q, x_scale, x_bias, y, code_scale, code_bias,
    rows, tiles, groups, out_features, features, x_stride, y_stride, code_stride,
    ROWS: tl.constexpr, TILES: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, ADDS: tl.constexpr,
    GROUP: tl.constexpr, CODE_BITS: tl.constexpr, GLU: tl.constexpr, UNROLL: tl.constexpr, ASM: tl.constexpr,
    HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """q: the codes as words of four, [rows, columns / 4]. ROWS: from program_id(0) * ROWS on. GLU: of a gate
    of so many features, whose codes go to y; half of the tiles are the gate's then. HEADS: see `product.by_head`."""
    first = tl.program_id(0) * ROWS
    column, tile = tiles_of(tl.program_id(1), features, tiles, TILES, GLU)
    if OVERLAPS:
        _fetch(qweight, tile, tiles, groups, words_of(FORM), SLICES)
    after_previous(OVERLAPS)
    if HEADS > 1:
        before = tl.program_id(1) * TILES // (tiles // HEADS) * groups
        q, x_scale, x_bias = q + before * (FORM.columns // 4), x_scale + before * x_stride, x_bias + before * x_stride
    sums = slice_sums(
        qweight, scale, bias, q, x_scale, x_bias, first, tile, rows, tiles, groups, x_stride,
        ROWS, TILES, FORM, SLICES, UNROLL, ASM, False, HEADS,
    )  # fmt: skip
    n = rows_of(tile, TILES, SLICES)
    is_n = n < out_features
    for r in tl.static_range(ROWS):
        m = first + r
        out = finished(added_up(sums[r], SLICES), scale, linear_bias, n, is_n, FORM.group is None)
        if GLU is not None:
            store_halves(
                out, m, column, rows, features, y_stride, code_stride, y, code_scale, code_bias,
                TILES, GROUP, CODE_BITS, GLU,
            )  # fmt: skip
        else:
            into = y + m.to(tl.int64) * y_stride + n
            is_out = is_n & (m < rows) & (tl.arange(0, SLICES) == 0)[None, :, None]
            store_finished(out, into, is_out, ADDS)


def gemv(
    x: Codes, matrix: PackedMatrix, y: Tensor | Gate, out_features: int, bias: Tensor | None = None, *,
    adds: bool = False, heads: int = 1,
) -> KernelLaunch:  # fmt: skip
    """x: of M rows, in INT8 codes in the matrix's groups. y [M, >= out_features] of any float type, in rows of any
    stride; adds: to what is in y. Or a gate, for which codes are written. bias fp32 [out_features]. heads: see
    `product.by_head`."""
    rows, end = len(x.q), End.of(y)
    each, tiles, covered = min(MOST_ROWS, triton.next_power_of_2(rows)), _TILES, matrix.tiles
    if isinstance(y, Gate):
        tiles, covered = 2 * max(GATED_TILES, y.codes.group // TILE), 2 * triton.cdiv(y.features, TILE)
    return KernelLaunch(
        _gemv,
        (triton.cdiv(rows, each), triton.cdiv(covered, tiles)),
        {
            "qweight": matrix.qweight if matrix.bits == 4 else matrix.qweight.view(torch.int32).squeeze(-1),
            "scale": matrix.scale, "bias": matrix.bias, "linear_bias": bias, "q": x.q.view(torch.int32),
            "x_scale": x.scale, "x_bias": x.bias, "x_stride": x.scale.stride(0), "rows": rows, "tiles": matrix.tiles,
            "groups": matrix.groups, "out_features": out_features, **end.arguments,
        },
        {
            "ROWS": each, "TILES": tiles, "FORM": matrix.weights, "SLICES": matrix.slices, "ADDS": adds,
            "UNROLL": 2 if rows == 1 else 1, "ASM": not is_interpreted(), "HEADS": heads, **end.constants,
        },
        num_warps=tiles,
    )  # fmt: skip
