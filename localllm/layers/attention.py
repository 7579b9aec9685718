"""The attention body: project, normalise and rotate queries and keys, attend over the KV store, project back."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.paged_attention import paged_attention, write
from localllm.layers.batch import Batch
from localllm.layers.config import AttentionShape
from localllm.layers.linear import Linear
from localllm.layers.native_attention import is_native
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import rotate
from localllm.layers.segment import Segment


class Attention:
    def __init__(
        self,
        shape: AttentionShape,
        qkv_proj: Linear,
        o_proj: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.shape = shape
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj

    @property
    def device(self) -> torch.device:
        return self.qkv_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape, T = self.shape, len(batch)
        H, KH, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = self.qkv_proj(x).view(T, H + 2 * KH, D)
        qk = self._normalised(qkv[:, : H + KH])
        qk = rotate(qk, *batch.rotations[shape.rotation])
        return self.o_proj(self._mixed(qk, qkv[:, H + KH :], batch).reshape(T, H * D))

    def _mixed(self, qk: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Rotated queries and keys [T, H + KH, D], values [T, KH, D]; these go to their pages. Returns [T, H, D]."""
        if is_native(batch.segments, qk):
            together = torch.cat((qk.float(), v.float()), dim=1)
            return batch.native_attention(self.shape.num_heads)(together, self.shape).to(qk.dtype)
        return self._mixed_by_operators(qk, v, batch)

    def _mixed_by_operators(self, qk: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k = qk[:, : self.shape.num_heads], qk[:, self.shape.num_heads :]
        mixed = [self._attend(segment, q, k, v) for segment in batch.segments]  # [T_i, H, D] each
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend(self, segment: Segment, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape, rows = self.shape, slice(segment.begin, segment.end)
        pages = segment.kv.layer(shape.layer, segment.past, segment.end - segment.begin)
        write(pages, segment.past, k[rows], v[rows])
        return paged_attention(
            q[rows], pages, segment.past, scale=shape.scale, window=shape.window, softcap=shape.softcap
        )

    def _normalised(self, qk: Tensor) -> Tensor:
        """qk [T, H + KH, D] through the norms of queries and keys, where the family has them."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk[:, : self.shape.num_heads], qk[:, self.shape.num_heads :]
        if not self.shape.norm_each_head:
            q_flat, k_flat = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))
            return torch.cat((q_flat, k_flat), dim=1).view(qk.shape)
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
