"""The gated delta rule by torch's operators: the reference, and what computes it where no kernel does.

Gated DeltaNet (arXiv:2412.06464): queries, keys and values pass a short convolution, SiLU, and queries and keys are
brought to length one. A head's state S [key_dim, value_dim] forgets by g and writes by beta what of a value it does not
hold under its key: S = g S + k (x) beta (v - (g S)^T k), and o = S^T q. In Kimi Delta Attention (arXiv:2510.26692) each
key feature of a head has a g of its own.

A sequence's state is changed in place only by tokens that count for certain. Of those behind them it keeps what goes
into the convolution: they are computed again by the next step, so that rejected drafts are taken back by being left
out. Every token is computed alike, one after the other, however many rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import LayerState, StateRows
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
    state, shape, end = rows.state, rows.state.shape, rows.past + len(rows.raw)
    begin, taps = min(state.position, rows.past), shape.conv_width
    raw = torch.cat((state.rows(begin - taps + 1, rows.past), rows.raw.float()))
    # In fp64: torch's vectors round functions otherwise than what is left over behind them.
    convolved = torch.zeros(end - begin, shape.channels, dtype=torch.float64, device=raw.device)
    for tap in range(taps):
        convolved += raw[tap : tap + end - begin, : shape.channels].double() * weights.conv[tap]
    q, k, v = (x.float() for x in _heads(shape, functional.silu(convolved)))
    b, a = raw[taps - 1 :, shape.channels :].double().tensor_split([shape.value_heads], dim=-1)
    beta = (b.sigmoid() * weights.beta_scale).float()
    steps = functional.softplus(a + weights.dt_bias).view(len(a), shape.value_heads, -1)
    decay = (-weights.a_log.double().exp()[:, None] * steps).exp().float()  # [T, heads, 1 or key_dim]
    mixed = torch.empty(len(rows.raw), shape.value_heads, shape.value_dim, device=raw.device)
    S = _plain(state)  # [heads, key_dim, value_dim]
    for i in range(end - begin):
        position = begin + i
        S = S * decay[i, :, :, None]
        delta = (v[i] - torch.einsum("hkv,hk->hv", S, k[i])) * beta[i, :, None]
        S = S + k[i, :, :, None] * delta[:, None]
        if position >= rows.past:
            mixed[position - rows.past] = torch.einsum("hkv,hk->hv", S, q[i])
        if position + 1 in rows.snapshots:
            state.write_snapshot(rows.snapshots[position + 1], _tiled(S, shape), raw[i + 1 : i + taps])
        if position + 1 == rows.committed:
            state.matrices.copy_(_tiled(S, shape).flatten())
            state.position = rows.committed
    state.keep_rows(rows.past, rows.raw)
    return mixed


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


def _plain(state: LayerState[DeltaShape]) -> Tensor:
    """[heads, tiles, key_dim, lanes] -> [heads, key_dim, value_dim]"""
    shape = state.shape
    return state.matrices.view(shape.value_heads, -1, shape.key_dim, shape.lanes).transpose(1, 2).flatten(2)


def _tiled(S: Tensor, shape: DeltaShape) -> Tensor:
    return S.reshape(*S.shape[:2], -1, shape.lanes).transpose(1, 2)
