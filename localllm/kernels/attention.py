"""Causal grouped-query attention of a sequence's newest tokens over its keys and values, by torch's fused ops."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from localllm.kernels import reference


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """q [T, H, D]; k, v [KH, S, D], the last T keys being the queries' own. Returns [T, H, D]."""
    T, H, D = q.shape
    KH, S, _ = k.shape
    if window is not None and S > T + window - 1:  # keys that no query of this call can see
        first = S - (T + window - 1)
        k, v, S = k[:, first:], v[:, first:], S - first
    if softcap is not None:
        return reference.attention(q, k, v, scale=scale, window=window, softcap=softcap)
    if T == 1:
        # The G query heads of a group become rows over one key head: each key is read once, not G times.
        rows = q.view(1, KH, H // KH, D)
        mixed = scaled_dot_product_attention(rows, k.unsqueeze(0), v.unsqueeze(0), scale=scale)
        return mixed.view(1, H, D)
    causal = S == T and (window is None or window >= T)
    mask = None if causal else reference.visible(T, S, window, q.device)
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return mixed.squeeze(0).transpose(0, 1)
