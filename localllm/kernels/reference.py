"""The plain torch version of each kernel: the oracle of the tests, and the last resort on a machine without better."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import int8, tile16
from localllm.kernels.sizes import Glu, RouterConfig


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], computed in fp64, returned in x's dtype."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu2": _relu2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def gated(wide: Tensor, glu: Glu) -> Tensor:
    """wide [T, 2 N], the gate and then what goes up, or [T, N] without a gate -> [T, N]."""
    if not glu.has_gate:
        return ACTIVATIONS[glu.activation](wide)
    gate, up = wide.chunk(2, dim=-1)
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    return ACTIVATIONS[glu.activation](gate) * (up + glu.up_offset)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query sees: bool [num_queries, num_keys]; the last query stands at the last key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


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
    """Causal attention of the newest tokens over all of them.

    q [T, H, D]; k, v [KH, S, D] with S >= T, the last T keys being the queries' own. Scores in fp32 (fp64 for fp64).
    softcap: scores become softcap * tanh(scores / softcap) (gemma 2, arXiv:2408.00118). sinks [H]: of each head one
    more score, behind which there is no value. Returns [T, H, features of a value].
    """
    T, H, D = q.shape
    KH, S, _ = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(T, KH, H // KH, D).permute(1, 2, 0, 3).to(wide)  # [KH, G, T, D]
    scores = grouped @ k.to(wide).mT.unsqueeze(1) * scale  # [KH, G, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(T, S, window, q.device), float("-inf"))
    mixed = softmax(scores, sinks) @ v.to(wide).unsqueeze(1)  # [KH, G, T, D]
    return mixed.permute(2, 0, 1, 3).reshape(T, H, -1).to(q.dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """scores [KH, G, T, S], sinks [KH * G] -> the shares of the keys; what a sink takes is missing in their sum."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def int8_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x as the integer kernels see it: symmetric, one scale per row and group of `group` along K, nearest codes.

    x [T, K]. Returns codes int8 [T, K/group, group] and scale fp32 [T, K/group]; K is padded with zeros to the group.
    """
    T, K = x.shape
    groups = functional.pad(x.float(), (0, -K % group)).view(T, -1, group)
    peak = groups.abs().amax(dim=-1)
    inverse = torch.where(peak < 1e-30, 0, 127 / peak)  # as the kernels do: 127 / a smaller peak would overflow
    codes = (groups * inverse.unsqueeze(-1)).round().to(torch.int8)
    return codes, torch.where(peak < 1e-30, 0, peak * (1 / 127))


def int4_product(
    codes: Tensor, x_scale: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor, out_features: int
) -> Tensor:
    """tile16 weights times codes int8 [T, K/G, G] and their scales fp32 [T, K/G]: fp64 [T, N], sums of integers exact.

    y[t, n] = sum over groups of x_scale[t] * (scale[n] * sum(q * codes) + bias[n] * sum(codes)).
    """
    groups = scale.shape[1]
    q = tile16.unpack(qweight).view(-1, groups, codes.shape[-1]).double()  # [N, K/G, G]
    dots = torch.einsum("ngk,tgk->tng", q, codes.double())
    sums = codes.sum(-1, dtype=torch.float64).unsqueeze(1)  # [T, 1, K/G]
    weighted = tile16.unpack_groups(scale).double() * dots + tile16.unpack_groups(bias).double() * sums
    return torch.einsum("tng,tg->tn", weighted, x_scale.double())[:, :out_features]


def int8_product(codes: Tensor, x_scale: Tensor, qweight: Tensor, scale: Tensor, out_features: int) -> Tensor:
    """Weights of int8.py times codes int8 [T, K/G, G] and their scales fp32 [T, K/G]: fp64 [T, N], sums exact."""
    group = codes.shape[2]
    columns = codes.shape[1] * group
    q = int8.unpack(qweight)
    q = functional.pad(q, (0, columns - q.shape[1])).view(len(q), -1, group).double()
    dots = torch.einsum("ngk,tgk->tng", q, codes.double())
    y = torch.einsum("tng,tg->tn", dots, x_scale.double()) * scale.view(-1).double()
    return y[:, :out_features]


def route(logits: Tensor, correction: Tensor | None, router: RouterConfig) -> tuple[Tensor, Tensor]:
    """Choose experts as the router's row says. logits fp32 or fp64 [T, E]; correction fp32 [E].

    Returns experts int64 [T, top_k], best first, and their weights [T, top_k] of the logits' dtype.
    """
    if router.scores == "sparsemixer":
        return _sparsemixer(logits, router)
    if router.scores == "chosen":
        best, experts = logits.topk(router.top_k, dim=-1)
        return experts, best.softmax(-1) * router.scale
    scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    experts = _within_groups(choice, router).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if router.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + router.sum_epsilon).clamp(min=router.sum_floor)
    return experts, weights * router.scale


def _within_groups(choice: Tensor, router: RouterConfig) -> Tensor:
    """Scores [T, E], -inf in groups whose two best have a smaller sum than those of `top_groups` others
    (DeepSeek-V3, arXiv:2412.19437)."""
    if router.top_groups == router.groups:
        return choice
    grouped = choice.view(len(choice), router.groups, -1)  # [T, groups, E / groups]
    kept = grouped.topk(2, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
    mask = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, kept, True)
    return grouped.masked_fill(~mask.unsqueeze(-1), float("-inf")).view_as(choice)


def _sparsemixer(logits: Tensor, router: RouterConfig) -> tuple[Tensor, Tensor]:
    """Each choice is the largest logit that is left; its weight is its share among those left within jitter of it."""
    experts, weights, left = [], [], logits
    for _ in range(router.top_k):
        best, chosen = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * router.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, chosen))
        experts.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(experts, dim=1), torch.cat(weights, dim=1) * router.scale
