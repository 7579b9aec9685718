"""y = x @ W.T on a GPU for any number of rows: packed weights times activations in INT8 on the tensor cores.

The weights are the left operand, 16 rows of W being what a tile of theirs and a tensor core both have. A group's codes
are multiplied as they are, exactly, and what comes of it is scaled and added in `gemv`'s order, slice by slice: a row
has the bits that `gemv` gives it. The columns may be shared out over programs, each with a run of slices; a second
launch adds the slices' sums up in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
from localllm.kernels.gpu.product_end import End, Gate, finished, store_finished, store_gated, tiles_of
from localllm.kernels.gpu.weight_codes import byte_scale, nibble_bytes, words_of
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE

LEAST_COLUMNS = tl.constexpr(32)  # that a tensor core multiplies
MAGIC_BITS = tl.constexpr(0x4B400000)  # of 1.5 * 2^23: with a whole number below 2^22 added, those of their sum
_REDUCED = 256  # columns of a program of the second launch


@dataclass(frozen=True)
class ProgramShape:
    """What a program has of W and of x. parts: over which the slices are shared out, a power of two."""

    weight_rows: int = 64
    rows: int = 16
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _matrix_rows(words, TILES: tl.constexpr, WORDS: tl.constexpr, OPERAND: tl.constexpr):
    """[TILES, WORDS * 64], as they are in a tile -> [TILES * 16, WORDS * 4]."""
    words = tl.permute(tl.reshape(words, (TILES, WORDS, 16, 4)), (0, 2, 1, 3))
    return tl.reshape(words, (TILES * 16, WORDS * 4)).to(OPERAND)


@triton.jit
def _x_codes(at, m, row_codes, is_m, first, COLUMNS: tl.constexpr, OPERAND: tl.constexpr):
    """[COLUMNS, rows], from the column `first` on; zeros beyond those, as many as a tensor core takes."""
    LEAST: tl.constexpr = LEAST_COLUMNS
    column = tl.arange(0, max(COLUMNS, LEAST))[:, None]
    if COLUMNS < LEAST:
        is_m = is_m & (column < COLUMNS)
    place = m.to(tl.int64)[None, :] * row_codes + first + column
    return tl.load(at + place, mask=is_m, other=0).to(OPERAND)


@triton.jit
def _beside(left, right, COLUMNS: tl.constexpr):
    """Two of [rows, COLUMNS / 2], as one."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], COLUMNS))


@triton.jit
def _group_dot(
    qweight, q, tile, m, is_tile, is_m, group, groups,
    TILES: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, OPERAND: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """[TILES * 16, ROWS]: the sums of a group's products, whole numbers; where groups have scales, as the bits of
    1.5 * 2^23 and them: of 128 products of bytes they are below 2^21."""
    WORDS: tl.constexpr = words_of(FORM)
    columns: tl.constexpr = FORM.columns
    half: tl.constexpr = FORM.columns // 2
    sums_type: tl.constexpr = tl.int32 if OPERAND == tl.int8 else tl.float32
    start: tl.constexpr = MAGIC_BITS if OPERAND == tl.int8 and FORM.group is not None else 0
    byte = tl.arange(0, WORDS * 64)
    at = (tile.to(tl.int64) * groups + group)[:, None] * (WORDS * 64) + byte[None, :]
    packed = tl.load(qweight + at, mask=is_tile[:, None], other=0)
    first, row_codes = group * columns, HEADS * groups * columns
    dot = tl.full((TILES * 16, ROWS), start, sums_type)
    if FORM.bits == 8:
        whole = _matrix_rows(packed, TILES, WORDS, OPERAND)
    else:
        low, high = nibble_bytes(packed, FORM, OPERAND == tl.int8)
        low, high = _matrix_rows(low, TILES, WORDS, OPERAND), _matrix_rows(high, TILES, WORDS, OPERAND)
    if FORM.bits == 4 and half >= LEAST_COLUMNS:
        dot = tl.dot(low, _x_codes(q, m, row_codes, is_m, first, half, OPERAND), dot, out_dtype=sums_type)
        dot = tl.dot(high, _x_codes(q, m, row_codes, is_m, first + half, half, OPERAND), dot, out_dtype=sums_type)
    else:
        if FORM.bits == 4:
            whole = _beside(low, high, columns)
        if columns < LEAST_COLUMNS:
            whole = _beside(whole, whole, LEAST_COLUMNS)  # the second half is multiplied by zeros
        dot = tl.dot(whole, _x_codes(q, m, row_codes, is_m, first, columns, OPERAND), dot, out_dtype=sums_type)
    if OPERAND == tl.int8:
        dot = dot.to(tl.float32, bitcast=FORM.group is not None)
    return dot


@triton.jit
def _cleared(total, OPERAND: tl.constexpr):
    """Zeros, which the compiler does not know for constants: it would choose between them and the total in every step,
    an instruction for each number, instead of branching."""
    if OPERAND == tl.int8:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r,r", [total], dtype=tl.float32, is_pure=False, pack=1
        )  # fmt: skip
    return tl.zeros_like(total)


