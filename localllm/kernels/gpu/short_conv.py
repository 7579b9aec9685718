"""A short convolution between two gates on a GPU: one launch. `kernels.short_conv` defines what it computes.

A program has some channels of a run of a segment's tokens. The rows before the segment's first are those that its
sequence keeps; only the first run's program reads them, and writes them when it is done with that. What comes out are
floats, or codes for the matrix that follows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import can_code, store_codes
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.recurrence import WORDS, SegmentTables
from localllm.kernels.short_conv import ConvWeights
from localllm.kernels.state_shapes import STEP_ROWS, ConvShape, StatePlace

_STEP = tl.constexpr(STEP_ROWS)
_BLOCK = 128  # channels of a program: four a thread
_FEW_RUNS, _RUN_TOKENS = 4, 8  # of a segment's tokens


@triton.jit
def _seen(
    wide, ring, begin, past, position, column, wide_stride, CHANNELS: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Channels of what the convolution sees at a position, fp32: B * x of the batch, or what was kept before it; zeros
    before the first token."""
    is_new, row = position >= past, wide + (begin + position - past) * wide_stride + column
    is_kept = (position >= 0) & (position < past)
    there = tl.full(column.shape, 0, tl.int1)
    kept = tl.load(ring + (position + KEPT) % KEPT * CHANNELS + column, mask=there | is_kept, other=0.0)
    front = tl.load(row, mask=there | is_new, other=0.0).to(tl.float32)
    return tl.where(is_new, front * tl.load(row + 2 * CHANNELS, mask=there | is_new, other=0.0).to(tl.float32), kept)


@triton.jit(do_not_specialize=["state_at", "snapshot_at", "runs", "code_stride"])
def _short_conv(
    wide, taps, bias, out, code_scale, code_bias, segments, state_at, snapshot_at, wide_stride, code_stride, runs,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, CODE_GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    part, run, words = tl.program_id(0), tl.program_id(1), segments + tl.program_id(2) * WORDS
    begin, last = tl.load(words), tl.load(words + 1)
    if last <= begin:
        return
    past, state = tl.load(words + 2), tl.load(words + 4) + state_at
    end, ring = past + last - begin, tl.multiple_of(state.to(tl.pointer_type(tl.float32)), 16)
    column = part * BLOCK + tl.arange(0, BLOCK)
    # As many at least as the convolution sees: then no later run reads what the first one writes.
    each = tl.maximum((end - past + runs - 1) // runs, TAPS)
    for position in range(past + run * each, tl.minimum(past + run * each + each, end)):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            at = position - (TAPS - 1) + tap
            seen = _seen(wide, ring, begin, past, at, column, wide_stride, CHANNELS, KEPT)
            total = tl.fma(seen, tl.load(taps + tap * CHANNELS + column), total)
        if bias is not None:
            total += tl.load(bias + column)
        row = begin + position - past
        y = total * tl.load(wide + row * wide_stride + CHANNELS + column).to(tl.float32)
        if CODE_GROUP > 0:
            store_codes(
                tl.reshape(y, (BLOCK // CODE_GROUP, CODE_GROUP)), out, code_scale, code_bias, row, part * BLOCK,
                CHANNELS, code_stride, BLOCK // CODE_GROUP, CODE_GROUP, CODE_BITS,
            )  # fmt: skip
        else:
            tl.store(out + row * CHANNELS + column, y)
    if run > 0:
        return
    pairs = tl.load(words + 6).to(tl.pointer_type(tl.int64))
    for n in range(tl.load(words + 7)):
        wanted, address = tl.load(pairs + 2 * n), tl.load(pairs + 2 * n + 1) + snapshot_at
        if (wanted + _STEP >= past) & (wanted <= end):  # an older one was written when its tokens were new
            tail = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            for tap in tl.static_range(TAPS - 1):
                at = wanted - (TAPS - 1) + tap
                seen = _seen(wide, ring, begin, past, at, column, wide_stride, CHANNELS, KEPT)
                tl.store(tail + tap * CHANNELS + column, seen)
    tl.debug_barrier()  # all threads have read what is written now
    for position in range(tl.maximum(past, end - KEPT), end):
        seen = _seen(wide, ring, begin, past, position, column, wide_stride, CHANNELS, KEPT)
        tl.store(ring + position % KEPT * CHANNELS + column, seen)


def convolve(
    wide: Tensor, out: Tensor | Codes, tables: SegmentTables, weights: ConvWeights, shape: ConvShape, place: StatePlace
) -> KernelLaunch:
    """wide [M, 3 * channels], in rows of any stride: B, C, x, of any float type. out fp32 [M, channels], or its codes
    where `can_code` has parts of `block_of`. place: of the layer's part."""
    codes = out if isinstance(out, Codes) else None
    own = [weights.taps, *([] if weights.bias is None else [weights.bias])]
    assert shape.fills_vectors and wide.stride(1) == 1
    assert all(each.dtype is torch.float32 and each.is_contiguous() for each in own)
    assert codes is None or (can_code(block_of(shape), codes.group) and codes.q.shape[1] == shape.channels)
    rows, segments = len(tables.positions), tables.segments
    runs = min(rows, _FEW_RUNS) if rows <= STEP_ROWS else triton.cdiv(rows, _RUN_TOKENS)
    arguments: dict[str, Any] = {
        "wide": wide, "taps": weights.taps, "bias": weights.bias, "out": out.q if isinstance(out, Codes) else out,
        "code_scale": None if codes is None else codes.scale, "code_bias": None if codes is None else codes.bias,
        "segments": segments, "state_at": place.state, "snapshot_at": place.snapshot, "wide_stride": wide.stride(0),
        "code_stride": 0 if codes is None else codes.scale.stride(0), "runs": runs,
    }  # fmt: skip
    return KernelLaunch(
        _short_conv,
        (shape.channels // block_of(shape), runs, len(segments)),
        arguments,
        {
            "CHANNELS": shape.channels, "KEPT": shape.kept_rows, "TAPS": shape.conv_width, "BLOCK": block_of(shape),
            "CODE_GROUP": 0 if codes is None else codes.group, "CODE_BITS": 0 if codes is None else codes.bits,
        },
        num_warps=1,
    )  # fmt: skip


def block_of(shape: ConvShape) -> int:
    """Return the channels of a program."""
    return math.gcd(shape.channels, _BLOCK)
