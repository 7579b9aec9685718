"""y = x @ W.T on a GPU for 1 to 64 rows: packed weights times activations in INT8 or bf16 on the tensor cores.

The weights are the left operand, 16 rows of W being what a tile of theirs and a tensor core both have; a group's codes
are multiplied as they are, exactly, and what comes of it is scaled and added in `gemv`'s order, slice by slice. The
columns may be shared out over programs, each with a run of slices; a second launch adds their sums up in that order.

INT8 activations give `gemv`'s bits. Those in bf16, which that does not know, are multiplied exactly; a group's sum is
then of floats, in the order of the tensor cores: the same for any row of up to 16, which is one program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.gemv import finished
from localllm.kernels.gpu.launch import KernelLaunch, is_interpreted
from localllm.kernels.gpu.levels import nibble, signed_byte
from localllm.kernels.tile16 import TILE, PackedMatrix

MOST_ROWS = 64
_REDUCED = 256  # columns of a program of the second launch


@dataclass(frozen=True)
class ProgramShape:
    """The rows of W that a program takes. parts: over which the slices are shared out, a power of two."""

    weight_rows: int = 32
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _weight_codes(
    qweight, first_tile, group, tiles, groups, TILES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr
):
    """int8 [TILES * 16, columns of the group]. qweight: as bytes, of no sign where BITS are 4."""
    tile, byte = first_tile + tl.arange(0, TILES), tl.arange(0, WORDS * 64)
    at = (tile[:, None].to(tl.int64) * groups + group) * (WORDS * 64) + byte[None, :]
    codes = tl.load(qweight + at, mask=(tile < tiles)[:, None] & (group < groups), other=0)
    codes = tl.reshape(codes, (TILES, WORDS, 16, 4))
    if BITS == 4:
        both = tl.join(codes & 15, codes >> 4)  # [TILES, WORDS, 16, 4, 2]
        codes = tl.reshape(tl.permute(both, (0, 2, 1, 4, 3)), (TILES * 16, WORDS * 8))
    else:
        codes = tl.reshape(tl.permute(codes, (0, 2, 1, 3)), (TILES * 16, WORDS * 4))
    return codes.to(tl.int8)


@triton.jit
def _floats(codes, BITS: tl.constexpr, OPERAND: tl.constexpr):
    codes = codes.to(tl.int16)
    return nibble(codes, 0, OPERAND) if BITS == 4 else signed_byte(codes, OPERAND)


@triton.jit(do_not_specialize=["rows", "groups", "tiles", "out_features"])
def _gemm(
    qweight, scale, bias, linear_bias, q, x_scale, x_bias, y, rows, groups, tiles, out_features, y_stride, part_stride,
    TILES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SLICES: tl.constexpr, OWN_DEPTH: tl.constexpr, ADDS: tl.constexpr, IS_PART: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """OPERAND: int8 where the activations are; else they have no scale. A part has 2^OWN_DEPTH slices. IS_PART: y is
    fp32 [parts, rows, ...], of sums that are not yet finished."""
    first_tile, part = tl.program_id(0) * TILES, tl.program_id(1)
    n = first_tile * 16 + tl.arange(0, TILES * 16)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUP)
    steps = (groups + SLICES - 1) // SLICES  # groups of a slice
    in_tile = (n // 16).to(tl.int64) * groups * 16 + n % 16
    is_n, is_m = n < tiles * 16, m < rows
    total = tl.zeros((TILES * 16, ROWS), tl.float32)
    waiting = (total,) * (OWN_DEPTH + 1)  # sums of 1, 2, 4, ... slices, until their neighbours are summed
    for t in range(steps << OWN_DEPTH):
        index, step = t // steps, t % steps
        group = step * SLICES + (part << OWN_DEPTH) + index
        is_there = group < groups
        codes = _weight_codes(qweight, first_tile, group, tiles, groups, TILES, WORDS, BITS)
        x_at = m[None, :].to(tl.int64) * (groups * GROUP) + group * GROUP + column[:, None]
        x = tl.load(q + x_at, mask=is_m[None, :] & is_there, other=0)
        if OPERAND == tl.int8:
            part_sum = tl.dot(codes, x, out_dtype=tl.int32).to(tl.float32)
        else:
            part_sum = tl.dot(_floats(codes, BITS, OPERAND), x.to(OPERAND), out_dtype=tl.float32)
        total = tl.where(step == 0, 0.0, total)
        if BITS == 4:
            own = tl.load(scale + in_tile + group * 16, mask=is_n & is_there, other=0).to(tl.float32)
            part_sum = part_sum * own[:, None]
        if x_scale is None:
            total = total + part_sum
        else:
            by = tl.load(x_scale + m * groups + group, mask=is_m & is_there, other=0)[None, :]
            total = tl.fma(tl.broadcast_to(by, (TILES * 16, ROWS)), part_sum, total)
        if BITS == 4:
            own = tl.load(bias + in_tile + group * 16, mask=is_n & is_there, other=0).to(tl.float32)[:, None]
            offset = tl.load(x_bias + m * groups + group, mask=is_m & is_there, other=0)[None, :]
            offset = tl.broadcast_to(offset, (TILES * 16, ROWS))
            total = tl.fma(offset, tl.broadcast_to(own, (TILES * 16, ROWS)), total)
        if step == steps - 1:
            waiting = _waiting_with(waiting, total, index, OWN_DEPTH)
    out = waiting[OWN_DEPTH]
    into = y + m[None, :].to(tl.int64) * y_stride + n[:, None]
    is_out = (n < out_features)[:, None] & is_m[None, :]
    if IS_PART:
        tl.store(into + part.to(tl.int64) * part_stride, out, mask=is_out)
    else:
        at, is_own = n[:, None], (n < out_features)[:, None]
        out = finished(out, scale, linear_bias, at, into, is_own, is_out, BITS, ADDS)
        tl.store(into, out.to(y.dtype.element_ty), mask=is_out)


@triton.jit
def _waiting_with(waiting, total, index, DEPTH: tl.constexpr):
    """A slice's sum is added to its left neighbour's, that pair's to the pair's on its left, and so on: as a binary
    counter carries. What has no neighbour yet waits."""
    carries = index >= 0
    for level in tl.static_range(DEPTH):
        is_right = ((index >> level) & 1) == 1
        left = waiting[level]
        waiting = waiting[:level] + (tl.where(carries & (is_right == 0), total, left),) + waiting[level + 1 :]
        total = tl.where(carries & is_right, left + total, total)
        carries = carries & is_right
    return waiting[:DEPTH] + (tl.where(carries, total, waiting[DEPTH]),)


@triton.jit
def _parts_added(
    partial, scale, linear_bias, y, out_features, y_stride, row_stride, part_stride,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_out = n < out_features
    parts = (tl.zeros((BLOCK,), tl.float32),) * PARTS
    for p in tl.static_range(PARTS):
        part = tl.load(partial + p * part_stride + row * row_stride + n, mask=is_out, other=0)
        parts = parts[:p] + (part,) + parts[p + 1 :]
    for level in tl.static_range(DEPTH):
        for p in tl.static_range(PARTS >> (level + 1)):
            parts = parts[:p] + (parts[2 * p] + parts[2 * p + 1],) + parts[p + 1 :]
    into = y + row * y_stride + n
    out = finished(parts[0], scale, linear_bias, n, into, is_out, is_out, BITS, ADDS)
    tl.store(into, out.to(y.dtype.element_ty), mask=is_out)


def gemm(
    x: Codes,
    matrix: PackedMatrix,
    y: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    adds: bool = False,
    shape: ProgramShape = ProgramShape(),
    partial: Tensor | None = None,
) -> list[KernelLaunch]:
    """Do as `gemv`, for up to MOST_ROWS rows. partial: fp32 [parts, >= M, >= out_features], where there are parts."""
    rows, parts = len(x.q), shape.parts
    each = max(16, triton.next_power_of_2(rows))
    is_part = parts > 1
    into = partial if is_part else y
    assert into is not None, "parts need room for their sums"
    assert parts <= matrix.slices, "a part has a slice at least"
    finishing: dict[str, Tensor | int | None] = {
        "scale": matrix.scale, "linear_bias": bias, "out_features": out_features,
    }  # fmt: skip
    constants = {"BITS": matrix.bits, "ADDS": adds}
    product = KernelLaunch(
        _gemm,
        (triton.cdiv(matrix.tiles * TILE, shape.weight_rows), parts, triton.cdiv(rows, each)),
        {
            **finishing, "qweight": matrix.qweight.view(torch.uint8 if matrix.bits == 4 else torch.int8),
            "bias": matrix.bias, "q": x.q, "x_scale": x.scale, "x_bias": x.bias, "y": into, "rows": rows,
            "groups": matrix.groups, "tiles": matrix.tiles, "y_stride": into.stride(-2), "part_stride": into.stride(0),
        },
        {
            **constants, "TILES": shape.weight_rows // TILE, "ROWS": each, "WORDS": matrix.words,
            "GROUP": matrix.group, "SLICES": matrix.slices, "OWN_DEPTH": (matrix.slices // parts).bit_length() - 1,
            "IS_PART": is_part,
            "OPERAND": tl.float32 if is_interpreted() else tl.int8 if x.bits == 8 else tl.bfloat16,
        },
        shape.num_warps,
        shape.num_stages,
    )  # fmt: skip
    if not is_part:
        return [product]
    assert partial is not None
    block = min(_REDUCED, triton.next_power_of_2(out_features))
    added = KernelLaunch(
        _parts_added,
        (rows, triton.cdiv(out_features, block)),
        {
            **finishing, "partial": partial, "y": y, "y_stride": y.stride(0), "row_stride": partial.stride(1),
            "part_stride": partial.stride(0),
        },
        {**constants, "PARTS": parts, "DEPTH": parts.bit_length() - 1, "BLOCK": block},
    )  # fmt: skip
    return [product, added]
