"""Mamba by torch's operators: the reference, and what computes it where no kernel does.

Mamba (arXiv:2312.00752): x passes a short convolution and SiLU. Of that are made a token's B and C [state_size], which
all features share, and each feature's step dt = softplus(steps + dt_bias). A feature's state h [state_size] forgets by
exp(-exp(A_log) dt) and takes in B dt x; y = h . C + D x.

`recurrence` says how a state stays right where tokens are taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import StateRows
from localllm.kernels.recurrence import convolution, raw_rows, walk
from localllm.kernels.state_shapes import MambaShape


@dataclass(frozen=True, eq=False)
class ScanWeights:
    """fp32: conv [conv_width, features], the last tap for the token itself; conv_bias, dt_bias, d [features]; rates
    [state_size, features]: -exp(A_log)."""

    conv: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    d: Tensor
    rates: Tensor


def convolved(rows: StateRows[MambaShape], weights: ScanWeights) -> Tensor:
    """Return what B, C and steps are made of, fp32 [T, features], of a sequence's tokens. Its state stays as it is.

    rows.raw: what goes into the convolution.
    """
    shape, past = rows.state.shape, rows.past
    before = rows.state.rows(past - shape.conv_width + 1, past)[:, : shape.features]
    return _convolved(torch.cat((before, rows.raw.float())), weights)


def scan(rows: StateRows[MambaShape], c: Tensor, weights: ScanWeights) -> Tensor:
    """Return y, fp32 [T, features], of a sequence's tokens, and bring its state up to date.

    rows.raw: what goes into the convolution, the steps, and B. c: fp32 [T, state_size].
    """
    shape, raw = rows.state.shape, raw_rows(rows)
    heads, (states, columns) = shape.heads, shape.matrix_dims
    x = _convolved(raw, weights).view(-1, heads, columns)
    steps, b = raw[shape.conv_width - 1 :, shape.features :].tensor_split([shape.features], dim=1)
    rates, first = weights.rates.view(states, heads, columns).transpose(0, 1), len(x) - len(c)
    d = weights.d.view(heads, columns)

    def take_in(h: Tensor, i: int) -> Tensor:
        step = functional.softplus(steps[i] + weights.dt_bias).view(heads, columns)
        return h * (step[:, None] * rates).exp() + b[i][:, None] * (step * x[i])[:, None]

    def read(h: Tensor, i: int) -> Tensor:
        return (h * c[i - first][:, None]).sum(1) + d * x[i]

    return walk(rows, raw, take_in, read).flatten(1)


def _convolved(raw: Tensor, weights: ScanWeights) -> Tensor:
    """raw [conv_width - 1 + T, features and more] -> [T, features]"""
    return functional.silu(convolution(raw, weights.conv, weights.conv_bias)).float()
