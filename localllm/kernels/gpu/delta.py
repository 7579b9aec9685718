"""Gated DeltaNet and Kimi Delta Attention between their projections, on a GPU: three launches. `kernels.delta_rule`
defines what they compute.

The first does what one token or its few predecessors decide: the convolution, the lengths of queries and keys, the
gates. The second walks a sequence's tokens: a program has some value features of a head, and their part of the state in
registers. The state is read once; it is written where the tokens end that count for certain, and where a snapshot is
due. Where key features have decays, these multiply key and query before the state does. The third is the norm with the
gate of what comes out, as floats or as codes for the matrix that follows.

Every token is computed by the same operations in the same order: no bit depends on the rows beside it, nor on which
step computes it. So there is no form for chunks of a prompt, which would give a prompt's tokens other bits than a
step's.

The second writes the rows that a sequence keeps, when the first, which reads them, is done. A program of the second has
its share of a row: it knows of no others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import delta_rule
from localllm.kernels.delta_rule import DeltaWeights
from localllm.kernels.gpu.activations import Codes, activated
from localllm.kernels.gpu.attention_merge import can_code, store_codes
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
from localllm.kernels.state_shapes import DeltaShape, StatePlace

_L2_EPS = tl.constexpr(delta_rule.L2_EPS)


@triton.jit
def _store_gates(
    wide, gates, a_log, dt_bias, into, ring, begin, past, position, head, lane, beta_scale, wide_stride,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr,
    BY_KEY: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """beta of a token and a value head, and the decay of the head or of its key features."""
    at, first_decay = CHANNELS + head, CHANNELS + VALUE_HEADS
    if BY_KEY:
        own, is_own = head * KEY_DIM + lane, lane < KEY_DIM
    else:
        own, is_own = head, True
    b = raw_of(wide, gates, ring, begin, past, position, at, True, wide_stride, CHANNELS, ROW, KEPT, APART)
    a = raw_of(
        wide, gates + APART, ring, begin, past, position, first_decay + own, is_own, wide_stride,
        CHANNELS, ROW, KEPT, APART,
    )  # fmt: skip
    rate = tl.exp(tl.load(a_log + head)) * softplus(a + tl.load(dt_bias + own, mask=is_own, other=0.0))
    tl.store(into + at, beta_scale / (1 + tl.exp(-b)))
    tl.store(into + first_decay + own, tl.exp(-rate), mask=is_own)


@triton.jit(do_not_specialize=["state_at", "snapshot_at", "runs"])
def _prepare(
    wide, gates, conv, a_log, dt_bias, prepared, firsts, segments, beta_scale, state_at, snapshot_at, wide_stride, runs,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, MATRIX_BYTES: tl.constexpr,
    POSITIONS: tl.constexpr, BY_KEY: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has a head of the queries, keys or values, and a run of a segment's tokens."""
    after_previous(OVERLAPS)
    unit, run, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, state, row = tl.load(words + 2), tl.load(words + 4) + state_at, tl.load(words + 5)
    end, ring = past + last - begin, floats_at(state, MATRIX_BYTES)
    first = first_of(state, past, POSITIONS)
    if (unit == 0) & (run == 0):
        tl.store(firsts + tl.program_id(2), first)
    head, is_value = unit - 2 * KEY_HEADS, unit >= 2 * KEY_HEADS
    lane = tl.arange(0, BLOCK)
    column = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, unit * KEY_DIM) + lane
    mask = lane < tl.where(is_value, VALUE_DIM, KEY_DIM)
    weights = taps_of(conv, column, mask, CHANNELS, TAPS)
    each = (end - first + runs - 1) // runs
    for position in range(first + run * each, tl.minimum(first + run * each + each, end)):
        value = convolved(
            tl.zeros((BLOCK,), tl.float32), weights, wide, gates, ring, begin, past, position, column, mask,
            wide_stride, CHANNELS, ROW, KEPT, TAPS,
        )  # fmt: skip
        value = activated(value, "silu")
        into = prepared + (row + position - past) * ROW
        if is_value:
            _store_gates(
                wide, gates, a_log, dt_bias, into, ring, begin, past, position, head, lane, beta_scale, wide_stride,
                VALUE_HEADS, KEY_DIM, CHANNELS, ROW, KEPT, BY_KEY, APART,
            )  # fmt: skip
        else:
            value = value * tl.rsqrt(tl.sum(value * value, axis=0) + _L2_EPS)
            value = tl.where(unit < KEY_HEADS, value * KEY_DIM**-0.5, value)
        tl.store(into + column, value, mask=mask)
    if run == 0:
        store_tails(
            wide, gates, ring, words, begin, past, first, end, snapshot_at, column, mask, wide_stride,
            CHANNELS, ROW, KEPT, TAPS, MATRIX_BYTES,
        )  # fmt: skip
        if is_value:
            at = CHANNELS + head + tl.arange(0, 1 if BY_KEY else 2) * VALUE_HEADS
            store_tails(
                wide, gates, ring, words, begin, past, first, end, snapshot_at, at, at < ROW, wide_stride,
                CHANNELS, ROW, KEPT, TAPS, MATRIX_BYTES, APART,
            )  # fmt: skip
            if BY_KEY:
                at = CHANNELS + VALUE_HEADS + head * KEY_DIM + lane
                store_tails(
                    wide, gates + APART, ring, words, begin, past, first, end, snapshot_at, at, lane < KEY_DIM,
                    wide_stride, CHANNELS, ROW, KEPT, TAPS, MATRIX_BYTES, APART,
                )  # fmt: skip


