"""The plain torch version of each kernel: the oracle of the tests, and the last resort on a machine without better."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], computed in fp64, returned in x's dtype."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees: bool [num_queries, num_keys]; the last query stands at the last key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Causal attention of the newest tokens over all of them.

    q [T, H, D]; k, v [KH, S, D] with S >= T, the last T keys being the queries' own. Scores in fp32 (fp64 for fp64).
    softcap: scores become softcap * tanh(scores / softcap) (gemma 2, arXiv:2408.00118). Returns [T, H, D].
    """
    T, H, D = q.shape
    KH, S, _ = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(T, KH, H // KH, D).permute(1, 2, 0, 3).to(wide)  # [KH, G, T, D]
    scores = grouped @ k.to(wide).mT.unsqueeze(1) * scale  # [KH, G, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(T, S, window, q.device), float("-inf"))
    mixed = scores.softmax(-1) @ v.to(wide).unsqueeze(1)  # [KH, G, T, D]
    return mixed.permute(2, 0, 1, 3).reshape(T, H, D).to(q.dtype)
