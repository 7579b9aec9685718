"""A mixture's experts on a GPU for few tokens, by dot products of bytes, see `gemv`: two launches.

The first ends in codes of each expert's gate, a row for each token and slot. In the second a program has a warp for
each slot of a token; they add up what their experts have, weighted, in the order of the slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.expert_record import ExpertTable, address_of, finished_of, matrix_at, weighted
from localllm.kernels.gpu.gemv import GATED_TILES, added_up, rows_of, slice_sums, store_halves
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
from localllm.kernels.gpu.product_end import End, Gate, store_finished, tiles_of
from localllm.kernels.gpu.routing import Routes
from localllm.kernels.tile16 import TILE

_UNROLL = 2  # as of one row of `gemv`


@triton.jit(
    do_not_specialize=[
        "qweight_at", "scale_at", "bias_at", "linear_bias_at", "pairs", "top_k", "tiles", "groups", "features",
        "x_stride", "code_stride",
    ]
)  # fmt: skip
def _expert_gates(
    table, experts, q, x_scale, x_bias, y, code_scale, code_bias,
    qweight_at, scale_at, bias_at, linear_bias_at, pairs, top_k, tiles, groups, features, x_stride, y_stride,
    code_stride,
    TILES: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, GROUP: tl.constexpr, CODE_BITS: tl.constexpr,
    GLU: tl.constexpr, UNROLL: tl.constexpr, ASM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Half of a program's tiles are those of a gate, for a token and one of its slots."""
    after_previous(OVERLAPS)
    pair = tl.program_id(0)
    address = address_of(table, experts + pair, pair < pairs)
    if address == 0:
        return
    qweight, scale, bias = matrix_at(address, qweight_at, scale_at, bias_at, tl.int32, FORM)
    column, tile = tiles_of(tl.program_id(1), features, tiles, TILES, GLU)
    sums = slice_sums(
        qweight, scale, bias, q, x_scale, x_bias, pair // top_k, tile, pairs, tiles, groups, x_stride,
        1, TILES, FORM, SLICES, UNROLL, ASM,
    )  # fmt: skip
    n = rows_of(tile, TILES, SLICES)
    out = finished_of(added_up(sums[0], SLICES), scale, address, linear_bias_at, n, n < tiles * 16, FORM.group is None)
    store_halves(
        out, pair, column, pairs, features, y_stride, code_stride, y, code_scale, code_bias,
        TILES, GROUP, CODE_BITS, GLU,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "qweight_at", "scale_at", "bias_at", "linear_bias_at", "pairs", "top_k", "tiles", "groups", "out_features",
        "x_stride",
    ]
)  # fmt: skip
def _experts_mixed(
    table, experts, weights, elsewhere, q, x_scale, x_bias, y,
    qweight_at, scale_at, bias_at, linear_bias_at, pairs, top_k, tiles, groups, out_features, x_stride, y_stride,
    SLOTS: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, ADDS: tl.constexpr, UNROLL: tl.constexpr,
    ASM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One tile of the experts of all slots of a token. SLOTS: the power of two that holds them."""
    after_previous(OVERLAPS)
    slot = tl.arange(0, SLOTS)
    pair, is_slot = tl.program_id(0) * top_k + slot, slot < top_k
    address = address_of(table, experts + pair, is_slot)
    is_here = address != 0
    is_known = is_here
    if elsewhere is not None:
        is_known = tl.load(experts + pair, mask=is_slot, other=-1) >= 0
    weight = tl.load(weights + pair, mask=is_known, other=0)
    qweight, scale, bias = matrix_at(address, qweight_at, scale_at, bias_at, tl.int32, FORM)
    qweight, scale, bias = qweight[:, None, None], scale[:, None, None], bias[:, None, None]
    # Of those that are not here nothing is read: neither weights nor codes, which nobody wrote.
    row, tile = tl.where(is_here, pair, pairs)[:, None, None], tl.where(is_here, tl.program_id(1), tiles)
    sums = slice_sums(
        qweight, scale, bias, q, x_scale, x_bias, row, tile, pairs, tiles, groups, x_stride,
        1, SLOTS, FORM, SLICES, UNROLL, ASM, EACH=True,
    )  # fmt: skip
    n = rows_of(tile, SLOTS, SLICES)
    out = finished_of(
        added_up(sums[0], SLICES), scale, address[:, None, None], linear_bias_at, n, n < out_features,
        FORM.group is None,
    )  # fmt: skip
    part = tl.max(out, axis=1)  # all slices have the same
    if elsewhere is not None:
        column = tl.program_id(1) * 16 + tl.arange(0, 16)[None, :]
        is_there = (is_known & (address == 0))[:, None] & (column < out_features)
        given = tl.load(elsewhere + pair[:, None].to(tl.int64) * out_features + column, mask=is_there, other=0)
        part = tl.where(is_here[:, None], part, given)
    part = weighted(weight[:, None], part)
    total = added_up(tl.reshape(part, (1, SLOTS, 16)), SLOTS)
    n = tl.program_id(1) * 16 + tl.arange(0, 16)[None, None, :]
    into = tl.broadcast_to(y + tl.program_id(0).to(tl.int64) * y_stride + n, (1, SLOTS, 16))
    store_finished(total, into, (n < out_features) & (slot == 0)[None, :, None], ADDS)


def gates(x: Codes, routes: Routes, experts: ExpertTable, codes: Codes) -> KernelLaunch:
    """x: of T rows, for the experts' first matrix. codes: of T * top_k rows, for their second one."""
    matrix, end = experts.gate_up.shape, End.of(Gate(codes, experts.glu, experts.features))
    pairs, top_k = routes.experts.numel(), routes.experts.shape[1]
    tiles = 2 * max(GATED_TILES, codes.group // TILE)
    return KernelLaunch(
        _expert_gates,
        (pairs, triton.cdiv(2 * triton.cdiv(experts.features, TILE), tiles)),
        {
            "table": experts.addresses, "experts": routes.experts, "q": x.q.view(torch.int32), "x_scale": x.scale,
            "x_bias": x.bias, "x_stride": x.scale.stride(0), "pairs": pairs, "top_k": top_k, "tiles": matrix.tiles,
            "groups": matrix.groups, **experts.gate_up.arguments, **end.arguments,
        },
        {
            "TILES": tiles, "FORM": matrix.weights, "SLICES": matrix.slices, "UNROLL": _UNROLL,
            "ASM": not is_interpreted(), **end.constants,
        },
        num_warps=tiles,
    )  # fmt: skip


def mixed(
    codes: Codes, routes: Routes, experts: ExpertTable, y: Tensor, *, adds: bool, elsewhere: Tensor | None = None
) -> KernelLaunch:
    """codes: of T * top_k rows, see `gates`. y [T, out features] of any float type, in rows of any stride; adds: to
    what is in it. elsewhere fp32 [T * top_k, out features]: of the experts that are not here, what they have before
    they are mixed; other rows are not read."""
    matrix, top_k = experts.down.shape, routes.experts.shape[1]
    slots = triton.next_power_of_2(top_k)
    return KernelLaunch(
        _experts_mixed,
        (len(y), matrix.tiles),
        {
            "table": experts.addresses, "experts": routes.experts, "weights": routes.weights, "elsewhere": elsewhere,
            "q": codes.q.view(torch.int32), "x_scale": codes.scale, "x_bias": codes.bias,
            "x_stride": codes.scale.stride(0), "pairs": routes.experts.numel(), "top_k": top_k, "tiles": matrix.tiles,
            "groups": matrix.groups, "out_features": y.shape[1], "y": y, "y_stride": y.stride(0),
            **experts.down.arguments,
        },
        {
            "SLOTS": slots, "FORM": matrix.weights, "SLICES": matrix.slices, "ADDS": adds, "UNROLL": _UNROLL,
            "ASM": not is_interpreted(),
        },
        num_warps=slots,
    )  # fmt: skip
