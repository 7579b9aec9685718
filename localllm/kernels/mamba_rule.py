"""Mamba 2 by torch's operators: the reference, and what computes it where no kernel does.

Mamba 2 (arXiv:2405.21060): x, B and C pass a short convolution and SiLU. A head's state S [state_size, head_dim]
forgets by exp(-exp(A_log) dt) and takes in B (x) dt x, where the step dt = softplus(dt + dt_bias), within bounds, is a
token's own; y = S^T C + D x. B and C are those of the head's group.

What is said of tokens that count for certain in `delta_rule` holds here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.state_shapes import Mamba2Shape


@dataclass(frozen=True, eq=False)
class Mamba2Weights:
    """fp32: conv [conv_width, channels], the last tap for the token itself; conv_bias [channels]; a_log, dt_bias, d
    [num_heads]; norm [features], None where there is none.

    least_step, most_step: bounds of dt. norm_is_gated: the norm is taken of what is multiplied by silu(z) already.
    eps: of the norm.
    """

    conv: Tensor
    conv_bias: Tensor
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    norm: Tensor | None
    least_step: float = 0.0
    most_step: float = float("inf")
    norm_is_gated: bool = True
    eps: float = 1e-5


def mix(rows: StateRows[Mamba2Shape], weights: Mamba2Weights) -> Tensor:
    """Return y, fp32 [T, num_heads, head_dim], of a sequence's tokens, and bring its state up to date.

    rows.raw: what goes into the convolution, x, B and C, and the steps dt.
    """
    state, shape, end = rows.state, rows.state.shape, rows.past + len(rows.raw)
    begin, taps = min(state.position, rows.past), shape.conv_width
    raw = torch.cat((state.rows(begin - taps + 1, rows.past), rows.raw.float()))
    # In fp64: torch's vectors round functions otherwise than what is left over behind them.
    convolved = weights.conv_bias.double().repeat(end - begin, 1)
    for tap in range(taps):
        convolved += raw[tap : tap + end - begin, : shape.channels].double() * weights.conv[tap]
    x, b, c = (part.float() for part in _heads(shape, functional.silu(convolved)))
    steps = functional.softplus(raw[taps - 1 :, shape.channels :].double() + weights.dt_bias)
    steps = steps.clamp(weights.least_step, weights.most_step)
    decay, taken = (-weights.a_log.double().exp() * steps).exp().float(), x * steps.float()[:, :, None]
    mixed = torch.empty(len(rows.raw), shape.num_heads, shape.head_dim, device=raw.device)
    S = _plain(state)  # [heads, state_size, head_dim]
    for i in range(end - begin):
        position = begin + i
        S = S * decay[i, :, None, None] + b[i, :, :, None] * taken[i, :, None]
        if position >= rows.past:
            mixed[position - rows.past] = torch.einsum("hnp,hn->hp", S, c[i]) + weights.d[:, None] * x[i]
        if position + 1 in rows.snapshots:
            state.write_snapshot(rows.snapshots[position + 1], _tiled(S, shape), raw[i + 1 : i + taps])
        if position + 1 == rows.committed:
            state.matrices.copy_(_tiled(S, shape).flatten())
            state.position = rows.committed
    state.keep_rows(rows.past, rows.raw)
    return mixed


def gated_norm(mixed: Tensor, z: Tensor, weights: Mamba2Weights, num_groups: int) -> Tensor:
    """norm(mixed * silu(z)) or norm(mixed) * silu(z), each [T, features], in fp64; the norm is each group's own."""
    mixed, gate = mixed.double(), functional.silu(z.double())
    if weights.norm is None:
        return (mixed * gate).float()
    value = mixed * gate if weights.norm_is_gated else mixed
    parts = value.view(len(value), num_groups, -1)
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + weights.eps)
    value = (parts * scale).flatten(1) * weights.norm
    return (value if weights.norm_is_gated else value * gate).float()


def _heads(shape: Mamba2Shape, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, num_heads, head_dim], and each head's B and C, [T, num_heads, state_size]."""
    features = shape.num_groups * shape.state_size
    x, b, c = torch.split(convolved, [shape.features, features, features], dim=1)
    own = torch.arange(shape.num_heads, device=convolved.device) // (shape.num_heads // shape.num_groups)
    b, c = (part.reshape(len(part), shape.num_groups, shape.state_size)[:, own] for part in (b, c))
    return x.reshape(len(x), shape.num_heads, shape.head_dim), b, c


def _plain(state: LayerState[Mamba2Shape]) -> Tensor:
    """[heads, tiles, state_size, lanes] -> [heads, state_size, head_dim]"""
    shape = state.shape
    return state.matrices.view(shape.num_heads, -1, shape.state_size, shape.lanes).transpose(1, 2).flatten(2)


def _tiled(S: Tensor, shape: Mamba2Shape) -> Tensor:
    return S.reshape(*S.shape[:2], -1, shape.lanes).transpose(1, 2)
