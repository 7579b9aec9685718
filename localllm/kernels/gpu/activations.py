"""The input of a matrix, made in one launch from what came before: a norm, a gate, or nothing.

Into INT8 codes for the packed formats, as `reference.int8_activations` has them: symmetric, one scale for a row and a
group of columns. A NaN or an infinity makes its group's scale a NaN: nothing hides it. Or into floats, for the other
formats. Other kernels that end a row write its codes themselves, by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import Glu

_BLOCK = 1024  # columns of a program where no norm asks for the whole row
# Of more than a few rows, the tensor cores' kernel reads the scales of two side by side.
_FEW, _ALIGN = 4, 16
_COLUMNS_A_WARP = 1024  # of a row that is normalised: 32 values a thread


@dataclass(frozen=True)
class Codes:
    """q int8 [M, K]; scale and bias fp32 [K / G, M]: x = scale * q, and bias = scale * the sum of q, by which a
    weight's own bias is multiplied.

    bits: of the weights that they are multiplied with. For INT4 the columns of a group stand as those of a packed word
    do: four of each eight, which are low nibbles there, fill the first half of the group, the others the second.
    """

    q: Tensor
    scale: Tensor
    bias: Tensor
    bits: int

    @property
    def group(self) -> int:
        return self.q.shape[1] // len(self.scale)

    @classmethod
    def empty(cls, rows: int, columns: int, group: int, device: torch.device, bits: int = 4) -> Codes:
        """columns: a multiple of the group."""
        q = torch.empty((rows, columns), dtype=torch.int8, device=device)
        stride = rows if rows <= _FEW else -(-rows // _ALIGN) * _ALIGN
        scale, bias = torch.empty((2, columns // group, stride), device=device)[..., :rows]
        return cls(q, scale, bias, bits)

    @classmethod
    def of(cls, rows: int, matrix: PackedMatrix) -> Codes:
        """Return a buffer for the rows that this matrix is multiplied with."""
        return cls.empty(rows, matrix.in_features, matrix.group, matrix.qweight.device, matrix.bits)

    def first(self, rows: int) -> Codes:
        return Codes(self.q[:rows], self.scale[:, :rows], self.bias[:, :rows], self.bits)

    def in_order(self) -> Tensor:
        """Return the codes int8 [M, K] with column k of x at k."""
        if self.bits == 8:
            return self.q
        halves = self.q.view(len(self.q), -1, 2, self.group // 8, 4)
        return halves.transpose(2, 3).reshape(self.q.shape)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """A NaN stays one."""
    if ACTIVATION == "silu":
        y = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "quick_gelu":
        y = gate / (1 + tl.exp(-1.702 * gate))
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        positive = tl.where(gate < 0, 0.0, gate)
        y = positive * positive
    elif ACTIVATION == "sigmoid":
        y = 1 / (1 + tl.exp(-gate))
    elif ACTIVATION == "tanh":
        y = 1 - 2 / (tl.exp(2 * gate) + 1)
    else:
        # tanh(u) = 1 - 2 / (exp(2 u) + 1): exact at both ends, where exp is 0 or infinite
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = 0.5 * gate * (2 - 2 / (tl.exp(2 * u) + 1))
    return y


@triton.jit
def gated(gate, up, GLU: tl.constexpr):
    """`reference.gated`. A NaN stays one: no minimum would tell."""
    if GLU.limit is not None:
        limit: tl.constexpr = GLU.limit
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if GLU.up_offset != 0:
        up = up + GLU.up_offset
    activation: tl.constexpr = GLU.activation  # Triton 3.6 takes a bare text for a tensor
    return activated(gate, activation) * up


@triton.jit
def code_place(column, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Where the code of a column is in its row of `Codes`."""
    if BITS == 8:
        return column
    inside = column % GROUP
    return column - inside + inside // 4 % 2 * (GROUP // 2) + inside // 8 * 4 + inside % 4


@triton.jit
def coded(values):
    """fp32 [A, GROUP] -> codes int8 [A, GROUP], their scales and biases fp32 [A]. Maxima, and sums of whole numbers,
    are exact: no layout of threads changes a bit."""
    peak = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(peak < 1e-30, 0.0, 127 / tl.maximum(peak, 1e-30))
    # Adding 1.5 * 2^23 rounds to whole numbers, to the even one of two as near.
    codes = tl.fma(values, tl.broadcast_to(inverse[:, None], values.shape), 12582912.0) - 12582912.0
    not_a_number = tl.sum(values * 0.0, axis=1)  # 0 unless one of them is not finite; a maximum would not tell
    scale = tl.where(peak < 1e-30, 0.0, peak * (1.0 / 127)) + not_a_number
    return codes.to(tl.int8), scale, scale * tl.sum(codes, axis=1)


