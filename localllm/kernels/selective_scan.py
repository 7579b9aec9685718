"""Mamba by torch's operators: the reference, and what computes it where no kernel does.

Mamba (arXiv:2312.00752): x passes a short convolution and SiLU. Of that are made a token's B and C [state_size], which
all features share, and each feature's step dt = softplus(steps + dt_bias). A feature's state h [state_size] forgets by
exp(-exp(A_log) dt) and takes in B dt x; y = h . C + D x.

What is said of tokens that count for certain in `delta_rule` holds here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import StateRows
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
    return _convolution(torch.cat((before, rows.raw.float())), weights)


def scan(rows: StateRows[MambaShape], c: Tensor, weights: ScanWeights) -> Tensor:
    """Return y, fp32 [T, features], of a sequence's tokens, and bring its state up to date.

    rows.raw: what goes into the convolution, the steps, and B. c: fp32 [T, state_size].
    """
    state, shape, end = rows.state, rows.state.shape, rows.past + len(rows.raw)
    begin, before = min(state.position, rows.past), shape.conv_width - 1
    raw = torch.cat((state.rows(begin - before, rows.past), rows.raw.float()))
    x = _convolution(raw[:, : shape.features], weights)
    steps, b = raw[before:, shape.features :].tensor_split([shape.features], dim=1)
    mixed = torch.empty(len(rows.raw), shape.features, device=raw.device)
    h = state.matrices.view(-1, shape.state_size, shape.lanes).transpose(0, 1).flatten(1)  # [state_size, features]
    for i in range(end - begin):
        position = begin + i
        step = functional.softplus(steps[i] + weights.dt_bias)
        h = h * (step * weights.rates).exp() + b[i][:, None] * (step * x[i])
        if position >= rows.past:
            mixed[position - rows.past] = (h * c[position - rows.past][:, None]).sum(0) + weights.d * x[i]
        if position + 1 in rows.snapshots:
            state.write_snapshot(rows.snapshots[position + 1], _in_lanes(h, shape), raw[i + 1 : i + 1 + before])
        if position + 1 == rows.committed:
            state.matrices.copy_(_in_lanes(h, shape).flatten())
            state.position = rows.committed
    state.keep_rows(rows.past, rows.raw)
    return mixed


def _convolution(raw: Tensor, weights: ScanWeights) -> Tensor:
    """raw [conv_width - 1 + T, features] -> [T, features]"""
    taps = weights.conv
    count = len(raw) - len(taps) + 1
    # In fp64: torch's vectors round functions otherwise than what is left over behind them.
    total = weights.conv_bias.double().repeat(count, 1)
    for n, tap in enumerate(taps):
        total += raw[n : n + count].double() * tap
    return functional.silu(total).float()


def _in_lanes(h: Tensor, shape: MambaShape) -> Tensor:
    """[state_size, features] -> [features / lanes, state_size, lanes]"""
    return h.view(shape.state_size, -1, shape.lanes).transpose(0, 1)
