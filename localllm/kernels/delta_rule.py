"""The gated delta rule by torch's operators: the reference, and what computes it where no kernel does.

Gated DeltaNet (arXiv:2412.06464): queries, keys and values pass a short convolution, SiLU, and queries and keys are
brought to length one. A head's state S [key_dim, value_dim] forgets by g and writes by beta what of a value it does not
hold under its key: S = g S + k (x) beta (v - (g S)^T k), and o = S^T q.

A sequence's state is changed in place only by tokens that count for certain. Of those behind them it keeps what goes
into the convolution: they are computed again by the next step, so that rejected drafts are taken back by being left
out. Every token is computed alike, one after the other, however many rows are beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.sizes import DeltaShape

L2_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """fp32: conv [conv_width, channels], the last tap for the token itself; a_log, dt_bias [value_heads]; norm
    [value_dim]. beta_scale: what multiplies sigmoid(b). eps: of the norm."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    beta_scale: float = 1.0
    eps: float = 1e-6


class DeltaState:
    """Views of the bytes of a sequence's state in one layer, uint8 [state_bytes]."""

    def __init__(self, shape: DeltaShape, state: Tensor) -> None:
        self.shape = shape
        heads, tiles = shape.value_heads, shape.value_dim // shape.lanes
        end = shape.matrix_bytes
        self.matrices = state[:end].view(torch.float32).view(heads, tiles, shape.key_dim, shape.lanes)
        begin, end = end, end + 4 * shape.kept_rows * shape.row_floats
        self._rows = state[begin:end].view(torch.float32).view(shape.kept_rows, shape.row_floats)
        begin = shape.positions_begin
        self._positions = state[begin : begin + 8 * heads].view(torch.int64)

    @property
    def position(self) -> int:
        """Tokens that the matrices have taken in."""
        return int(self._positions[0])

    @position.setter
    def position(self, position: int) -> None:
        self._positions.fill_(position)

    def rows(self, begin: int, end: int) -> Tensor:
        """[end - begin, row_floats] of the tokens at these positions; zeros before the first one."""
        positions = torch.arange(begin, end)
        kept = self._rows[(positions % self.shape.kept_rows).to(self._rows.device)]
        return kept.masked_fill((positions < 0).to(kept.device)[:, None], 0.0)

    def keep_rows(self, begin: int, rows: Tensor) -> None:
        """Keep what stands at the positions from `begin` on, the last ones where it is more than are kept."""
        positions = torch.arange(begin, begin + len(rows))[-self.shape.kept_rows :]
        self._rows[(positions % self.shape.kept_rows).to(self._rows.device)] = rows[-self.shape.kept_rows :].float()

    def write_snapshot(self, snapshot: Tensor, matrices: Tensor, tail: Tensor) -> None:
        """Write to `snapshot`, uint8 [snapshot_bytes]. tail: the rows before the snapshot's position."""
        end = self.shape.matrix_bytes
        snapshot[:end].view(torch.float32).copy_(matrices.reshape(-1))
        tail_bytes = 4 * (self.shape.conv_width - 1) * self.shape.row_floats
        snapshot[end : end + tail_bytes].view(torch.float32).copy_(tail.reshape(-1))
        snapshot[end + tail_bytes :] = 0

    def read_snapshot(self, snapshot: Tensor, position: int) -> None:
        """Become what the snapshot is of, which was taken before the token at `position`."""
        shape, end = self.shape, self.shape.matrix_bytes
        self.matrices.copy_(snapshot[:end].view(torch.float32).view(self.matrices.shape))
        tail_bytes = 4 * (shape.conv_width - 1) * shape.row_floats
        tail = snapshot[end : end + tail_bytes].view(torch.float32).view(-1, shape.row_floats)
        self.keep_rows(position - len(tail), tail)
        self.position = position


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """Some tokens of one sequence. raw: fp32 [T, row_floats]: what goes into the convolution, and the gates b and a.

    past: the position of the first one. committed: tokens before this position change the state in place; all, or none
    that `state` has not kept.
    snapshots: uint8 [snapshot_bytes] by the positions, at most `committed`, before which they are to be taken.
    """

    state: DeltaState
    raw: Tensor
    past: int
    committed: int
    snapshots: Mapping[int, Tensor] = field(default_factory=dict)


def mix(rows: DeltaRows, weights: DeltaWeights) -> Tensor:
    """Return o, fp32 [T, value_heads, value_dim], of a sequence's tokens, and bring its state up to date."""
    state, shape, end = rows.state, rows.state.shape, rows.past + len(rows.raw)
    begin, taps = min(state.position, rows.past), shape.conv_width
    raw = torch.cat((state.rows(begin - taps + 1, rows.past), rows.raw.float()))
    # In fp64: torch's vectors round functions otherwise than what is left over behind them.
    convolved = torch.zeros(end - begin, shape.channels, dtype=torch.float64, device=raw.device)
    for tap in range(taps):
        convolved += raw[tap : tap + end - begin, : shape.channels].double() * weights.conv[tap]
    q, k, v = (x.float() for x in _heads(shape, functional.silu(convolved)))
    b, a = raw[taps - 1 :, shape.channels :].double().chunk(2, dim=-1)
    beta = (b.sigmoid() * weights.beta_scale).float()
    decay = (-weights.a_log.double().exp() * functional.softplus(a + weights.dt_bias)).exp().float()
    mixed = torch.empty(len(rows.raw), shape.value_heads, shape.value_dim, device=raw.device)
    S = _plain(state.matrices)  # [heads, key_dim, value_dim]
    for i in range(end - begin):
        position = begin + i
        S = S * decay[i, :, None, None]
        delta = (v[i] - torch.einsum("hkv,hk->hv", S, k[i])) * beta[i, :, None]
        S = S + k[i, :, :, None] * delta[:, None]
        if position >= rows.past:
            mixed[position - rows.past] = torch.einsum("hkv,hk->hv", S, q[i])
        if position + 1 in rows.snapshots:
            state.write_snapshot(rows.snapshots[position + 1], _tiled(S, state), raw[i + 1 : i + taps])
        if position + 1 == rows.committed:
            state.matrices.copy_(_tiled(S, state))
            state.position = rows.committed
    state.keep_rows(rows.past, rows.raw)
    return mixed


def gated_norm(mixed: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """norm(mixed) * silu(z), each [T, value_heads, value_dim]; the norm is each head's own."""
    scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + weights.eps)
    return mixed * scale * weights.norm * functional.silu(z.float())


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


def _plain(matrices: Tensor) -> Tensor:
    """[heads, tiles, key_dim, lanes] -> [heads, key_dim, value_dim]"""
    return matrices.transpose(1, 2).flatten(2)


def _tiled(S: Tensor, state: DeltaState) -> Tensor:
    return S.reshape(*S.shape[:2], -1, state.shape.lanes).transpose(1, 2)
