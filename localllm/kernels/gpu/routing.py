"""Which experts of a mixture compute a token, on a GPU: the logits of its router, then the choice, beside which the
experts' input is made; two launches.

A logit is a sum in fp32 that lanes of columns share, added up in pairs at the end: in an order of the router alone, so
that a token has the same experts and weights whatever tokens are beside it. One warp chooses for a token. Equal scores
give the first expert. A logit that is no number makes all weights of its token so: nothing hides it; the experts are
such as there are, whatever happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes, code_row
from localllm.kernels.gpu.gemv import fetch_lines
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.sizes import RouterConfig

_COLUMNS_A_WARP = 2048  # of a row whose codes are made: 64 values a thread, for more threads choose more slowly
_HALVINGS = 7  # of the lanes of a sum, four columns a thread of a warp
_LOWEST = tl.constexpr(-9223372036854775807)  # below the key of any score


@dataclass(frozen=True)
class Routes:
    """logits fp32 [T, E], or [T, E + 1] with that of a gate; experts int32 and weights fp32 [T, top_k], best first.
    Experts of a padding row are -1: no weights are read for it."""

    logits: Tensor
    experts: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, rows: int, router: RouterConfig, device: torch.device, *, has_gate: bool = False) -> Routes:
        return cls(
            torch.empty((rows, router.num_experts + has_gate), device=device),
            torch.empty((rows, router.top_k), dtype=torch.int32, device=device),
            torch.empty((rows, router.top_k), device=device),
        )

    @property
    def gates(self) -> Tensor:
        """The logits of the gate, [T, 1]."""
        return self.logits[:, -1:]


@dataclass(frozen=True)
class RouterWeights:
    """weight [E, hidden] and bias [E], which makes logits, of any float type; correction fp32 [E], which only chooses;
    norm fp32 [hidden]: of the block's input, with its eps, where that is not done before. gate [1, hidden]: of a shared
    expert; its logit comes behind those that choose."""

    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gate: Tensor | None = None


@triton.jit
def _lanes_added(sums, A: tl.constexpr, B: tl.constexpr, HALVINGS: tl.constexpr):
    """[A, B, 2 ** HALVINGS] -> [A, B]: neighbours are added, then neighbours of those. A sum of two has no order."""
    for i in tl.static_range(HALVINGS):
        sums = tl.sum(tl.reshape(sums, (A, B, 1 << (HALVINGS - 1 - i), 2)), axis=3)
    return tl.reshape(sums, (A, B))


@triton.jit(do_not_specialize=["rows", "experts", "logit_stride"])
def _logits(
    x, norm, router, gate, bias, logits, rows, experts, features, x_stride, logit_stride, eps,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, HALVINGS: tl.constexpr, UNROLL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << HALVINGS
    m, e = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    if OVERLAPS and UNROLL > 1:  # of few rows; 32 columns are a line of the cache, or half of one
        line = tl.minimum(tl.arange(0, LANES) * 32, features - 1)[None, :]
        fetch_lines(router + tl.minimum(e, experts - 1).to(tl.int64)[:, None] * features + line)
    after_previous(OVERLAPS)
    row, expert = x + m.to(tl.int64)[:, None] * x_stride, router + e.to(tl.int64)[:, None] * features
    outputs = experts
    if gate is not None:
        outputs = experts + 1
        expert = tl.where(e[:, None] == experts, gate, expert)
    is_row, is_expert = (m < rows)[:, None], (e < outputs)[:, None]
    sums, squares = tl.zeros((ROWS, EXPERTS, LANES), tl.float32), tl.zeros((ROWS, 1, LANES), tl.float32)
    for begin in tl.range(0, features, LANES, loop_unroll_factor=UNROLL):
        column = begin + tl.arange(0, LANES)[None, :]
        is_column = column < features
        values = tl.load(row + column, mask=is_row & is_column, other=0).to(tl.float32)
        weights = tl.load(expert + column, mask=is_expert & is_column, other=0).to(tl.float32)[None, :, :]
        if norm is not None:
            squares = tl.fma(values[:, None, :], values[:, None, :], squares)
            values = values * tl.load(norm + column, mask=is_column, other=0)
        values = tl.broadcast_to(values[:, None, :], sums.shape)
        sums = tl.fma(values, tl.broadcast_to(weights, sums.shape), sums)
    out = _lanes_added(sums, ROWS, EXPERTS, HALVINGS)
    base = tl.zeros(out.shape, tl.float32)
    if bias is not None:
        base += tl.load(bias + e, mask=e < experts, other=0).to(tl.float32)[None, :]
    if norm is not None:
        mean_square = _lanes_added(squares, ROWS, 1, HALVINGS) / features
        out = tl.fma(out, tl.broadcast_to(1 / tl.sqrt(mean_square + eps), out.shape), base)
    else:
        out = out + base
    into = logits + m.to(tl.int64)[:, None] * logit_stride + e[None, :]
    tl.store(into, out, mask=is_row & (e < outputs)[None, :])


@triton.jit
def _key(score, index):
    """int64, larger for a larger score, and for the first of equal ones. What is no number comes last."""
    bits = tl.where(score == score, score, float("-inf")).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _score_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _within_groups(choice, group, member, is_expert, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """-inf for the experts of groups that are not among those of which the two best scores have the largest sums."""
    key = tl.where(is_expert, _key(choice, member), _LOWEST)
    best = tl.max(key, axis=1)[:, None]
    second = tl.max(tl.where(key == best, _LOWEST, key), axis=1)[:, None]
    left = tl.where(group < GROUPS, _key(_score_of(best) + _score_of(second), group), _LOWEST)
    is_kept = left < _LOWEST
    for _ in range(TOP_GROUPS):
        largest = left == tl.max(left, axis=0)[None, :]
        is_kept = is_kept | largest
        left = tl.where(largest, _LOWEST, left)
    return tl.where(is_kept, choice, float("-inf"))


@triton.jit
def _scored(logit, peak, total, SCORES: tl.constexpr):
    if SCORES == "softmax":
        return tl.exp(logit - peak) / total
    if SCORES == "sigmoid":
        return 1 / (1 + tl.exp(-logit))
    return logit


@triton.jit
def _weighed(logit, peak, total, sum_epsilon, sum_floor, is_slot, SCORES: tl.constexpr, NORMALIZES: tl.constexpr):
    """The weights of the experts with these logits, [SLOTS]."""
    if SCORES == "chosen":
        share = tl.exp(logit - tl.max(logit, axis=0))
        return share / tl.sum(share, axis=0)
    weight = tl.where(is_slot, _scored(logit, peak, total, SCORES), 0.0)
    if NORMALIZES:
        weight = weight / tl.maximum(tl.sum(weight, axis=0) + sum_epsilon, sum_floor)
    return weight


@triton.jit
def _chosen(
    logits, correction, positions, experts, weights, experts_each, logit_stride, sum_epsilon, sum_floor, factor, jitter,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SCORES: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    """See `_choose`."""
    logits += tl.program_id(0).to(tl.int64) * logit_stride
    group, member = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, MEMBERS)[None, :]
    expert, is_expert = group * experts_each + member, (group < GROUPS) & (member < experts_each)
    values = tl.load(logits + expert, mask=is_expert, other=float("-inf"))
    not_a_number = tl.sum(tl.sum(tl.where(is_expert, values * 0.0, 0.0), axis=1), axis=0)
    peak = tl.max(tl.max(values, axis=1), axis=0)
    total = tl.sum(tl.sum(tl.where(is_expert, tl.exp(values - peak), 0.0), axis=1), axis=0)
    choice = _scored(values, peak, total, SCORES)
    if correction is not None:
        choice = choice + tl.load(correction + expert, mask=is_expert, other=0)
    if TOP_GROUPS < GROUPS:
        choice = _within_groups(choice, group, member, is_expert, GROUPS, TOP_GROUPS)
    left, slot = tl.where(is_expert, _key(choice, expert), _LOWEST), tl.arange(0, SLOTS)
    chosen, weight = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for k in range(TOP_K):
        best = tl.max(tl.max(left, axis=1), axis=0)
        if SCORES == "sparsemixer":  # its share of those that are left, within jitter
            top = _score_of(best)
            is_far = (top - values) / tl.maximum(tl.abs(values), top) > 2 * jitter
            shares = tl.where((left != _LOWEST) & (is_far == 0), tl.exp(values - top), 0.0)
            weight = tl.where(slot == k, 1 / tl.sum(tl.sum(shares, axis=1), axis=0), weight)
        chosen = tl.where(slot == k, _index_of(best), chosen)
        left = tl.where(left == best, _LOWEST, left)
    is_slot = slot < TOP_K
    at = tl.program_id(0).to(tl.int64) * TOP_K + slot
    if SCORES != "sparsemixer":
        logit = tl.load(logits + chosen, mask=is_slot, other=float("-inf"))
        weight = _weighed(logit, peak, total, sum_epsilon, sum_floor, is_slot, SCORES, NORMALIZES)
    if positions is not None:
        chosen = tl.where(tl.load(positions + tl.program_id(0)) < 0, -1, chosen)
    tl.store(experts + at, chosen, mask=is_slot)
    tl.store(weights + at, weight * factor + not_a_number, mask=is_slot)


@triton.jit(do_not_specialize=["experts_each", "logit_stride", "code_stride"])
def _choose(
    logits, correction, positions, experts, weights, x, norm, codes, code_scale, code_bias,
    experts_each, logit_stride, sum_epsilon, sum_floor, factor, jitter, x_stride, code_stride, features, padded, eps,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SCORES: tl.constexpr, NORMALIZES: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """experts_each: of a group. GROUP_BLOCK, MEMBERS, SLOTS: the powers of two that hold the groups, theirs, TOP_K. The
    second program of a token makes its codes, where they are asked for."""
    after_previous(OVERLAPS)
    if tl.program_id(1) == 0:
        _chosen(
            logits, correction, positions, experts, weights, experts_each, logit_stride, sum_epsilon, sum_floor, factor,
            jitter, GROUPS, TOP_GROUPS, GROUP_BLOCK, MEMBERS, TOP_K, SLOTS, SCORES, NORMALIZES,
        )  # fmt: skip
    elif codes is not None:
        code_row(
            x, norm, codes, code_scale, code_bias, x_stride, code_stride, features, padded, eps, 0,
            BLOCK, GROUP, BITS, KIND, None,
        )  # fmt: skip


def route(
    x: Tensor, router: RouterConfig, parts: RouterWeights, routes: Routes, *, positions: Tensor | None = None,
    codes: Codes | None = None,
) -> list[KernelLaunch]:  # fmt: skip
    """x [T, hidden] of any float type, in rows of any stride: normed, unless there is a norm among the parts. positions
    int32 [T]: as `rope.TokenTables` has them. codes: of x, through the norm, for the experts' first matrix, are made
    beside the choice. Choose as `reference.route` does."""
    return [logits_of(x, parts, routes.logits), _choice_of(x, router, parts, routes, positions, codes)]


def logits_of(x: Tensor, parts: RouterWeights, logits: Tensor) -> KernelLaunch:
    """logits fp32 [T, E], or [T, E + 1] with that of a gate: a product in fp32 with few rows of weights."""
    rows, (experts, features) = len(x), parts.weight.shape
    # Estimated: of one row each expert is a warp's, with eight loads of its weights on their way.
    each, some, unroll = (1, 1, 8) if rows == 1 else (4, 4, 2) if rows <= 16 else (16, 8, 1)
    outputs = experts + (parts.gate is not None)
    return KernelLaunch(
        _logits,
        (triton.cdiv(rows, each), triton.cdiv(outputs, some)),
        {
            "x": x, "norm": parts.norm, "router": parts.weight, "gate": parts.gate, "bias": parts.bias,
            "logits": logits, "rows": rows, "experts": experts, "features": features, "x_stride": x.stride(0),
            "logit_stride": logits.stride(0), "eps": float(parts.eps),
        },
        {"ROWS": each, "EXPERTS": some, "HALVINGS": _HALVINGS, "UNROLL": unroll},
        num_warps=some,
    )  # fmt: skip


def _choice_of(
    x: Tensor, router: RouterConfig, parts: RouterWeights, routes: Routes, positions: Tensor | None, codes: Codes | None
) -> KernelLaunch:
    arguments, constants = _codes_beside(x, parts, codes)
    groups = router.groups if router.top_groups < router.groups else 1
    each = router.num_experts // groups
    return KernelLaunch(
        _choose,
        (len(routes.logits), 1 if codes is None else 2),
        {
            "logits": routes.logits, "correction": parts.correction if router.has_correction else None,
            "positions": positions, "experts": routes.experts, "weights": routes.weights, "experts_each": each,
            "logit_stride": routes.logits.stride(0), "sum_epsilon": router.sum_epsilon,
            "sum_floor": router.sum_floor, "factor": router.scale, "jitter": router.jitter, **arguments,
        },
        {
            "GROUPS": groups, "TOP_GROUPS": min(router.top_groups, groups),
            "GROUP_BLOCK": triton.next_power_of_2(groups), "MEMBERS": triton.next_power_of_2(each),
            "TOP_K": router.top_k, "SLOTS": triton.next_power_of_2(router.top_k), "SCORES": router.scores,
            "NORMALIZES": router.normalizes, **constants,
        },
        num_warps=min(16, max(1, constants["BLOCK"] // _COLUMNS_A_WARP)),
    )  # fmt: skip


def _codes_beside(
    x: Tensor, parts: RouterWeights, codes: Codes | None
) -> tuple[dict[str, Tensor | int | float | None], dict[str, Any]]:
    """Arguments and constants of the launch that makes them beside the choice, or does not."""
    if codes is None:
        tensors = dict.fromkeys(("x", "norm", "codes", "code_scale", "code_bias"))
        numbers = {"x_stride": 0, "code_stride": 0, "features": 0, "padded": 0, "eps": 0.0}
        return {**tensors, **numbers}, {"BLOCK": 1, "GROUP": 1, "BITS": 8, "KIND": "plain"}
    features, padded = parts.weight.shape[1], codes.q.shape[1]
    return {
        "x": x, "norm": parts.norm, "codes": codes.q, "code_scale": codes.scale, "code_bias": codes.bias,
        "x_stride": x.stride(0), "code_stride": codes.scale.stride(0), "features": features, "padded": padded,
        "eps": float(parts.eps),
    }, {
        "BLOCK": max(codes.group, triton.next_power_of_2(padded)), "GROUP": codes.group, "BITS": codes.bits,
        "KIND": "plain" if parts.norm is None else "norm",
    }  # fmt: skip
