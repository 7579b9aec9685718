"""A time mix of RWKV-7 between its products, on a GPU: three launches. `kernels.rwkv7` defines what it computes.

The first two are as those of `kernels.gpu.delta`: what one token decides, and the walk over a sequence's tokens with a
part of a head's state in registers. The third is the norm of each head, with the bonus and the gates of what comes out.

What a sequence keeps of a token has values that are mixed with those of the first layer already. So the first launch
writes these rows for the second one, which brings them to where they are kept, and to snapshots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import rwkv7
from localllm.kernels.gpu.activations import Codes, activated
from localllm.kernels.gpu.attention_merge import can_code, store_codes
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.recurrence import (
    VALUES_A_PROGRAM,
    WORDS,
    SegmentTables,
    due_of,
    first_of,
    floats_at,
    keep_rows,
    runs_of,
    stop_of,
    store_tails,
)
from localllm.kernels.rwkv7 import TimeMixWeights
from localllm.kernels.state_shapes import RWKV7_KEPT, Rwkv7Shape, StatePlace

_LOG_DECAY, _SMALLEST = tl.constexpr(rwkv7.LOG_DECAY), tl.constexpr(rwkv7.SMALLEST_NORM)
_KEPT_PARTS = tl.constexpr(len(RWKV7_KEPT))
_MADE_PARTS = tl.constexpr(5)  # of a token: decay, unit, what is lost under that, below zero, key, value


class Projected(NamedTuple):
    """What is made of each token, fp32 [M, features]: see `RWKV7_PROJECTED`. value_gate: None in the layer whose values
    the others are mixed with."""

    x: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    a: Tensor
    r: Tensor
    g: Tensor
    value_gate: Tensor | None


@triton.jit
def _raw(new, kept, is_new, mask):
    old = tl.load(kept, mask=mask & (not is_new), other=0.0)
    return tl.where(is_new, tl.load(new, mask=mask & is_new, other=0.0), old)


@triton.jit
def _store_parts(into, first, second, third, fourth, fifth, mask, FEATURES: tl.constexpr):
    tl.store(into, first, mask=mask)
    tl.store(into + FEATURES, second, mask=mask)
    tl.store(into + 2 * FEATURES, third, mask=mask)
    tl.store(into + 3 * FEATURES, fourth, mask=mask)
    tl.store(into + 4 * FEATURES, fifth, mask=mask)


@triton.jit(do_not_specialize=["state_at", "runs"])
def _prepare_rwkv(
    x, k, v, w, a, r, value_gate, first_values, removal_key, rate_key, bonus, made, rows, bonuses, firsts, segments,
    state_at, runs,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEPT: tl.constexpr, MATRIX_BYTES: tl.constexpr,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has a head and a run of a segment's tokens."""
    after_previous(OVERLAPS)
    head, run, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, state, row = tl.load(words + 2), tl.load(words + 4), tl.load(words + 5)
    state += state_at
    end, ring = past + last - begin, floats_at(state, MATRIX_BYTES)
    first = first_of(state, past, POSITIONS)
    if (head == 0) & (run == 0):
        tl.store(firsts + tl.program_id(2), first)
    features: tl.constexpr = HEADS * HEAD_DIM
    lane = tl.arange(0, BLOCK)
    mask, column = lane < HEAD_DIM, head * HEAD_DIM + lane
    removing = tl.load(removal_key + column, mask=mask, other=0.0)
    replacing = tl.load(rate_key + column, mask=mask, other=0.0)
    weighting = tl.load(bonus + column, mask=mask, other=0.0)
    each = (end - first + runs - 1) // runs
    for position in range(first + run * each, tl.minimum(first + run * each + each, end)):
        is_new, batch_row = position >= past, begin + position - past
        at, kept = batch_row * features + column, ring + position % KEPT * (_KEPT_PARTS * features) + column
        raw_key = _raw(k + at, kept + features, is_new, mask)
        value = _raw(v + at, kept + 2 * features, is_new, mask)
        raw_decay = _raw(w + at, kept + 3 * features, is_new, mask)
        raw_rate = _raw(a + at, kept + 4 * features, is_new, mask)
        if value_gate is None:
            tl.store(first_values + at, value, mask=mask & is_new)
        else:
            share = activated(tl.load(value_gate + at, mask=mask & is_new, other=0.0), "sigmoid")
            change = tl.load(first_values + at, mask=mask & is_new, other=0.0) - value
            value = tl.where(is_new, tl.fma(change, share, value), value)
        rate = activated(raw_rate, "sigmoid")
        unit = raw_key * removing
        length = tl.sqrt(tl.sum(unit * unit, axis=0))
        unit = unit / tl.where(length < _SMALLEST, _SMALLEST, length)  # NaN stays
        key = tl.fma(raw_key * (rate - 1), replacing, raw_key)
        into = made + (row + position - past) * (_MADE_PARTS * features) + column
        decay = tl.exp(activated(raw_decay, "sigmoid") * _LOG_DECAY)
        _store_parts(into, decay, unit, -rate * unit, key, value, mask, features)
        mask_new, own = mask & is_new, rows + batch_row * (_KEPT_PARTS * features) + column
        seen = tl.load(x + at, mask=mask_new, other=0.0)
        _store_parts(own, seen, raw_key, value, raw_decay, raw_rate, mask_new, features)
        total = tl.sum(tl.load(r + at, mask=mask_new, other=0.0) * key * weighting, axis=0)
        tl.store(bonuses + at, total * value, mask=mask_new)


