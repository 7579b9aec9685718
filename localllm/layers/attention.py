"""The attention body: project, normalise and rotate queries and keys, attend over the KV store, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.paged_attention import LayerPages, page_masses, paged_attention, write
from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch
from localllm.layers.config import AttentionConfig
from localllm.layers.linear import Linear
from localllm.layers.native_attention import is_native
from localllm.layers.norm import Norm
from localllm.layers.rotary import query_growth, rotate
from localllm.layers.segment import Masses


@dataclass(eq=False)
class Attention:
    """rotation: index into Batch.rotations. sinks: fp32 [H]."""

    config: AttentionConfig
    layer: int
    rotation: int
    qkv_proj: Linear
    o_proj: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: Tensor | None = None
    norm_eps: float = 1e-6  # of values

    @property
    def keeps(self) -> bool:
        """Return whether its keys and values are its own."""
        return self.config.kv_of_layer is None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj

    @property
    def device(self) -> torch.device:
        return self.qkv_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        config, T = self.config, len(batch)
        H, KH, D = config.num_heads, config.key_heads, config.head_dim
        projected = adapted(self.qkv_proj, x, batch)
        gate, qkv = projected[:, : config.gate_features], projected[:, config.gate_features :].view(T, -1, D)
        qk, v = qkv[:, : H + KH], qkv[:, H:] if config.value_from_key else qkv[:, H + KH :]
        if config.norms_values:
            v = functional.rms_norm(v.float(), (D,), eps=self.norm_eps).to(v.dtype)
        qk = qk if config.rotates_first else self._normalised(qk)
        if config.clip is not None:
            qk, v = (x.clamp(-config.clip, config.clip) for x in (qk, v))
        qk = rotate(qk, *batch.rotations[self.rotation])
        qk = self._normalised(qk) if config.rotates_first else qk
        if config.growth is not None:
            q = qk[:, :H] * query_growth(config.growth, batch.positions).view(T, 1, 1)
            qk = torch.cat((q.to(qk.dtype), qk[:, H:]), dim=1)
        mixed = self._mixed(qk, v, batch).reshape(T, H, D)
        if config.gate_features:  # of each feature, or one of each head
            mixed = mixed * gate.sigmoid().view(T, H, -1)
        return adapted(self.o_proj, mixed.flatten(1), batch)

    def _mixed(self, qk: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Rotated queries and keys [T, H + KH, D], values [T, KH, D]; keys and values, if there are any, go to their
        pages. Returns [T, H, D]."""
        if is_native(batch.segments, qk):
            together = torch.cat((qk.float(), v.float()), dim=1)
            native = batch.native_attention(self.config, self.layer)
            return native(together, self.config, self.layer, self.sinks).to(qk.dtype)
        return self._mixed_by_operators(qk, v, batch)

    def _mixed_by_operators(self, qk: Tensor, v: Tensor, batch: Batch) -> Tensor:
        mixed, config = [], self.config  # [T_i, H, D] each
        options: dict[str, Any] = {"scale": config.scale, "window": config.window, "softcap": config.softcap}
        for segment in batch.segments:
            begin = segment.begin
            choice = segment.kv.choice if config.window is None else None
            for count, past, pages in segment.kv.runs(self.layer, segment.past, segment.end - begin):
                rows = slice(begin, begin + count)
                q, k = qk[rows, : config.num_heads], qk[rows, config.num_heads :]
                if len(v[0]):
                    write(pages, past, k, v[rows])
                mixed.append(paged_attention(q, pages, past, sinks=self.sinks, choice=choice, **options))
                if segment.kv.masses is not None and config.window is None:
                    self._add_masses(segment.kv.masses, q, pages, past, segment.past + begin - segment.begin)
                begin += count
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _add_masses(self, masses: Masses, q: Tensor, pages: LayerPages, past: int, begin: int) -> None:
        """Count the attention that pages get from queries [T, H, D]. past: the position of the first one among these
        pages; begin: in the text."""
        for position in masses.watched(begin, begin + len(q)):
            own, at = q[position - begin : position - begin + 1], past + position - begin
            options = self.config.scale, self.config.softcap, self.sinks
            found = page_masses(own, pages, at, *options)
            masses.row(position)[0, : len(found)] += found.cpu()

    def _normalised(self, qk: Tensor) -> Tensor:
        """qk [T, H + KH, D] through the norms of queries and keys, where the family has them."""
        if self.q_norm is None:
            return qk
        q, k = qk[:, : self.config.num_heads], qk[:, self.config.num_heads :]
        if self.k_norm is None:  # the keys are another layer's
            return self.q_norm(q)
        if self.config.qk_norm == "full":
            q_flat, k_flat = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))
            return torch.cat((q_flat, k_flat), dim=1).view(qk.shape)
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
