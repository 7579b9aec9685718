"""The gated delta rule by torch's operators: the reference, and what computes it where no kernel does.

Gated DeltaNet (arXiv:2412.06464): queries, keys and values pass a short convolution, SiLU, and queries and keys are
brought to length one. A head's state S [key_dim, value_dim] forgets by g and writes by beta what of a value it does not
hold under its key: S = g S + k (x) beta (v - (g S)^T k), and o = S^T q. In Kimi Delta Attention (arXiv:2510.26692) each
key feature of a head has a g of its own.

`recurrence` says how a state stays right where tokens are taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import StateRows
from localllm.kernels.recurrence import convolution, raw_rows, walk
from localllm.kernels.sizes import OutputGate
from localllm.kernels.state_shapes import DeltaShape

L2_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """fp32: conv [conv_width, channels], the last tap for the token itself; a_log [value_heads]; dt_bias
    [decay_features]; norm [value_dim]. beta_scale: what multiplies sigmoid(b). eps: of the norm. gate: of what comes
    out."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    beta_scale: float = 1.0
    eps: float = 1e-6
    gate: OutputGate = "silu"


def mix(rows: StateRows[DeltaShape], weights: DeltaWeights) -> Tensor:
    """Return o, fp32 [T, value_heads, value_dim], of a sequence's tokens, and bring its state up to date.

    rows.raw: what goes into the convolution, and the gates b and a.
    """
    shape, raw = rows.state.shape, raw_rows(rows)
    q, k, v = (x.float() for x in _heads(shape, functional.silu(convolution(raw, weights.conv))))
    b, a = raw[shape.conv_width - 1 :, shape.channels :].double().tensor_split([shape.value_heads], dim=-1)
    beta = (b.sigmoid() * weights.beta_scale).float()
    steps = functional.softplus(a + weights.dt_bias).view(len(a), shape.value_heads, -1)
    decay = (-weights.a_log.double().exp()[:, None] * steps).exp().float()  # [T, heads, 1 or key_dim]

    def take_in(S: Tensor, i: int) -> Tensor:
        S = S * decay[i, :, :, None]
        delta = (v[i] - torch.einsum("hkv,hk->hv", S, k[i])) * beta[i, :, None]
        return S + k[i, :, :, None] * delta[:, None]

    return walk(rows, raw, take_in, lambda S, i: torch.einsum("hkv,hk->hv", S, q[i]))


def gated_norm(mixed: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """norm(mixed) * gate(z), each [T, value_heads, value_dim]; the norm is each head's own."""
    scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + weights.eps)
    opened = functional.silu(z.float()) if weights.gate == "silu" else z.float().sigmoid()
    return mixed * scale * weights.norm * opened


def _heads(shape: DeltaShape, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys of length one, [T, value_heads, key_dim] each, and values."""
    features = shape.key_heads * shape.key_dim
    q, k, v = convolved[:, :features], convolved[:, features : 2 * features], convolved[:, 2 * features :]
    heads = torch.arange(shape.value_heads, device=convolved.device)
    own = heads % shape.key_heads if shape.is_tiled else heads // (shape.value_heads // shape.key_heads)
    q, k = (_unit(x.reshape(len(x), shape.key_heads, shape.key_dim))[:, own] for x in (q, k))
    return q * shape.key_dim**-0.5, k, v.reshape(len(v), shape.value_heads, shape.value_dim)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