@triton.jit
def _token(made, r, key, value, is_there, is_new, FEATURES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """What was made of a token, and its receptances."""
    mask = is_there & (key < HEAD_DIM)
    decay = tl.load(made + key, mask=mask, other=0.0)
    unit = tl.load(made + FEATURES + key, mask=mask, other=0.0)
    lost = tl.load(made + 2 * FEATURES + key, mask=mask, other=0.0)
    replacing = tl.load(made + 3 * FEATURES + key, mask=mask, other=0.0)
    own = tl.load(made + 4 * FEATURES + value, mask=is_there, other=0.0)
    return decay, unit, lost, replacing, own, tl.load(r + key, mask=mask & is_new, other=0.0)


@triton.jit(do_not_specialize=["state_at", "snapshot_at"])
def _take_in_rwkv(
    rows, r, made, firsts, mixed, segments, state_at, snapshot_at,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, MATRIX_BYTES: tl.constexpr,
    POSITIONS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SHARE: tl.constexpr, OVERLAPS: tl.constexpr,
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
    own_end, features = tl.maximum(committed, first), HEADS * HEAD_DIM
    key, value = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    place = (head * HEAD_DIM + value // LANES * LANES)[None, :] * HEAD_DIM + key[:, None] * LANES
    place, is_key = place + (value % LANES)[None, :], (key < HEAD_DIM)[:, None]
    S = tl.load(floats_at(state, 0) + place, mask=is_key, other=0.0)
    at = made + (row + first - past) * (_MADE_PARTS * features) + head * HEAD_DIM
    r_at = r + (begin + first - past) * features + head * HEAD_DIM
    decay, unit, lost, k, v, reading = _token(
        at, r_at, key, value, first < end, first >= past, HEADS * HEAD_DIM, HEAD_DIM
    )
    n = due_of(pairs, num, first)
    stop, target = stop_of(pairs, n, num, snapshot_at, state, own_end)
    for position in range(first, end):
        at, r_at = at + _MADE_PARTS * features, r_at + features
        next_decay, next_unit, next_lost, next_k, next_v, next_reading = _token(
            at, r_at, key, value, position + 1 < end, position + 1 >= past, HEADS * HEAD_DIM, HEAD_DIM
        )
        # All sums are of the state before this token, so that they do not wait for each other.
        held, zeros = tl.sum(S * unit[:, None], axis=0), tl.zeros_like(v)
        o = tl.sum(S * (decay * reading)[:, None], axis=0)
        o = tl.fma(held, zeros + tl.sum(lost * reading, axis=0), o)
        o = tl.fma(v, zeros + tl.sum(k * reading, axis=0), o)
        S = tl.fma(tl.broadcast_to(lost[:, None], S.shape), tl.broadcast_to(held[None, :], S.shape), S * decay[:, None])
        S = tl.fma(tl.broadcast_to(k[:, None], S.shape), tl.broadcast_to(v[None, :], S.shape), S)
        into = mixed + ((begin + position - past) * HEADS + head) * HEAD_DIM + value
        tl.store(into, o, mask=position >= past)
        while position + 1 == stop:
            tl.store(floats_at(target, 0) + place, S, mask=is_key)
            n += 1
            stop, target = stop_of(pairs, n, num, snapshot_at, state, own_end)
        decay, unit, lost, k, v, reading = next_decay, next_unit, next_lost, next_k, next_v, next_reading
    if part == 0:
        tl.store((state + POSITIONS).to(tl.pointer_type(tl.int64)) + head, own_end)
    kept: tl.constexpr = _KEPT_PARTS * HEADS * HEAD_DIM
    column = (head * (HEAD_DIM // VALUES) + part) * SHARE + tl.arange(0, SHARE)
    store_tails(
        rows, rows, floats_at(state, MATRIX_BYTES), words, begin, past, first, end, snapshot_at, column, column < kept,
        kept, kept, kept, KEPT, 2, MATRIX_BYTES,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read what is written now
    keep_rows(rows, rows, state, begin, past, end, column, kept, kept, kept, KEPT, MATRIX_BYTES)


@triton.jit(do_not_specialize=["code_stride"])
def _norm_heads(
    mixed, bonuses, g, norm, norm_bias, out, code_scale, code_bias, positions, eps, code_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, CODE_GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """(norm(mixed) + bonuses) * g. A program has a head of a row."""
    after_previous(OVERLAPS)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(positions + row) < 0:
        return
    lane = tl.arange(0, BLOCK)
    mask, column = lane < HEAD_DIM, head * HEAD_DIM + lane
    at = row * (HEADS * HEAD_DIM) + column
    o = tl.load(mixed + at, mask=mask, other=0.0)
    centred = tl.where(mask, o - tl.sum(o, axis=0) / HEAD_DIM, 0.0)
    y = centred * (1 / tl.sqrt(tl.sum(centred * centred, axis=0) / HEAD_DIM + eps))
    y = tl.fma(y, tl.load(norm + column, mask=mask, other=0.0), tl.load(norm_bias + column, mask=mask, other=0.0))
    y = (y + tl.load(bonuses + at, mask=mask, other=0.0)) * tl.load(g + at, mask=mask, other=0.0)
    if CODE_GROUP > 0:
        groups: tl.constexpr = BLOCK // CODE_GROUP
        store_codes(
            tl.reshape(y, (groups, CODE_GROUP)), out, code_scale, code_bias, row, head * HEAD_DIM, HEADS * HEAD_DIM,
            code_stride, groups, CODE_GROUP, CODE_BITS,
        )  # fmt: skip
    else:
        tl.store(out + at, y, mask=mask)


def mix_time(
    projected: Projected, first_values: Tensor, out: Tensor | Codes, tables: SegmentTables, weights: TimeMixWeights,
    shape: Rwkv7Shape, place: StatePlace,
) -> list[KernelLaunch]:  # fmt: skip
    """first_values fp32 [M, features]: of the first layer, which are read, or written where there is no value_gate. out
    fp32 [M, features], or its codes where `can_code` has heads of so many. place: of the layer's part."""
    own = [weights.removal_key, weights.rate_key, weights.bonus, weights.norm, weights.norm_bias]
    floats = [each for each in (*projected, first_values, *own) if each is not None]
    assert shape.fills_vectors and all(x.dtype is torch.float32 and x.is_contiguous() for x in floats)
    device, segments, rows = first_values.device, tables.segments, len(tables.positions)
    made = torch.empty((tables.num_rows, int(_MADE_PARTS) * shape.features), device=device)
    kept = torch.empty((rows, shape.row_floats), device=device)
    mixed, bonuses = torch.empty((2, rows, shape.features), device=device)
    firsts = torch.empty(len(segments), dtype=torch.int64, device=device)
    sizes = {
        "HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "KEPT": shape.kept_rows,
        "MATRIX_BYTES": shape.matrix_bytes, "POSITIONS": shape.positions_begin,
    }  # fmt: skip
    shared: dict[str, Any] = {
        "r": projected.r, "made": made, "rows": kept, "firsts": firsts, "segments": segments, "state_at": place.state
    }  # fmt: skip
    runs, parts = runs_of(rows), shape.head_dim // VALUES_A_PROGRAM
    preparing = KernelLaunch(
        _prepare_rwkv,
        (shape.num_heads, runs, len(segments)),
        {
            **{name: x for name, x in projected._asdict().items() if name != "g"}, **shared, "runs": runs,
            "first_values": first_values, "removal_key": weights.removal_key, "rate_key": weights.rate_key,
            "bonus": weights.bonus, "bonuses": bonuses,
        },
        {**sizes, "BLOCK": triton.next_power_of_2(shape.head_dim)},
        num_warps=1,
    )  # fmt: skip
    taking = KernelLaunch(
        _take_in_rwkv,
        (parts, shape.num_heads, len(segments)),
        {**shared, "mixed": mixed, "snapshot_at": place.snapshot},
        {
            **sizes, "LANES": shape.lanes, "KEYS": triton.next_power_of_2(shape.head_dim), "VALUES": VALUES_A_PROGRAM,
            "SHARE": triton.next_power_of_2(triton.cdiv(shape.row_floats, parts * shape.num_heads)),
        },
        num_warps=1,
        num_stages=1,
    )  # fmt: skip
    return [preparing, taking, _norm(mixed, bonuses, projected.g, out, tables, weights, shape)]


def _norm(
    mixed: Tensor, bonuses: Tensor, g: Tensor, out: Tensor | Codes, tables: SegmentTables, weights: TimeMixWeights,
    shape: Rwkv7Shape,
) -> KernelLaunch:  # fmt: skip
    codes = out if isinstance(out, Codes) else None
    assert codes is None or (can_code(shape.head_dim, codes.group) and codes.q.shape[1] == shape.features)
    return KernelLaunch(
        _norm_heads,
        (len(tables.positions), shape.num_heads),
        {
            "mixed": mixed, "bonuses": bonuses, "g": g, "norm": weights.norm, "norm_bias": weights.norm_bias,
            "out": out.q if isinstance(out, Codes) else out, "code_scale": None if codes is None else codes.scale,
            "code_bias": None if codes is None else codes.bias, "positions": tables.positions,
            "eps": float(weights.eps), "code_stride": 0 if codes is None else codes.scale.stride(0),
        },
        {
            "HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "BLOCK": triton.next_power_of_2(shape.head_dim),
            "CODE_GROUP": 0 if codes is None else codes.group, "CODE_BITS": 0 if codes is None else codes.bits,
        },
        num_warps=1,
    )  # fmt: skip
