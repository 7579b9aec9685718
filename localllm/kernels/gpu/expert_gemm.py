"""A mixture's experts on a GPU for many tokens, on the tensor cores, see `gemm`: the tokens by their experts, each
expert's gate, in codes, its second matrix, and the sums over the slots; four launches.

A row is computed as `expert_gemv` computes it, and added in its order: it has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.expert_record import ExpertTable, RecordMatrix, address_of, finished_of, matrix_at, weighted
from localllm.kernels.gpu.expert_rows import ExpertRows
from localllm.kernels.gpu.gemm import ProgramShape, rows_of, slice_sums, store_halves
from localllm.kernels.gpu.launch import KernelLaunch, after_previous, is_interpreted
from localllm.kernels.gpu.product_end import End, Gate, store_finished, tiles_of
from localllm.kernels.gpu.routing import Routes
from localllm.kernels.tile16 import TILE

_REDUCED = 256  # columns of a program that adds up slots


@triton.jit(
    do_not_specialize=[
        "qweight_at", "scale_at", "bias_at", "linear_bias_at", "most", "slots", "groups", "tiles", "out_features",
        "features", "code_stride",
    ]
)  # fmt: skip
def _expert_gemm(
    table, pairs, blocks, q, x_scale, x_bias, y, code_scale, code_bias,
    qweight_at, scale_at, bias_at, linear_bias_at, most, slots, groups, tiles, out_features, features, x_stride,
    y_stride, code_stride,
    TILES: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, SLICES: tl.constexpr, GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, GLU: tl.constexpr, OPERAND: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """slots: that share a row of x. A row of y is a pair's. GLU: as `_gemm` has it."""
    after_previous(OVERLAPS)
    block, lane = blocks + tl.program_id(0), tl.arange(0, ROWS)
    expert = tl.load(block)
    if expert < 0:
        return
    is_m = lane < tl.load(block + 2 * most)
    pair = tl.load(pairs + tl.load(block + most) + lane, mask=is_m, other=0)
    BYTE: tl.constexpr = tl.uint8 if FORM.bits == 4 else tl.int8
    address = tl.load(table + expert)
    qweight, scale, bias = matrix_at(address, qweight_at, scale_at, bias_at, BYTE, FORM)
    column, tile = tiles_of(tl.program_id(1), features, tiles, TILES, GLU)
    n = rows_of(tile, TILES)
    sums = slice_sums(
        qweight, scale, bias, q, x_scale, x_bias, y, tile, n, pair // slots, is_m, is_m, tiles, groups, x_stride, 0, 0,
        TILES, ROWS, FORM, SLICES, SLICES, OPERAND,
    )  # fmt: skip
    at = n[:, None]
    is_n = at < out_features
    out = finished_of(sums, scale, address, linear_bias_at, at, is_n, FORM.group is None)
    if GLU is not None:
        store_halves(
            out, pair, is_m, column, features, y_stride, code_stride, y, code_scale, code_bias,
            TILES, ROWS, GROUP, CODE_BITS, GLU,
        )  # fmt: skip
    else:
        into = y + pair[None, :].to(tl.int64) * y_stride + at
        store_finished(out, into, is_n & is_m[None, :], False)


@triton.jit(do_not_specialize=["out_features"])
def _slots_added(
    table, experts, weights, elsewhere, parts, y, out_features, part_stride, y_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_n, total = n < out_features, tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = row * TOP_K + slot
        is_here = address_of(table, experts + pair, slot < TOP_K) != 0  # else nobody wrote its part
        part = tl.load(parts + pair * part_stride + n, mask=is_n & is_here, other=0)
        is_known = is_here
        if elsewhere is not None:
            is_known = tl.load(experts + pair) >= 0
            is_there = is_known & (is_here == 0)
            part = tl.where(is_here, part, tl.load(elsewhere + pair * out_features + n, mask=is_n & is_there, other=0))
        total = total + weighted(tl.where(is_known, tl.load(weights + pair), 0.0), part)
    store_finished(total, y + row * y_stride + n, is_n, ADDS)


def _product(
    x: Codes, slots: int, matrix: RecordMatrix, table: Tensor, rows: ExpertRows, y: Tensor | Gate, shape: ProgramShape
) -> KernelLaunch:
    """slots: that share a row of x."""
    packed, end = matrix.shape, End.of(y)
    columns = 2 * y.features if isinstance(y, Gate) else y.shape[1]
    return KernelLaunch(
        _expert_gemm,
        (rows.blocks.shape[1], triton.cdiv(columns, shape.weight_rows)),
        {
            "table": table, "pairs": rows.pairs, "blocks": rows.blocks, "q": x.q, "x_scale": x.scale, "x_bias": x.bias,
            "x_stride": x.scale.stride(0), "most": rows.blocks.shape[1], "slots": slots, "groups": packed.groups,
            "tiles": packed.tiles, "out_features": columns, **matrix.arguments,
            **end.arguments,
        },
        {
            "TILES": shape.weight_rows // TILE, "ROWS": rows.each, "FORM": packed.weights, "SLICES": packed.slices,
            **end.constants, "OPERAND": tl.float32 if is_interpreted() else tl.int8,
        },
        shape.num_warps,
        shape.num_stages,
    )  # fmt: skip


def gates(
    x: Codes, rows: ExpertRows, experts: ExpertTable, codes: Codes, top_k: int, shape: ProgramShape
) -> KernelLaunch:
    """Do as `expert_gemv.gates`, of grouped rows."""
    gate = Gate(codes, experts.glu, experts.features)
    return _product(x, top_k, experts.gate_up, experts.addresses, rows, gate, shape)


def mixed(
    codes: Codes, rows: ExpertRows, routes: Routes, experts: ExpertTable, y: Tensor, parts: Tensor,
    shape: ProgramShape, *, adds: bool, elsewhere: Tensor | None = None,
) -> list[KernelLaunch]:  # fmt: skip
    """Do as `expert_gemv.mixed`. parts: fp32 [T * top_k, out features], what the experts have before they are
    mixed."""
    block, top_k = min(_REDUCED, triton.next_power_of_2(y.shape[1])), routes.experts.shape[1]
    added = KernelLaunch(
        _slots_added,
        (len(y), triton.cdiv(y.shape[1], block)),
        {
            "table": experts.addresses, "experts": routes.experts, "weights": routes.weights, "elsewhere": elsewhere,
            "parts": parts, "y": y, "out_features": y.shape[1], "part_stride": parts.stride(0), "y_stride": y.stride(0),
        },
        {"TOP_K": top_k, "BLOCK": block, "ADDS": adds},
    )  # fmt: skip
    return [_product(codes, 1, experts.down, experts.addresses, rows, parts, shape), added]
