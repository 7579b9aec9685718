"""Mamba 2 between its two projections, on a GPU: three launches. `kernels.mamba2_rule` defines what it computes.

The first two are as those of `kernels.gpu.delta`: what one token and its few predecessors decide, and the walk over a
sequence's tokens with a part of a head's state in registers. The third is the norm of each group, with the gates of
what comes out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import activated
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.recurrence import (
    VALUES_A_PROGRAM,
    WORDS,
    SegmentTables,
    convolved,
    due_of,
    first_of,
    floats_at,
    keep_rows,
    raw_of,
    runs_of,
    softplus,
    stop_of,
    store_tails,
    taps_of,
)
from localllm.kernels.mamba2_rule import Mamba2Weights
from localllm.kernels.state_shapes import Mamba2Shape, StatePlace

_NORM_BLOCK = 1024  # features of a group that a program has at once


@triton.jit(do_not_specialize=["state_at", "snapshot_at", "runs"])
def _prepare_mamba(
    wide, gates, conv, conv_bias, a_log, dt_bias, prepared, firsts, segments, least, most, state_at, snapshot_at,
    wide_stride, runs,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr,
    ROW: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, MATRIX_BYTES: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has x of a head, or B or C of a group, and a run of a segment's tokens."""
    after_previous(OVERLAPS)
    unit, run, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, state, row = tl.load(words + 2), tl.load(words + 4), tl.load(words + 5)
    state += state_at
    end, ring = past + last - begin, floats_at(state, MATRIX_BYTES)
    first = first_of(state, past, POSITIONS)
    if (unit == 0) & (run == 0):
        tl.store(firsts + tl.program_id(2), first)
    is_head, lane = unit < HEADS, tl.arange(0, BLOCK)
    column = tl.where(is_head, unit * HEAD_DIM, HEADS * HEAD_DIM + (unit - HEADS) * STATE) + lane
    mask = lane < tl.where(is_head, HEAD_DIM, STATE)
    bias = tl.load(conv_bias + column, mask=mask, other=0.0)
    weights = taps_of(conv, column, mask, CHANNELS, TAPS)
    each = (end - first + runs - 1) // runs
    for position in range(first + run * each, tl.minimum(first + run * each + each, end)):
        value = convolved(
            bias, weights, wide, gates, ring, begin, past, position, column, mask, wide_stride,
            CHANNELS, ROW, KEPT, TAPS,
        )  # fmt: skip
        into = prepared + (row + position - past) * (CHANNELS + 2 * HEADS)
        tl.store(into + column, activated(value, "silu"), mask=mask)
        if is_head:
            at = CHANNELS + unit
            dt = raw_of(wide, gates, ring, begin, past, position, at, True, wide_stride, CHANNELS, ROW, KEPT)
            step = softplus(dt + tl.load(dt_bias + unit))
            step = tl.where(step < least, least, tl.where(step > most, most, step))  # NaN stays
            tl.store(into + at, step)
            tl.store(into + at + HEADS, tl.exp(-tl.exp(tl.load(a_log + unit)) * step))
    if run == 0:
        store_tails(
            wide, gates, ring, words, begin, past, first, end, snapshot_at, column, mask, wide_stride,
            CHANNELS, ROW, KEPT, TAPS, MATRIX_BYTES,
        )  # fmt: skip
        if is_head:
            at = CHANNELS + unit + tl.arange(0, 1)
            store_tails(
                wide, gates, ring, words, begin, past, first, end, snapshot_at, at, at < ROW, wide_stride,
                CHANNELS, ROW, KEPT, TAPS, MATRIX_BYTES,
            )  # fmt: skip