@triton.jit
def _scaled(dot, own, OPERAND: tl.constexpr):
    """The sums of a group times a row's scale, rounded once: of a scale's eleven bits, 1.5 * 2^23 times it is exact."""
    own = tl.broadcast_to(own, dot.shape)
    if OPERAND == tl.int8:
        return tl.fma(dot, own, own * -12582912.0)
    return dot * own


@triton.jit
def slice_sums(
    qweight, scale, bias, q, x_scale, x_bias, into, tile, n, m, is_m, is_out, tiles, groups, x_stride, part_stride,
    part, TILES: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, OWN: tl.constexpr,
    OPERAND: tl.constexpr, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """fp32 [TILES * 16, ROWS], of the rows n of W and m of x: the sums of all slices; or, where OWN are fewer, each of
    those of a part goes to `into`. Beyond is_m there may be any rows. FORM: the `Weights`.
    HEADS: that share a row of x, which q and the scales' pointers begin in."""
    in_tile = (n // 16).to(tl.int64) * groups * 16 + n % 16
    is_tile, is_n = tile < tiles, n < tiles * 16
    steps = (groups + SLICES - 1) // SLICES  # groups of a slice
    total, sums = tl.zeros((TILES * 16, ROWS), tl.float32), tl.zeros((TILES * 16, ROWS), tl.float32)
    for t in range(steps * OWN):
        own_slice, step = part * OWN + t // steps, t % steps
        group = step * SLICES + own_slice
        is_there = group < groups
        own_n, own_m = is_n & is_there, (is_m & is_there)[None, :]
        has_scale = ((m < x_stride) & is_there)[None, :]  # those of rows that are not there are, and may be anything
        # Scales are asked for before the products, which take as long as the way from the second cache.
        x_at, in_group = group * x_stride + m[None, :], in_tile + group * 16
        by = tl.broadcast_to(tl.load(x_scale + x_at, mask=has_scale, other=0), total.shape)
        if FORM.group is not None:
            own = byte_scale(tl.load(scale + in_group, mask=own_n, other=0), FORM)[:, None]
        if FORM.has_bias:
            offset = tl.broadcast_to(tl.load(x_bias + x_at, mask=has_scale, other=0), total.shape)
            own_bias = tl.load(bias + in_group, mask=own_n, other=0).to(tl.float32)[:, None]
        dot = _group_dot(
            qweight, q, tile, m, is_tile & is_there, own_m, group, groups, TILES, ROWS, FORM, OPERAND, HEADS
        )
        if FORM.group is not None:
            dot = _scaled(dot, own, OPERAND)
        total = tl.fma(by, dot, total)
        if FORM.has_bias:
            total = tl.fma(offset, tl.broadcast_to(own_bias, total.shape), total)
        if step == steps - 1:
            if OWN < SLICES:
                tl.store(into + own_slice.to(tl.int64) * part_stride, total, mask=is_out)
            else:
                sums = sums + total
            total = _cleared(total, OPERAND)
    return sums


@triton.jit
def rows_of(tile, TILES: tl.constexpr):
    """The rows of W of these tiles, [TILES * 16]."""
    return tl.reshape(tile[:, None] * 16 + tl.arange(0, 16)[None, :], (TILES * 16,))


@triton.jit
def store_halves(
    out, m, is_m, column, features, y_stride, code_stride, y, code_scale, code_bias,
    TILES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, CODE_BITS: tl.constexpr, GLU: tl.constexpr,
):  # fmt: skip
    """out [TILES * 16, ROWS], whose first half is a gate, from `column` on."""
    gate, up = tl.split(tl.permute(tl.reshape(out, (2, TILES * 8, ROWS)), (2, 1, 0)))
    store_gated(
        gate, up, m, column, is_m, features, y_stride, code_stride, y, code_scale, code_bias,
        TILES * 8, ROWS, GROUP, CODE_BITS, GLU,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "groups", "tiles", "out_features", "features", "code_stride"])
def _gemm(
    qweight, scale, bias, linear_bias, q, x_scale, x_bias, y, code_scale, code_bias,
    rows, groups, tiles, out_features, features, x_stride, y_stride, part_stride, code_stride,
    TILES: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, OWN: tl.constexpr,
    ADDS: tl.constexpr, GROUP: tl.constexpr, CODE_BITS: tl.constexpr, GLU: tl.constexpr, OPERAND: tl.constexpr,
    HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """OWN: slices of a program; where those are not all, y is fp32 [SLICES, rows, ...], of sums that are not yet
    finished. GLU: of a gate of so many features, whose codes go to y; half of the tiles are the gate's then.
    HEADS: see `product.by_head`."""
    after_previous(OVERLAPS)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, tile = tiles_of(tl.program_id(1), features, tiles, TILES, GLU)
    n, is_m = rows_of(tile, TILES), m < rows
    into = y + m[None, :].to(tl.int64) * y_stride + n[:, None]
    is_out = (n < out_features)[:, None] & is_m[None, :]
    if HEADS > 1:
        before = tl.program_id(1) * TILES // (tiles // HEADS) * groups
        q, x_scale, x_bias = q + before * FORM.columns, x_scale + before * x_stride, x_bias + before * x_stride
    sums = slice_sums(
        qweight, scale, bias, q, x_scale, x_bias, into, tile, n, m, is_m, is_out, tiles, groups, x_stride, part_stride,
        tl.program_id(2), TILES, ROWS, FORM, SLICES, OWN, OPERAND, HEADS,
    )  # fmt: skip
    if OWN == SLICES:
        at = n[:, None]
        out = finished(sums, scale, linear_bias, at, at < out_features, FORM.group is None)
        if GLU is not None:
            store_halves(
                out, m, is_m, column, features, y_stride, code_stride, y, code_scale, code_bias,
                TILES, ROWS, GROUP, CODE_BITS, GLU,
            )  # fmt: skip
        else:
            store_finished(out, into, is_out, ADDS)


@triton.jit
def _slices_added(partial, scale, linear_bias, n, is_n, part_stride, SLICES: tl.constexpr, ROW_SCALED: tl.constexpr):
    """fp32 [1, columns], of the sums at `partial`."""
    out = tl.zeros(n.shape, tl.float32)
    for p in tl.static_range(SLICES):
        out = out + tl.load(partial + p * part_stride + n, mask=is_n, other=0)
    return finished(out, scale, linear_bias, n, is_n, ROW_SCALED)


@triton.jit(do_not_specialize=["out_features", "features", "code_stride"])
def _parts_added(
    partial, scale, linear_bias, y, code_scale, code_bias, out_features, features, y_stride, row_stride, part_stride,
    code_stride,
    SLICES: tl.constexpr, BLOCK: tl.constexpr, ROW_SCALED: tl.constexpr, ADDS: tl.constexpr,
    GROUP: tl.constexpr, CODE_BITS: tl.constexpr, GLU: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    n = first + tl.arange(0, BLOCK)[None, :]
    partial += row * row_stride
    if GLU is not None:
        gate = _slices_added(partial, scale, linear_bias, n, n < features, part_stride, SLICES, ROW_SCALED)
        up = _slices_added(partial, scale, linear_bias, features + n, n < features, part_stride, SLICES, ROW_SCALED)
        m = tl.program_id(0) + tl.arange(0, 1)
        store_gated(
            gate, up, m, first, m >= 0, features, y_stride, code_stride, y, code_scale, code_bias,
            BLOCK, 1, GROUP, CODE_BITS, GLU,
        )  # fmt: skip
    else:
        into, is_out = y + row * y_stride + n, n < out_features
        out = _slices_added(partial, scale, linear_bias, n, is_out, part_stride, SLICES, ROW_SCALED)
        store_finished(out, into, is_out, ADDS)


def gemm(
    x: Codes,
    matrix: PackedMatrix,
    y: Tensor | Gate,
    out_features: int,
    bias: Tensor | None = None,
    *,
    adds: bool = False,
    shape: ProgramShape = ProgramShape(),
    partial: Tensor | None = None,
    heads: int = 1,
) -> list[KernelLaunch]:
    """Do as `gemv`, for any number of rows. partial: fp32 [slices, >= M, >= out_features], where there are parts."""
    if shape.parts == 1:
        return [_product(x, matrix, y, out_features, bias, shape, adds=adds, heads=heads)]
    assert partial is not None, "parts need room for their sums"
    assert shape.parts <= matrix.slices, "a part has a slice at least"
    sums = _product(x, matrix, partial[0], out_features, None, shape, part_stride=partial.stride(0), heads=heads)
    return [sums, _added(partial, len(x.q), matrix, y, out_features, bias, adds=adds)]


def _product(
    x: Codes, matrix: PackedMatrix, y: Tensor | Gate, out_features: int, bias: Tensor | None, shape: ProgramShape, *,
    adds: bool = False, part_stride: int = 0, heads: int = 1,
) -> KernelLaunch:  # fmt: skip
    end, rows, programs = End.of(y), len(x.q), triton.cdiv(matrix.tiles * TILE, shape.weight_rows)
    if isinstance(y, Gate):
        programs = triton.cdiv(2 * y.features, shape.weight_rows)
    return KernelLaunch(
        _gemm,
        (triton.cdiv(rows, shape.rows), programs, shape.parts),
        {
            "qweight": matrix.qweight.view(torch.uint8 if matrix.bits == 4 else torch.int8), "scale": matrix.scale,
            "bias": matrix.bias, "linear_bias": bias, "q": x.q, "x_scale": x.scale, "x_bias": x.bias,
            "x_stride": x.scale.stride(0), "rows": rows, "groups": matrix.groups, "tiles": matrix.tiles,
            "out_features": out_features, "part_stride": part_stride, **end.arguments,
        },
        {
            "TILES": shape.weight_rows // TILE, "ROWS": shape.rows, "FORM": matrix.weights, "SLICES": matrix.slices,
            "OWN": matrix.slices // shape.parts, "ADDS": adds, **end.constants,
            "OPERAND": tl.float32 if is_interpreted() else tl.int8, "HEADS": heads,
        },
        shape.num_warps,
        shape.num_stages,
    )  # fmt: skip


def _added(
    partial: Tensor, rows: int, matrix: PackedMatrix, y: Tensor | Gate, out_features: int, bias: Tensor | None, *,
    adds: bool,
) -> KernelLaunch:  # fmt: skip
    """The sums of the slices in `partial`, finished as y."""
    end, columns = End.of(y), y.codes.q.shape[1] if isinstance(y, Gate) else out_features
    block = max(min(_REDUCED, triton.next_power_of_2(columns)), end.constants["GROUP"])
    return KernelLaunch(
        _parts_added,
        (rows, triton.cdiv(columns, block)),
        {
            "partial": partial, "scale": matrix.scale, "linear_bias": bias, "out_features": out_features,
            "row_stride": partial.stride(1), "part_stride": partial.stride(0), **end.arguments,
        },
        {
            "BLOCK": block, "ROW_SCALED": matrix.weights.group is None, "SLICES": matrix.slices, "ADDS": adds,
            **end.constants,
        },
    )  # fmt: skip