@triton.jit
def _token(
    row, key_head, head, key, value, is_there,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """What was prepared of a token: query, key, value, beta and decay, or decays of key features."""
    query_at = row + key_head * KEY_DIM + key
    mask = is_there & (key < KEY_DIM)
    q = tl.load(query_at, mask=mask, other=0.0)
    k = tl.load(query_at + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
    v = tl.load(row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value, mask=is_there, other=0.0)
    beta = tl.load(row + CHANNELS + head, mask=is_there, other=0.0)
    if BY_KEY:
        decay = tl.load(row + CHANNELS + VALUE_HEADS + head * KEY_DIM + key, mask=mask, other=0.0)
    else:
        decay = tl.load(row + CHANNELS + VALUE_HEADS + head, mask=is_there, other=0.0)
    return q, k, v, beta, decay


@triton.jit
def _after_token(S, q, k, v, beta, decay, BY_KEY: tl.constexpr):
    """The state behind a token, and what is read out. All sums are of the state before it, so that they do not wait for
    each other."""
    if BY_KEY:
        by_key, by_query = tl.sum(S * (k * decay)[:, None], axis=0), tl.sum(S * (q * decay)[:, None], axis=0)
        delta = (v - by_key) * beta
        decay = decay[:, None]
    else:
        by_key, by_query = tl.sum(S * k[:, None], axis=0), tl.sum(S * q[:, None], axis=0)
        delta = tl.fma(by_key, tl.zeros_like(v) - decay, v) * beta
        by_query *= decay
    o = tl.fma(delta, tl.zeros_like(v) + tl.sum(q * k, axis=0), by_query)
    return tl.fma(tl.broadcast_to(k[:, None], S.shape), tl.broadcast_to(delta[None, :], S.shape), S * decay), o


@triton.jit(do_not_specialize=["state_at", "snapshot_at"])
def _take_in(
    wide, gates, prepared, firsts, mixed, segments, state_at, snapshot_at, wide_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, MATRIX_BYTES: tl.constexpr,
    POSITIONS: tl.constexpr, BY_KEY: tl.constexpr, APART: tl.constexpr, IS_TILED: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SHARE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has VALUES features of a value head in one segment, and SHARE columns of the rows that are kept."""
    after_previous(OVERLAPS)
    part, head, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, committed, row = tl.load(words + 2), tl.load(words + 3), tl.load(words + 5)
    state = tl.load(words + 4) + state_at
    pairs, num = tl.load(words + 6).to(tl.pointer_type(tl.int64)), tl.load(words + 7)
    first, end = tl.load(firsts + tl.program_id(2)), past + last - begin
    own_end = tl.maximum(committed, first)
    key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
    key, value = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    place = (head * VALUE_DIM + value // LANES * LANES)[None, :] * KEY_DIM + key[:, None] * LANES
    place, is_key = place + (value % LANES)[None, :], (key < KEY_DIM)[:, None]
    S = tl.load(floats_at(state, 0) + place, mask=is_key, other=0.0)
    at = prepared + (row + first - past) * ROW
    q, k, v, beta, decay = _token(
        at, key_head, head, key, value, first < end, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS, BY_KEY
    )
    n = due_of(pairs, num, first)
    stop, target = stop_of(pairs, n, num, snapshot_at, state, own_end)
    for position in range(first, end):
        at += ROW
        next_q, next_k, next_v, next_beta, next_decay = _token(
            at, key_head, head, key, value, position + 1 < end,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS, BY_KEY,
        )  # fmt: skip
        S, o = _after_token(S, q, k, v, beta, decay, BY_KEY)
        into = mixed + ((begin + position - past) * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(into, o, mask=position >= past)
        while position + 1 == stop:
            tl.store(floats_at(target, 0) + place, S, mask=is_key)
            n += 1
            stop, target = stop_of(pairs, n, num, snapshot_at, state, own_end)
        q, k, v, beta, decay = next_q, next_k, next_v, next_beta, next_decay
    if part == 0:
        tl.store((state + POSITIONS).to(tl.pointer_type(tl.int64)) + head, own_end)
    column = (head * (VALUE_DIM // VALUES) + part) * SHARE + tl.arange(0, SHARE)
    if APART > 0:
        gates += tl.where(column < CHANNELS + VALUE_HEADS, 0, APART)
    keep_rows(wide, gates, state, begin, past, end, column, wide_stride, CHANNELS, ROW, KEPT, MATRIX_BYTES, APART)


@triton.jit(do_not_specialize=["code_stride"])
def _gated_norm(
    mixed, z, norm, out, code_scale, code_bias, positions, eps, z_stride, code_stride,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
    CODE_GROUP: tl.constexpr, CODE_BITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(positions + row) < 0:
        return
    lane = tl.arange(0, BLOCK)
    mask, at = lane < VALUE_DIM, (row * VALUE_HEADS + head) * VALUE_DIM + lane
    o = tl.load(mixed + at, mask=mask, other=0.0)
    opened = tl.load(z + row * z_stride + head * VALUE_DIM + lane, mask=mask, other=0.0).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, axis=0) / VALUE_DIM + eps) * tl.load(norm + lane, mask=mask, other=0.0)
    y = y * activated(opened, GATE)
    if CODE_GROUP > 0:
        groups: tl.constexpr = BLOCK // CODE_GROUP
        store_codes(
            tl.reshape(y, (groups, CODE_GROUP)), out, code_scale, code_bias, row, head * VALUE_DIM,
            VALUE_HEADS * VALUE_DIM, code_stride, groups, CODE_GROUP, CODE_BITS,
        )  # fmt: skip
    else:
        tl.store(out + at, y, mask=mask)


def mix(
    wide: Tensor, gates: Tensor, z: Tensor, out: Tensor | Codes, tables: SegmentTables, weights: DeltaWeights,
    shape: DeltaShape, place: StatePlace,
) -> list[KernelLaunch]:  # fmt: skip
    """wide [M, channels or more]: queries, keys and values before the convolution; z [M, value features or more]; each
    of any float type, in rows of any stride. gates fp32 [M, value heads + decay features, or more]: b in front, a at
    the end. out fp32 [M, value features], or its codes where `can_code` has heads of so many. place: of the layer's
    part."""
    assert shape.fills_vectors and gates.dtype is torch.float32 and gates.is_contiguous()
    assert wide.stride(1) == z.stride(1) == 1 and (shape.decays == "key" or gates.shape[1] == 2 * shape.value_heads)
    own = (weights.conv, weights.a_log, weights.dt_bias, weights.norm)
    assert all(each.dtype is torch.float32 and each.is_contiguous() for each in own)
    rows, device, segments = len(tables.positions), wide.device, tables.segments
    prepared = torch.empty((tables.num_rows, shape.row_floats), device=device)
    firsts = torch.empty(len(segments), dtype=torch.int64, device=device)
    mixed = torch.empty((rows, shape.value_features), device=device)
    shared: dict[str, Tensor | int | float | None] = {
        "wide": wide, "gates": gates, "prepared": prepared, "firsts": firsts, "segments": segments,
        "state_at": place.state, "snapshot_at": place.snapshot, "wide_stride": wide.stride(0),
    }  # fmt: skip
    sizes, runs = _sizes(shape, gates), runs_of(rows)
    preparing = KernelLaunch(
        _prepare,
        (2 * shape.key_heads + shape.value_heads, runs, len(segments)),
        {
            **shared, "conv": weights.conv, "a_log": weights.a_log, "dt_bias": weights.dt_bias,
            "beta_scale": float(weights.beta_scale), "runs": runs,
        },
        {
            **sizes, "TAPS": shape.conv_width,
            "BLOCK": triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        },
        num_warps=1,
    )  # fmt: skip
    parts = shape.value_dim // VALUES_A_PROGRAM
    taking = KernelLaunch(
        _take_in,
        (parts, shape.value_heads, len(segments)),
        {**shared, "mixed": mixed},
        {
            **sizes, "LANES": shape.lanes, "IS_TILED": shape.is_tiled,
            "KEYS": triton.next_power_of_2(shape.key_dim), "VALUES": VALUES_A_PROGRAM,
            "SHARE": triton.next_power_of_2(triton.cdiv(shape.row_floats, parts * shape.value_heads)),
        },
        num_warps=1,
        num_stages=1,
    )  # fmt: skip
    return [preparing, taking, _norm(mixed, z, out, tables, weights, shape)]


def _sizes(shape: DeltaShape, gates: Tensor) -> dict[str, Any]:
    return {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim, "CHANNELS": shape.channels, "ROW": shape.row_floats, "KEPT": shape.kept_rows,
        "MATRIX_BYTES": shape.matrix_bytes, "POSITIONS": shape.positions_begin, "BY_KEY": shape.decays == "key",
        "APART": gates.shape[1] - shape.value_heads - shape.decay_features,
    }  # fmt: skip


def _norm(
    mixed: Tensor, z: Tensor, out: Tensor | Codes, tables: SegmentTables, weights: DeltaWeights, shape: DeltaShape
) -> KernelLaunch:
    codes = out if isinstance(out, Codes) else None
    assert codes is None or (can_code(shape.value_dim, codes.group) and codes.q.shape[1] == shape.value_features)
    return KernelLaunch(
        _gated_norm,
        (len(tables.positions), shape.value_heads),
        {
            "mixed": mixed, "z": z, "norm": weights.norm, "out": out.q if isinstance(out, Codes) else out,
            "code_scale": None if codes is None else codes.scale, "code_bias": None if codes is None else codes.bias,
            "positions": tables.positions, "eps": float(weights.eps), "z_stride": z.stride(0),
            "code_stride": 0 if codes is None else codes.scale.stride(0),
        },
        {
            "VALUE_HEADS": shape.value_heads, "VALUE_DIM": shape.value_dim, "GATE": weights.gate,
            "BLOCK": triton.next_power_of_2(shape.value_dim), "CODE_GROUP": 0 if codes is None else codes.group,
            "CODE_BITS": 0 if codes is None else codes.bits,
        },
        num_warps=1,
    )  # fmt: skip
