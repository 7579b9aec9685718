"""RWKV-7 (arXiv:2503.14456) by torch's operators: the reference, and what computes it where no kernel does.

A time mix reads each token and the one before it. Of both it makes receptances r, keys k, values v, decays w, rates in
context a, and gates g. A head's state S [key features, value features] decays by w feature by feature, takes back what
it holds under the unit vector of the key that removes, kk, and writes the value under the key that replaces:
S = diag(w) S - (a kk) (x) (S^T kk) + k (x) v, and o = S^T r.

`recurrence` says how a state stays right where tokens are taken back: what it keeps of a token are `RWKV7_KEPT`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.recurrence import raw_rows, walk
from localllm.kernels.state_shapes import RWKV7_KEPT, Rwkv7Shape, StateShape

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
    shape, raw = rows.state.shape, raw_rows(rows)
    _, k, v, w, a = raw[1:].view(-1, len(RWKV7_KEPT), shape.num_heads, shape.head_dim).unbind(1)
    r = r.view(-1, shape.num_heads, shape.head_dim)
    decay = (_sigmoid(w).double() * LOG_DECAY).exp().float()
    rate = _sigmoid(a)
    unit = _unit(k * weights.removal_key.view(k.shape[1:]))
    k = k + k * (rate - 1.0) * weights.rate_key.view(k.shape[1:])
    replayed = len(k) - len(r)

    def take_in(S: Tensor, i: int) -> Tensor:
        held = torch.einsum("hkv,hk->hv", S, unit[i])
        removed = (rate[i] * unit[i])[:, :, None] * held[:, None]
        return S * decay[i, :, :, None] - removed + k[i, :, :, None] * v[i, :, None]

    mixed = walk(rows, raw, take_in, lambda S, i: torch.einsum("hkv,hk->hv", S, r[i - replayed]))
    bonus = (r * k[replayed:] * weights.bonus.view(k.shape[1:])).sum(-1, keepdim=True) * v[replayed:]
    return (_head_norm(mixed, weights) + bonus).flatten(1) * g


def _head_norm(x: Tensor, weights: TimeMixWeights) -> Tensor:
    """x [T, heads, head_dim], each head's by its mean and variance."""
    normed = functional.layer_norm(x, x.shape[-1:], eps=weights.eps)
    return normed * weights.norm.view(x.shape[1:]) + weights.norm_bias.view(x.shape[1:])


def _sigmoid(x: Tensor) -> Tensor:
    """In fp64: torch's vectors round functions otherwise than what is left over behind them."""
    return x.double().sigmoid().float()


def _unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=SMALLEST_NORM)
