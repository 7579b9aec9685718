"""y = x @ W.T on a GPU for few rows: packed weights times INT8 activations by 8-bit dot products (dp4a).

A program has a tile of 16 rows of W. Its threads stand as SLICES x 16: slice s has the groups s, s + SLICES, ... of the
columns, four rows of W a thread, so that a group's sum of integers never leaves its thread, and each thread has all
words of a group on their way at once. The slices are added up pairwise at the end.

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
from localllm.kernels.gpu.launch import KernelLaunch, is_interpreted
from localllm.kernels.tile16 import PackedMatrix

MOST_ROWS = 4  # of a program; more are further programs, for which the weights are in the second cache


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
def _added_up(slices, SLICES: tl.constexpr, DEPTH: tl.constexpr):
    """fp32 [16] of [SLICES, 16], SLICES = 2^DEPTH: neighbours first, in an order that no layout of threads changes."""
    for level in tl.static_range(DEPTH):
        pairs = tl.reshape(slices, (SLICES >> (level + 1), 2, 16))
        even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
        slices = even + odd
    return tl.reshape(slices, (16,))


@triton.jit
def finished(out, scale, linear_bias, n, into, is_n, is_out, BITS: tl.constexpr, ADDS: tl.constexpr):
    """The sums over all columns, with what comes after them. n: the rows of W."""
    base = tl.zeros(out.shape, tl.float32)
    if linear_bias is not None:
        base += tl.load(linear_bias + n, mask=is_n, other=0).to(tl.float32)
    if BITS == 8:
        own = tl.load(scale + n, mask=is_n, other=0)
        out = tl.fma(out, tl.broadcast_to(own, out.shape), base)
    else:
        out = out + base
    if ADDS:
        out = out + tl.load(into, mask=is_out, other=0).to(tl.float32)
    return out


@triton.jit(do_not_specialize=["rows", "groups", "out_features"])
def _gemv(
    qweight, scale, bias, linear_bias, q, x_scale, x_bias, y, rows, groups, out_features, y_stride,
    ROWS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    ADDS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """q: the codes as words of four, [rows, groups * 64 / 4]. ROWS: from program_id(0) * ROWS on."""
    first, tile = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    lanes, slices = tl.arange(0, 16), tl.arange(0, SLICES)
    x_words: tl.constexpr = WORDS * (8 // BITS)  # words of a group's codes
    totals = (tl.zeros((SLICES, 16), tl.float32),) * ROWS
    for begin in range(0, groups, SLICES):
        group = begin + slices
        is_there = group < groups
        weights = qweight + (tile * groups + group[:, None]) * (WORDS * 16) + lanes[None, :]
        dots = (tl.zeros((SLICES, 16), tl.int32),) * ROWS
        for j in tl.static_range(WORDS):
            w = tl.load(weights + j * 16, mask=is_there[:, None], other=0)
            for r in tl.static_range(ROWS):
                x = q + (first + r).to(tl.int64) * groups * x_words + group * x_words
                is_row = is_there & (first + r < rows)
                if BITS == 4:
                    low = tl.load(x + 2 * j, mask=is_row, other=0)[:, None]
                    high = tl.load(x + 2 * j + 1, mask=is_row, other=0)[:, None]
                    dot = _dot4(w & 0x0F0F0F0F, tl.broadcast_to(low, (SLICES, 16)), dots[r], False, ASM)
                    dot = _dot4((w >> 4) & 0x0F0F0F0F, tl.broadcast_to(high, (SLICES, 16)), dot, False, ASM)
                else:
                    codes = tl.load(x + j, mask=is_row, other=0)[:, None]
                    dot = _dot4(w, tl.broadcast_to(codes, (SLICES, 16)), dots[r], True, ASM)
                dots = dots[:r] + (dot,) + dots[r + 1 :]
        at = (tile * groups + group[:, None]) * 16 + lanes[None, :]
        for r in tl.static_range(ROWS):
            x_at = (first + r) * groups + group
            is_row = is_there & (first + r < rows)
            by = tl.load(x_scale + x_at, mask=is_row, other=0)[:, None]
            part = dots[r].to(tl.float32)
            if BITS == 4:
                part = part * tl.load(scale + at, mask=is_there[:, None], other=0).to(tl.float32)
            total = tl.fma(tl.broadcast_to(by, (SLICES, 16)), part, totals[r])
            if BITS == 4:
                offset = tl.load(x_bias + x_at, mask=is_row, other=0)[:, None]
                own = tl.load(bias + at, mask=is_there[:, None], other=0).to(tl.float32)
                total = tl.fma(tl.broadcast_to(offset, (SLICES, 16)), own, total)
            totals = totals[:r] + (total,) + totals[r + 1 :]
    n = tile * 16 + lanes
    for r in tl.static_range(ROWS):
        is_out = (n < out_features) & (first + r < rows)
        into = y + (first + r).to(tl.int64) * y_stride + n
        out = _added_up(totals[r], SLICES, DEPTH)
        out = finished(out, scale, linear_bias, n, into, n < out_features, is_out, BITS, ADDS)
        tl.store(into, out.to(y.dtype.element_ty), mask=is_out)


def gemv(
    x: Codes, matrix: PackedMatrix, y: Tensor, out_features: int, bias: Tensor | None = None, *, adds: bool = False
) -> KernelLaunch:
    """x: of M rows, in INT8 codes in the matrix's groups. y [M, >= out_features] of any float type, in rows of any
    stride; bias fp32 [out_features]; adds: to what is in y."""
    rows = len(x.q)
    assert x.scale is not None
    each = min(MOST_ROWS, triton.next_power_of_2(rows))
    return KernelLaunch(
        _gemv,
        (triton.cdiv(rows, each), matrix.tiles),
        {
            "qweight": matrix.qweight if matrix.bits == 4 else matrix.qweight.view(torch.int32).squeeze(-1),
            "scale": matrix.scale, "bias": matrix.bias, "linear_bias": bias, "q": x.q.view(torch.int32),
            "x_scale": x.scale, "x_bias": x.bias, "y": y, "rows": rows, "groups": matrix.groups,
            "out_features": out_features, "y_stride": y.stride(0),
        },
        {
            "ROWS": each, "WORDS": matrix.words, "BITS": matrix.bits, "SLICES": matrix.slices,
            "DEPTH": matrix.slices.bit_length() - 1, "ADDS": adds, "ASM": not is_interpreted(),
        },
        num_warps=max(1, matrix.slices // 8),
    )  # fmt: skip