@triton.jit
def _token(
    row, group, head, key, value, is_there,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What was prepared of a token: B, C, x, step and decay."""
    b_at = row + HEADS * HEAD_DIM + group * STATE + key
    mask = is_there & (key < STATE)
    b = tl.load(b_at, mask=mask, other=0.0)
    c = tl.load(b_at + GROUPS * STATE, mask=mask, other=0.0)
    x = tl.load(row + head * HEAD_DIM + value, mask=is_there, other=0.0)
    step = tl.load(row + CHANNELS + head, mask=is_there, other=0.0)
    decay = tl.load(row + CHANNELS + HEADS + head, mask=is_there, other=0.0)
    return b, c, x, step, decay


@triton.jit(do_not_specialize=["state_at", "snapshot_at"])
def _take_in_mamba(
    wide, gates, d, prepared, firsts, mixed, segments, state_at, snapshot_at, wide_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr,
    ROW: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, MATRIX_BYTES: tl.constexpr, POSITIONS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SHARE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has VALUES features of a head in one segment, and SHARE columns of the rows that are kept."""
    after_previous(OVERLAPS)
    part, head, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, committed, row = tl.load(words + 2), tl.load(words + 3), tl.load(words + 5)
    state = tl.load(words + 4) + state_at
    pairs, num = tl.load(words + 6).to(tl.pointer_type(tl.int64)), tl.load(words + 7)
    first, end = tl.load(firsts + tl.program_id(2)), past + last - begin
    own_end, group = tl.maximum(committed, first), head // (HEADS // GROUPS)
    key, value = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    place = (head * HEAD_DIM + value // LANES * LANES)[None, :] * STATE + key[:, None] * LANES
    place, is_key = place + (value % LANES)[None, :], (key < STATE)[:, None]
    S, skip = tl.load(floats_at(state, 0) + place, mask=is_key, other=0.0), tl.load(d + head)
    at = prepared + (row + first - past) * (CHANNELS + 2 * HEADS)
    b, c, x, step, decay = _token(at, group, head, key, value, first < end, HEADS, HEAD_DIM, GROUPS, STATE, CHANNELS)
    n = due_of(pairs, num, first)
    stop, target = stop_of(pairs, n, num, snapshot_at, state, own_end)
    for position in range(first, end):
        at += CHANNELS + 2 * HEADS
        next_b, next_c, next_x, next_step, next_decay = _token(
            at, group, head, key, value, position + 1 < end, HEADS, HEAD_DIM, GROUPS, STATE, CHANNELS
        )
        # The sum is of the state before this token, so that taking it in does not wait.
        taken, zeros = x * step, tl.zeros_like(x)
        y = tl.fma(taken, zeros + tl.sum(b * c, axis=0), tl.sum(S * c[:, None], axis=0) * decay)
        S = tl.fma(tl.broadcast_to(b[:, None], S.shape), tl.broadcast_to(taken[None, :], S.shape), S * decay)
        into = mixed + ((begin + position - past) * HEADS + head) * HEAD_DIM + value
        tl.store(into, tl.fma(x, zeros + skip, y), mask=position >= past)
        while position + 1 == stop:
            tl.store(floats_at(target, 0) + place, S, mask=is_key)
            n += 1
            stop, target = stop_of(pairs, n, num, snapshot_at, state, own_end)
        b, c, x, step, decay = next_b, next_c, next_x, next_step, next_decay
    if part == 0:
        tl.store((state + POSITIONS).to(tl.pointer_type(tl.int64)) + head, own_end)
    column = (head * (HEAD_DIM // VALUES) + part) * SHARE + tl.arange(0, SHARE)
    keep_rows(wide, gates, state, begin, past, end, column, wide_stride, CHANNELS, ROW, KEPT, MATRIX_BYTES)


@triton.jit
def _group_norm(
    mixed, wide, norm, out, positions, eps, wide_stride,
    GROUPS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has a group of FEATURES of a row."""
    after_previous(OVERLAPS)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(positions + row) < 0:
        return
    lane, scale = tl.arange(0, BLOCK), 1.0
    if HAS_NORM:
        squares = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, FEATURES, BLOCK):
            mask, column = first + lane < FEATURES, group * FEATURES + first + lane
            y = tl.load(mixed + row * (GROUPS * FEATURES) + column, mask=mask, other=0.0)
            if IS_GATED:
                z = tl.load(wide + row * wide_stride + column, mask=mask, other=0.0).to(tl.float32)
                y = y * activated(z, "silu")
            squares = tl.fma(y, y, squares)
        scale = tl.rsqrt(tl.sum(squares, axis=0) / FEATURES + eps)
    for first in range(0, FEATURES, BLOCK):
        mask, column = first + lane < FEATURES, group * FEATURES + first + lane
        y = tl.load(mixed + row * (GROUPS * FEATURES) + column, mask=mask, other=0.0)
        z = tl.load(wide + row * wide_stride + column, mask=mask, other=0.0).to(tl.float32)
        y = y * activated(z, "silu") * scale
        if HAS_NORM:
            y = y * tl.load(norm + column, mask=mask, other=0.0)
        tl.store(out + row * (GROUPS * FEATURES) + column, y, mask=mask)


def mix(
    wide: Tensor,
    steps: Tensor,
    out: Tensor,
    tables: SegmentTables,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    place: StatePlace,
) -> list[KernelLaunch]:
    """wide [M, features + channels], in rows of any stride: z, then x, B and C before the convolution, of any float
    type. steps fp32 [M, num_heads]. out fp32 [M, features]. place: of the layer's part."""
    assert shape.fills_vectors and steps.dtype is torch.float32 and steps.is_contiguous() and wide.stride(1) == 1
    own = {name: getattr(weights, name) for name in ("conv", "conv_bias", "a_log", "dt_bias")}
    assert all(each.dtype is torch.float32 and each.is_contiguous() for each in (*own.values(), weights.d, out))
    rows, device, segments = len(tables.positions), wide.device, tables.segments
    prepared = torch.empty((tables.num_rows, shape.channels + 2 * shape.num_heads), device=device)
    firsts = torch.empty(len(segments), dtype=torch.int64, device=device)
    mixed = torch.empty((rows, shape.features), device=device)
    shared: dict[str, Tensor | int | float | None] = {
        "wide": wide[:, shape.features :], "gates": steps, "prepared": prepared, "firsts": firsts,
        "segments": segments, "state_at": place.state, "snapshot_at": place.snapshot, "wide_stride": wide.stride(0),
    }  # fmt: skip
    sizes = {
        "HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "STATE": shape.state_size,
        "CHANNELS": shape.channels, "ROW": shape.row_floats, "KEPT": shape.kept_rows,
        "MATRIX_BYTES": shape.matrix_bytes, "POSITIONS": shape.positions_begin,
    }  # fmt: skip
    runs = runs_of(rows)
    block = triton.next_power_of_2(max(shape.state_size, shape.head_dim))
    preparing = KernelLaunch(
        _prepare_mamba,
        (shape.num_heads + 2 * shape.num_groups, runs, len(segments)),
        {**shared, **own, "least": float(weights.least_step), "most": float(weights.most_step), "runs": runs},
        {**sizes, "TAPS": shape.conv_width, "BLOCK": block},
        num_warps=1,
    )
    parts = shape.head_dim // VALUES_A_PROGRAM
    taking = KernelLaunch(
        _take_in_mamba,
        (parts, shape.num_heads, len(segments)),
        {**shared, "d": weights.d, "mixed": mixed},
        {
            **sizes, "GROUPS": shape.num_groups, "LANES": shape.lanes, "KEYS": triton.next_power_of_2(shape.state_size),
            "VALUES": VALUES_A_PROGRAM,
            "SHARE": triton.next_power_of_2(triton.cdiv(shape.row_floats, parts * shape.num_heads)),
        },
        num_warps=1,
        num_stages=1,
    )  # fmt: skip
    return [preparing, taking, _norm(mixed, wide, out, tables, weights, shape)]


def _norm(
    mixed: Tensor, wide: Tensor, out: Tensor, tables: SegmentTables, weights: Mamba2Weights, shape: Mamba2Shape
) -> KernelLaunch:
    features = shape.features // shape.num_groups
    return KernelLaunch(
        _group_norm,
        (len(tables.positions), shape.num_groups),
        {
            "mixed": mixed, "wide": wide, "norm": weights.norm, "out": out, "positions": tables.positions,
            "eps": float(weights.eps), "wide_stride": wide.stride(0),
        },
        {
            "GROUPS": shape.num_groups, "FEATURES": features,
            "BLOCK": min(triton.next_power_of_2(features), _NORM_BLOCK), "HAS_NORM": weights.norm is not None,
            "IS_GATED": weights.norm_is_gated,
        },
        num_warps=4,
    )  # fmt: skip
