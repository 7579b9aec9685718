"""Mamba 2 by torch's operators: the reference, and what computes it where no kernel does.

Mamba 2 (arXiv:2405.21060): x, B and C pass a short convolution and SiLU. A head's state S [state_size, head_dim]
forgets by exp(-exp(A_log) dt) and takes in B (x) dt x, where the step dt = softplus(dt + dt_bias), within bounds, is a
token's own; y = S^T C + D x. B and C are those of the head's group.

`recurrence` says how a state stays right where tokens are taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import StateRows
from localllm.kernels.recurrence import convolution, raw_rows, walk
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
    shape, raw = rows.state.shape, raw_rows(rows)
    convolved = functional.silu(convolution(raw, weights.conv, weights.conv_bias))
    x, b, c = (part.float() for part in _heads(shape, convolved))
    steps = functional.softplus(raw[shape.conv_width - 1 :, shape.channels :].double() + weights.dt_bias)
    steps = steps.clamp(weights.least_step, weights.most_step)
    decay, taken = (-weights.a_log.double().exp() * steps).exp().float(), x * steps.float()[:, :, None]

    def take_in(S: Tensor, i: int) -> Tensor:
        return S * decay[i, :, None, None] + b[i, :, :, None] * taken[i, :, None]

    def read(S: Tensor, i: int) -> Tensor:
        return torch.einsum("hnp,hn->hp", S, c[i]) + weights.d[:, None] * x[i]

    return walk(rows, raw, take_in, read)


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
