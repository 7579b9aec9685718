"""The input of a matrix, made in one launch from what came before: a norm, a gate, or nothing.

Into INT8 codes for the packed formats, as `reference.int8_activations` has them: symmetric, one scale for a row and a
group of columns. A NaN or an infinity makes its group's scale a NaN: nothing hides it. Or into bf16 for those, with the
sum of each group. Or into floats, for the other formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch

_BLOCK = 1024  # columns of a program where no norm asks for the whole row
_COLUMNS_A_WARP = 1024  # of a row that is normalised: 32 values a thread


@dataclass(frozen=True)
class Codes:
    """q int8 or bf16 [M, K]; scale and bias fp32 [M, K / G]: x = scale * q, and bias = scale * the sum of q, by which a
    weight's own bias is multiplied. bf16 has no scale."""

    q: Tensor
    scale: Tensor | None
    bias: Tensor

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.bias.shape[1]

    @property
    def bits(self) -> int:
        return 8 * self.q.itemsize

    @classmethod
    def empty(cls, rows: int, columns: int, group: int, device: torch.device, bits: int = 8) -> Codes:
        """columns: a multiple of the group. bits: 8 or 16."""
        groups, dtype = columns // group, torch.int8 if bits == 8 else torch.bfloat16
        return cls(
            torch.empty((rows, columns), dtype=dtype, device=device),
            torch.empty((rows, groups), device=device) if bits == 8 else None,
            torch.empty((rows, groups), device=device),
        )

    def first(self, rows: int) -> Codes:
        return Codes(self.q[:rows], None if self.scale is None else self.scale[:rows], self.bias[:rows])


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:
        # tanh(u) = 1 - 2 / (exp(2 u) + 1): exact at both ends, where exp is 0 or infinite
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = 0.5 * gate * (2 - 2 / (tl.exp(2 * u) + 1))
    return y


@triton.jit
def _prepared(x, weight, x_stride, features, columns, row, eps, KIND: tl.constexpr, ACTIVATION: tl.constexpr):
    """fp32 [BLOCK]: of one row; zeros from column `features` on."""
    is_there = columns < features
    values = tl.load(x + row * x_stride + columns, mask=is_there, other=0).to(tl.float32)
    if KIND == "norm":
        mean_square = tl.sum(values * values, axis=0) / features
        values = values * (1 / tl.sqrt(mean_square + eps))
        values = values * tl.load(weight + columns, mask=is_there, other=0)
    if KIND == "gated":
        up = tl.load(x + row * x_stride + features + columns, mask=is_there, other=0).to(tl.float32)
        values = _activated(values, ACTIVATION) * up
    return values


@triton.jit
def _to_codes(
    x, weight, q, x_scale, x_bias, x_stride, features, padded, eps,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    values = _prepared(x, weight, x_stride, features, columns, row, eps, KIND, ACTIVATION)
    values = tl.reshape(values, (BLOCK // GROUP, GROUP))
    groups = first // GROUP + tl.arange(0, BLOCK // GROUP)
    at = row * (padded // GROUP) + groups
    is_group = groups < padded // GROUP
    if x_scale is None:
        codes = values.to(q.dtype.element_ty)
        bias = tl.sum(codes.to(tl.float32), axis=1)
    else:
        peak = tl.max(tl.abs(values), axis=1)
        inverse = tl.where(peak < 1e-30, 0.0, 127 / tl.maximum(peak, 1e-30))
        # Adding 1.5 * 2^23 rounds to whole numbers, to the even one of two as near.
        codes = values * inverse[:, None] + 12582912.0 - 12582912.0
        not_a_number = tl.sum(values * 0.0, axis=1)  # 0 unless one of them is not finite; a maximum would not tell
        scale = tl.where(peak < 1e-30, 0.0, peak * (1.0 / 127)) + not_a_number
        tl.store(x_scale + at, scale, mask=is_group)
        bias = scale * tl.sum(codes, axis=1)
        codes = codes.to(tl.int8)
    tl.store(x_bias + at, bias, mask=is_group)
    tl.store(q + row * padded + columns, tl.reshape(codes, (BLOCK,)), mask=columns < padded)


@triton.jit
def _to_floats(
    x, weight, y, x_stride, y_stride, features, eps,
    BLOCK: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _prepared(x, weight, x_stride, features, columns, row, eps, KIND, ACTIVATION)
    into = y + row * y_stride + columns
    if ADDS:
        values += tl.load(into, mask=columns < features, other=0).to(tl.float32)
    tl.store(into, values.to(y.dtype.element_ty), mask=columns < features)


def _block(kind: str, features: int, least: int) -> int:
    """Columns of a program."""
    return max(least, triton.next_power_of_2(features) if kind == "norm" else _BLOCK)


def _kind(weight: Tensor | None, activation: str) -> str:
    return "norm" if weight is not None else "gated" if activation else "plain"


def to_codes(
    x: Tensor, codes: Codes, features: int, *, weight: Tensor | None = None, eps: float = 0.0, activation: str = ""
) -> KernelLaunch:
    """x [M, >= features] in rows of any stride. weight fp32 [features]: x / rms(x) * weight. activation ("silu",
    "gelu", "gelu_tanh"): activation(x[:, :features]) * x[:, features : 2 * features]. Columns beyond are zeros."""
    kind, padded = _kind(weight, activation), codes.q.shape[1]
    block = _block(kind, padded, codes.group)
    return KernelLaunch(
        _to_codes,
        (len(x), triton.cdiv(padded, block)),
        {
            "x": x, "weight": weight, "q": codes.q, "x_scale": codes.scale, "x_bias": codes.bias,
            "x_stride": x.stride(0), "features": features, "padded": padded, "eps": float(eps),
        },
        {"BLOCK": block, "GROUP": codes.group, "KIND": kind, "ACTIVATION": activation},
        num_warps=_num_warps(block),
    )  # fmt: skip


def to_floats(
    x: Tensor,
    y: Tensor,
    features: int,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    adds: bool = False,
) -> KernelLaunch:
    """Do as `to_codes`, into y [M, features] of any float type; adds: to what is there."""
    kind = _kind(weight, activation)
    block = _block(kind, features, 1)
    return KernelLaunch(
        _to_floats,
        (len(x), triton.cdiv(features, block)),
        {
            "x": x, "weight": weight, "y": y, "x_stride": x.stride(0),
            "y_stride": y.stride(0), "features": features, "eps": float(eps),
        },
        {"BLOCK": block, "KIND": kind, "ACTIVATION": activation, "ADDS": adds},
        num_warps=_num_warps(block),
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(16, max(1, block // _COLUMNS_A_WARP))
