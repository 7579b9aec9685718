"""What a layer of RWKV-7 makes of each token and the one before it, on a GPU: one launch.

A program has some features of a run of a segment's tokens. What stands before the segment's first token is what its
sequence keeps; only the first run's program reads that, and where this launch keeps rows, writes others when it is done
with it.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.recurrence import WORDS, SegmentTables, floats_at, runs_of
from localllm.kernels.state_shapes import STEP_ROWS, StatePlace, StateShape

_STEP = tl.constexpr(STEP_ROWS)
_BLOCK = 128  # features of a program: four a thread


@triton.jit
def _seen(x, ring, begin, past, position, column, FEATURES: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr):
    """Features at a position: of the batch, or what was kept before it; zeros before the first token."""
    is_new, there = position >= past, tl.full(column.shape, 0, tl.int1)
    kept_at = ring + (position + KEPT) % KEPT * ROW + column
    kept = tl.load(kept_at, mask=there | ((position >= 0) & (position < past)), other=0.0)
    new = tl.load(x + (begin + position - past) * FEATURES + column, mask=there | is_new, other=0.0)
    return tl.where(is_new, new, kept)


@triton.jit(do_not_specialize=["plane", "state_at", "snapshot_at", "runs"])
def _shift(
    x, mixes, y, segments, plane, state_at, snapshot_at, runs,
    FEATURES: tl.constexpr, MIXES: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, MATRIX_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, KEEPS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    part, run, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, state = tl.load(words + 2), tl.load(words + 4) + state_at
    end, ring, column = past + last - begin, floats_at(state, MATRIX_BYTES), part * BLOCK + tl.arange(0, BLOCK)
    each = (end - past + runs - 1) // runs
    for position in range(past + run * each, tl.minimum(past + run * each + each, end)):
        own = _seen(x, ring, begin, past, position, column, FEATURES, ROW, KEPT)
        change = _seen(x, ring, begin, past, position - 1, column, FEATURES, ROW, KEPT) - own
        for mix in tl.static_range(MIXES):
            factors = tl.load(mixes + mix * FEATURES + column)
            into = y + mix * plane + (begin + position - past) * FEATURES + column
            tl.store(into, tl.fma(factors, change, own))
    if not KEEPS or run > 0:
        return
    pairs = tl.load(words + 6).to(tl.pointer_type(tl.int64))
    for n in range(tl.load(words + 7)):
        wanted, address = tl.load(pairs + 2 * n), tl.load(pairs + 2 * n + 1) + snapshot_at
        if (wanted + _STEP >= past) & (wanted <= end):  # an older one was written when its tokens were new
            row = _seen(x, ring, begin, past, wanted - 1, column, FEATURES, ROW, KEPT)
            tl.store(floats_at(address, MATRIX_BYTES) + column, row)
    tl.debug_barrier()  # all threads have read what is written now
    for position in range(tl.maximum(past, end - KEPT), end):
        row = _seen(x, ring, begin, past, position, column, FEATURES, ROW, KEPT)
        tl.store(ring + position % KEPT * ROW + column, row)


def shift(
    x: Tensor, mixes: Tensor, y: Tensor, tables: SegmentTables, shape: StateShape, place: StatePlace, *, keeps: bool
) -> KernelLaunch:
    """y = x + mixes * (what is before x - x), for each of `mixes`. All are fp32.

    x: [M, features]. mixes: [N, features]. y: [N, M, features]. shape, place: of the layer's state, whose kept rows
    begin with x. keeps: these are brought up to date, of x alone; else another launch does that.
    """
    (count, features), rows, segments = mixes.shape, len(x), tables.segments
    assert y.shape == (count, rows, features) and all(each.is_contiguous() for each in (x, mixes, y))
    assert not keeps or shape.row_floats == features
    block, runs = math.gcd(features, _BLOCK), runs_of(rows)
    return KernelLaunch(
        _shift,
        (features // block, runs, len(segments)),
        {
            "x": x, "mixes": mixes, "y": y, "segments": segments, "plane": rows * features, "state_at": place.state,
            "snapshot_at": place.snapshot, "runs": runs,
        },
        {
            "FEATURES": features, "MIXES": count, "ROW": shape.row_floats, "KEPT": shape.kept_rows,
            "MATRIX_BYTES": shape.matrix_bytes, "BLOCK": block, "KEEPS": keeps,
        },
        num_warps=1,
    )  # fmt: skip
