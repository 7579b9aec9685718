"""RWKV-7 (arXiv:2503.14456) by torch's operators: the reference, and what computes it where no kernel does.

A time mix reads each token and the one before it. Of both it makes receptances r, keys k, values v, decays w, rates in
context a, and gates g. A head's state S [key features, value features] decays by w feature by feature, takes back what
it holds under the unit vector of the key that removes, kk, and writes the value under the key that replaces:
S = diag(w) S - (a kk) (x) (S^T kk) + k (x) v, and o = S^T r.

A sequence's state is changed in place only by tokens that count for certain. Of those behind them it keeps
`RWKV7_KEPT`: they are computed again by the next step, so that rejected drafts are taken back by being left out. Every
token is computed alike, one after the other, however many rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.state_shapes import REPLAYED_ROWS, RWKV7_KEPT, Rwkv7Shape, StateShape

LOG_DECAY = -0.6065306597126334  # of a decay's sigmoid: -exp(-0.5)
SMALLEST_NORM = 1e-12


@dataclass(frozen=True, eq=False)
class TimeMixWeights:
    """fp32: mixes [6, features], in the order of RWKV7_MIXED; removal_key, rate_key, bonus [features]: k_k, k_a and
    r_k of a checkpoint; norm, norm_bias [features] of the norm behind the heads. eps: of that."""

    mixes: Tensor
    removal_key: Tensor
    rate_key: Tensor
    bonus: Tensor
    norm: Tensor
    norm_bias: Tensor
    eps: float


def before(state: LayerState[StateShape], x: Tensor, past: int) -> Tensor:
    """Return what stands before each row of x, fp32 [T, features], the first of which is the token at `past`."""
    return torch.cat((state.rows(past - 1, past)[:, : x.shape[1]], x[:-1]))


def shifted(x: Tensor, previous: Tensor, mixes: Tensor) -> Tensor:
    """x, previous [T, features], mixes [N, features] -> x + mixes * (previous - x), [N, T, features]."""
    return x + mixes[:, None] * (previous - x)


def gated_values(v: Tensor, gate: Tensor, first: Tensor) -> Tensor:
    """v + sigmoid(gate) * (first - v), each fp32 [T, features]. first: the values of the first layer."""
    return v + (first - v) * _sigmoid(gate)


def mix_time(rows: StateRows[Rwkv7Shape], r: Tensor, g: Tensor, weights: TimeMixWeights) -> Tensor:
    """Return what the last matrix reads, fp32 [T, features], of a sequence's tokens, and bring its state up to date.

    rows.raw: RWKV7_KEPT of each. r, g: fp32 [T, features].
    """
    state, shape, end = rows.state, rows.state.shape, rows.past + len(rows.raw)
    begin = min(state.position, rows.past)
    raw = torch.cat((state.rows(begin - 1, rows.past), rows.raw.float()))
    _, k, v, w, a = raw[1:].view(end - begin, len(RWKV7_KEPT), shape.num_heads, shape.head_dim).unbind(1)
    r = r.view(-1, shape.num_heads, shape.head_dim)
    decay = (_sigmoid(w).double() * LOG_DECAY).exp().float()
    rate = _sigmoid(a)
    unit = _unit(k * weights.removal_key.view(k.shape[1:]))
    k = k + k * (rate - 1.0) * weights.rate_key.view(k.shape[1:])
    mixed = torch.empty(len(rows.raw), shape.num_heads, shape.head_dim, device=raw.device)
    S = _plain(state)  # [heads, key features, value features]
    for i in range(end - begin):
        position = begin + i
        held = torch.einsum("hkv,hk->hv", S, unit[i])
        removed = (rate[i] * unit[i])[:, :, None] * held[:, None]
        S = S * decay[i, :, :, None] - removed + k[i, :, :, None] * v[i, :, None]
        if position >= rows.past:
            mixed[position - rows.past] = torch.einsum("hkv,hk->hv", S, r[position - rows.past])
        if position + 1 in rows.snapshots:
            state.write_snapshot(rows.snapshots[position + 1], _tiled(S, shape), raw[i + 1 : i + 2])
        if position + 1 == rows.committed:
            state.matrices.copy_(_tiled(S, shape).flatten())
            state.position = rows.committed
    state.keep_rows(rows.past, rows.raw)
    own = slice(rows.past - begin, None)
    bonus = (r * k[own] * weights.bonus.view(k.shape[1:])).sum(-1, keepdim=True) * v[own]
    return (_head_norm(mixed, weights) + bonus).flatten(1) * g


def mix_channels(rows: StateRows[StateShape]) -> None:
    """Bring a state up to date of which only the rows count. rows.raw: what went into the layer."""
    state = rows.state
    for position, snapshot in rows.snapshots.items():
        at = position - rows.past
        if -REPLAYED_ROWS < at <= len(rows.raw):  # else another batch of the forward takes it
            tail = rows.raw[at - 1 : at] if at > 0 else state.rows(position - 1, position)
            state.write_snapshot(snapshot, state.matrices, tail)
    state.keep_rows(rows.past, rows.raw)


def _head_norm(x: Tensor, weights: TimeMixWeights) -> Tensor:
    """x [T, heads, head_dim], each head's by its mean and variance."""
    normed = functional.layer_norm(x, x.shape[-1:], eps=weights.eps)
    return normed * weights.norm.view(x.shape[1:]) + weights.norm_bias.view(x.shape[1:])


def _sigmoid(x: Tensor) -> Tensor:
    """In fp64: torch's vectors round functions otherwise than what is left over behind them."""
    return x.double().sigmoid().float()


def _unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=SMALLEST_NORM)


def _plain(state: LayerState[Rwkv7Shape]) -> Tensor:
    """[heads, tiles, key features, lanes] -> [heads, key features, value features]"""
    shape = state.shape
    return state.matrices.view(shape.num_heads, -1, shape.head_dim, shape.lanes).transpose(1, 2).flatten(2)


def _tiled(S: Tensor, shape: Rwkv7Shape) -> Tensor:
    return S.reshape(*S.shape[:2], -1, shape.lanes).transpose(1, 2)
