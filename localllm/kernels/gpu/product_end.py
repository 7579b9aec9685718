"""What comes after the sums of a matrix product on a GPU: scale, bias and residual; or the gate of an MLP, in codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes, code_place, coded, gated
from localllm.kernels.sizes import Glu


@dataclass(frozen=True)
class Gate:
    """The end of an MLP's first matrix, whose rows are those of the gate and then as many of the other half: codes for
    the second matrix, of what `glu` makes of both.

    glu: one with a gate. features: of the gate, a multiple of the 16 rows of a tile.
    """

    codes: Codes
    glu: Glu
    features: int


@dataclass(frozen=True)
class End:
    """What a kernel that ends a product is told of its result."""

    arguments: dict[str, Tensor | int | None]
    constants: dict[str, Any]

    @classmethod
    def of(cls, y: Tensor | Gate) -> End:
        if isinstance(y, Tensor):
            nothing = {"code_scale": None, "code_bias": None, "code_stride": 0, "features": 0}
            return cls({"y": y, "y_stride": y.stride(0), **nothing}, {"GROUP": 1, "CODE_BITS": 8, "GLU": None})
        codes = y.codes
        return cls(
            {
                "y": codes.q, "y_stride": codes.q.stride(0), "code_scale": codes.scale, "code_bias": codes.bias,
                "code_stride": codes.scale.stride(0), "features": y.features,
            },
            {"GROUP": codes.group, "CODE_BITS": codes.bits, "GLU": y.glu},
        )  # fmt: skip


@triton.jit
def tiles_of(program, features, tiles, TILES: tl.constexpr, GLU: tl.constexpr):
    """The first column of y that a program ends, and its tiles of W: of a gate, half of them, and as many of the other
    half, which begins `features` rows behind it. Beyond the last they are `tiles`."""
    if GLU is None:
        return program * TILES * 16, program * TILES + tl.arange(0, TILES)
    half: tl.constexpr = TILES // 2
    tile = program * half + tl.arange(0, TILES) % half
    tile = tl.where(tile * 16 < features, tile + tl.arange(0, TILES) // half * (features // 16), tiles)
    return program * half * 16, tile


@triton.jit
def finished(out, scale, linear_bias, n, is_n, ROW_SCALED: tl.constexpr):
    """The sums over all columns, scaled, with the matrix's bias. n: the rows of W, of a shape that out can be cut
    from. ROW_SCALED: by scales of rows, where groups have none."""
    base = tl.zeros(out.shape, tl.float32)
    if linear_bias is not None:
        base += tl.load(linear_bias + n, mask=is_n, other=0).to(tl.float32)
    if ROW_SCALED:
        own = tl.load(scale + n, mask=is_n, other=0)
        out = tl.fma(out, tl.broadcast_to(own, out.shape), base)
    else:
        out = out + base
    return out


@triton.jit
def store_finished(out, into, is_out, ADDS: tl.constexpr):
    if ADDS:
        out = out + tl.load(into, mask=is_out, other=0).to(tl.float32)
    tl.store(into, out.to(into.dtype.element_ty), mask=is_out)


@triton.jit
def store_gated(
    gate, up, m, first_column, is_m, features, padded, code_stride, y, code_scale, code_bias,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, GLU: tl.constexpr,
):  # fmt: skip
    """gate, up fp32 [ROWS, COLUMNS], of the rows m [ROWS] and the columns from first_column on. y: the codes, with so
    many columns in a row."""
    column = first_column + tl.arange(0, COLUMNS)
    values = tl.where((column < features)[None, :], gated(gate, up, GLU), 0.0)
    q, scale, bias = coded(tl.reshape(values, (ROWS * COLUMNS // GROUP, GROUP)))
    m = m.to(tl.int64)[:, None]
    group = first_column // GROUP + tl.arange(0, COLUMNS // GROUP)[None, :]
    at, is_group = group * code_stride + m, is_m[:, None] & (group < padded // GROUP)
    tl.store(code_scale + at, tl.reshape(scale, (ROWS, COLUMNS // GROUP)), mask=is_group)
    tl.store(code_bias + at, tl.reshape(bias, (ROWS, COLUMNS // GROUP)), mask=is_group)
    place = y + m * padded + code_place(column, GROUP, BITS)[None, :]
    tl.store(place, tl.reshape(q, (ROWS, COLUMNS)), mask=is_m[:, None] & (column < padded)[None, :])