@triton.jit
def _prepared(x, weight, x_stride, features, columns, row, eps, KIND: tl.constexpr, GLU: tl.constexpr):
    """fp32 [BLOCK]: of one row; zeros from column `features` on."""
    is_there = columns < features
    values = tl.load(x + row * x_stride + columns, mask=is_there, other=0).to(tl.float32)
    if KIND == "norm":
        mean_square = tl.sum(values * values, axis=0) / features
        values = values * (1 / tl.sqrt(mean_square + eps))
        values = values * tl.load(weight + columns, mask=is_there, other=0)
    if KIND == "gated":
        if GLU.has_gate:
            up = tl.load(x + row * x_stride + features + columns, mask=is_there, other=0).to(tl.float32)
            values = gated(values, up, GLU)
        else:
            activation: tl.constexpr = GLU.activation
            values = tl.where(is_there, activated(values, activation), 0.0)  # of nothing, a sigmoid makes a half
    return values


@triton.jit
def code_row(
    x, weight, codes, code_scale, code_bias, x_stride, code_stride, features, padded, eps, first,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, GLU: tl.constexpr,
):  # fmt: skip
    """The columns from `first` on, of the row that is the program's."""
    row = tl.program_id(0).to(tl.int64)
    columns = first + tl.arange(0, BLOCK)
    values = _prepared(x, weight, x_stride, features, columns, row, eps, KIND, GLU)
    q, scale, bias = coded(tl.reshape(values, (BLOCK // GROUP, GROUP)))
    groups = first // GROUP + tl.arange(0, BLOCK // GROUP)
    at, is_group = groups * code_stride + row, groups < padded // GROUP
    tl.store(code_scale + at, scale, mask=is_group)
    tl.store(code_bias + at, bias, mask=is_group)
    tl.store(codes + row * padded + code_place(columns, GROUP, BITS), tl.reshape(q, (BLOCK,)), mask=columns < padded)


@triton.jit(do_not_specialize=["code_stride"])
def _to_codes(
    x, weight, codes, code_scale, code_bias, x_stride, code_stride, features, padded, eps,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, GLU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    code_row(
        x, weight, codes, code_scale, code_bias, x_stride, code_stride, features, padded, eps,
        tl.program_id(1) * BLOCK, BLOCK, GROUP, BITS, KIND, GLU,
    )  # fmt: skip


@triton.jit
def _to_floats(
    x, weight, y, x_stride, y_stride, features, eps,
    BLOCK: tl.constexpr, KIND: tl.constexpr, GLU: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _prepared(x, weight, x_stride, features, columns, row, eps, KIND, GLU)
    into = y + row * y_stride + columns
    if ADDS:
        values += tl.load(into, mask=columns < features, other=0).to(tl.float32)
    tl.store(into, values.to(y.dtype.element_ty), mask=columns < features)


def _block(kind: str, features: int, least: int) -> int:
    """Columns of a program."""
    return max(least, triton.next_power_of_2(features) if kind == "norm" else _BLOCK)


def _kind(weight: Tensor | None, glu: Glu | None) -> str:
    return "norm" if weight is not None else "plain" if glu is None else "gated"


def to_codes(
    x: Tensor, codes: Codes, features: int, *, weight: Tensor | None = None, eps: float = 0.0, glu: Glu | None = None
) -> KernelLaunch:
    """x [M, >= features] in rows of any stride. weight fp32 [features]: x / rms(x) * weight. glu: what
    `reference.gated` makes of x[:, : 2 * features], or of x[:, :features] without a gate. Columns beyond are zeros."""
    kind, padded = _kind(weight, glu), codes.q.shape[1]
    block = _block(kind, padded, codes.group)
    return KernelLaunch(
        _to_codes,
        (len(x), triton.cdiv(padded, block)),
        {
            "x": x, "weight": weight, "codes": codes.q, "code_scale": codes.scale, "code_bias": codes.bias,
            "x_stride": x.stride(0), "code_stride": codes.scale.stride(0), "features": features, "padded": padded,
            "eps": float(eps),
        },
        {"BLOCK": block, "GROUP": codes.group, "BITS": codes.bits, "KIND": kind, "GLU": glu},
        num_warps=_num_warps(block),
    )  # fmt: skip


def to_floats(
    x: Tensor,
    y: Tensor,
    features: int,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    glu: Glu | None = None,
    adds: bool = False,
) -> KernelLaunch:
    """Do as `to_codes`, into y [M, features] of any float type; adds: to what is there."""
    kind = _kind(weight, glu)
    block = _block(kind, features, 1)
    return KernelLaunch(
        _to_floats,
        (len(x), triton.cdiv(features, block)),
        {
            "x": x, "weight": weight, "y": y, "x_stride": x.stride(0),
            "y_stride": y.stride(0), "features": features, "eps": float(eps),
        },
        {"BLOCK": block, "KIND": kind, "GLU": glu, "ADDS": adds},
        num_warps=_num_warps(block),
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(16, max(1, block // _COLUMNS_A_WARP))
