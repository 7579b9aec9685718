"""The body of multi-head latent attention: queries are brought into the space of the latents, and what they find there
back to each head's values, so that pages hold one latent a token (arXiv:2405.04434, section 2.1.2).

Prompts are computed so, too: to make each head's keys and values of all latents before each chunk would give its tokens
other bits than a step does, and takes as long as the rest of the layer where 8,000 tokens come before a chunk of 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.paged_attention import paged_attention, write
from localllm.kernels.sizes import MOST_LATENT_FEATURES
from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import LatentAttentionConfig
from localllm.layers.linear import Linear
from localllm.layers.native_attention import is_native
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import rotate


@dataclass(eq=False)
class LatentAttention:
    """layer: its number among those with keys and values. rotation: index into Batch.rotations.

    in_proj: what queries are made of, where that is reduced, the latent, and the shared key.
    q_proj: of all heads, the plain features and then those that meet the shared key.
    k_up, v_up: each head's rows below the last one's: of a query's plain features to a latent's, and of a latent's to
        the head's values.
    """

    config: LatentAttentionConfig
    layer: int
    rotation: int
    in_proj: Linear
    q_proj: Linear
    k_up: Linear
    v_up: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    latent_norm: RMSNorm

    @classmethod
    def loaded(cls, parts: BodyParts, config: LatentAttentionConfig, number: int) -> LatentAttention:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        tensors, eps = parts.tensors, config.norm_eps
        rotation = parts.rotation(config.rope, config.rotary_dim)
        return cls(
            config=config,
            layer=number,
            rotation=rotation,
            in_proj=parts.linear("in_proj"),
            q_proj=parts.linear("q_proj"),
            k_up=parts.linear("k_up"),
            v_up=parts.linear("v_up"),
            o_proj=parts.linear("o_proj"),
            q_norm=None if config.query_rank is None else RMSNorm(tensors["q_norm"], eps),
            latent_norm=RMSNorm(tensors["latent_norm"], eps),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj, self.q_proj, self.o_proj

    @property
    def head_linears(self) -> tuple[Linear, ...]:
        """The matrices of which each head has its own rows and columns."""
        return self.k_up, self.v_up

    @property
    def device(self) -> torch.device:
        return self.in_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        config, T = self.config, len(batch)
        H, latent = config.num_heads, config.latent_dim
        down = adapted(self.in_proj, x, batch)
        reduced, kept = down[:, : -latent - config.shared_dim], down[:, -latent - config.shared_dim :]
        query = adapted(self.q_proj, x if self.q_norm is None else self.q_norm(reduced), batch)
        plain, turning = query[:, : H * config.plain_dim], query[:, H * config.plain_dim :]
        rotation = batch.rotations[self.rotation]
        turning = rotate(turning.view(T, H, -1), *rotation)
        shared = rotate(kept[:, latent:].unsqueeze(1), *rotation)
        keys = torch.cat((self.latent_norm(kept[:, :latent]).unsqueeze(1), shared), dim=-1)
        queries = torch.cat((adapted_by_head(self.k_up, plain.view(T, H, -1), batch), turning), dim=-1)
        mixed = self._mixed(queries, keys, batch)
        return adapted(self.o_proj, adapted_by_head(self.v_up, mixed, batch).flatten(1), batch)

    def _mixed(self, queries: Tensor, keys: Tensor, batch: Batch) -> Tensor:
        """queries [T, H, D], keys [T, 1, D], which go to their pages -> [T, H, latent_dim]."""
        parts = queries, queries[..., : self.config.latent_dim]
        is_small = self.config.latent_dim <= MOST_LATENT_FEATURES
        if is_small and all(is_native(batch.segments, part) for part in parts):
            native = batch.native_attention(self.config, self.layer)
            return native.of_latents(queries.float(), keys.float(), self.config, self.layer).to(queries.dtype)
        mixed: list[Tensor] = []
        options: dict[str, Any] = {"scale": self.config.scale, "window": self.config.window}
        for segment in batch.segments:
            begin = segment.begin
            for count, past, pages in segment.kv.runs(self.layer, segment.past, segment.end - begin):
                rows = slice(begin, begin + count)
                write(pages, past, keys[rows], keys[rows])
                mixed.append(paged_attention(queries[rows], pages, past, **options))
                begin += count
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def adapted_by_head(linear: Linear, x: Tensor, batch: Batch) -> Tensor:
    """As `by_head`, with the adapters of each row."""
    y, heads = by_head(linear, x), x.shape[1]
    for segment in batch.adapted_segments:
        rows = slice(segment.begin, segment.end)
        for each in segment.kv.adapters:
            for part in each.adapter.parts_of(linear.name, x):  # of one head
                head = part.first_row * heads // linear.out_features
                y[rows, head] += ((x[rows, head] @ part.a.T) @ part.b.T * each.scale).to(y.dtype)
    return y


def by_head(linear: Linear, x: Tensor) -> Tensor:
    """x [T, H, in_features] -> [T, H, out_features / H], each head by its own rows of the matrix."""
    weight = linear.tensors.get("weight")
    if weight is None:
        weight = linear.rows(torch.arange(linear.out_features, device=linear.device))
    own = weight.view(x.shape[1], -1, linear.in_features).to(x.dtype)
    return torch.einsum("thk,hnk->thn", x, own)
