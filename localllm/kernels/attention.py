"""Causal grouped-query attention of a sequence's newest tokens over its keys and values, by torch's fused ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from localllm.kernels import reference

SOFTCAP_TILE = 512  # keys; widened to fp32 one tile at a time they stay in the cache


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D]; k [KH, S, D], v [KH, S, Dv], the last T keys being the queries' own. Returns [T, H, Dv].

    window: how many keys a query sees, its own included. softcap, sinks: see `reference.attention`.
    """
    T, H, D = q.shape
    KH, S, _ = k.shape
    if window is not None and S > T + window - 1:  # keys that no query of this call can see
        first = S - (T + window - 1)
        k, v, S = k[:, first:], v[:, first:], S - first
    if softcap is not None or sinks is not None:
        return _by_tiles(q, k, v, scale, window, softcap, sinks)
    if T == 1:
        # The G query heads of a group become rows over one key head: each key is read once, not G times.
        rows = q.view(1, KH, H // KH, D)
        mixed = scaled_dot_product_attention(rows, k.unsqueeze(0), v.unsqueeze(0), scale=scale)
        return mixed.view(1, H, -1)
    causal = S == T and (window is None or window >= T)
    mask = None if causal else reference.visible(T, S, window, q.device)
    if mask is not None and q.is_cuda:
        # No fused CUDA kernel takes a mask and grouped heads together: torch would write out all scores in fp32.
        k, v = k.repeat_interleave(H // KH, dim=0), v.repeat_interleave(H // KH, dim=0)
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[0] != H,
    )
    return mixed.squeeze(0).transpose(0, 1)


def _by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`reference.attention` with the keys and values widened tile by tile, not all at once at every token."""
    T, H, D = q.shape
    KH, S, _ = k.shape
    grouped = q.view(T, KH, H // KH, D).permute(1, 2, 0, 3).reshape(KH, -1, D).float()  # [KH, G T, D]
    scores = torch.cat([grouped @ tile.float().mT for tile in torch.split(k, SOFTCAP_TILE, dim=1)], dim=-1) * scale
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).view(KH, H // KH, T, S)
    if T > 1:  # a single query sees all that the window has left
        scores = scores.masked_fill(~reference.visible(T, S, window, q.device), float("-inf"))
    weights = reference.softmax(scores, sinks).reshape(KH, -1, S)  # [KH, G T, S]
    mixed = grouped.new_zeros(KH, grouped.shape[1], v.shape[-1])
    for part, tile in zip(torch.split(weights, SOFTCAP_TILE, dim=-1), torch.split(v, SOFTCAP_TILE, dim=1), strict=True):
        mixed += part @ tile.float()
    return mixed.view(KH, H // KH, T, -1).permute(2, 0, 1, 3).reshape(T, H, -1).to(q.dtype)
