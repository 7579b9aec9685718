"""What kernels of layers share that keep a state of a sequence, on a GPU: the tables by which they find the states, and
of those with a matrix a head, what goes into the layer, when a state is due to be stored, and which rows are kept."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.attention_merge import appended
from localllm.kernels.state_shapes import REPLAYED_ROWS, STATE_WORDS, STEP_ROWS

WORDS = tl.constexpr(len(STATE_WORDS))
_REPLAYED = tl.constexpr(REPLAYED_ROWS)
# Features of a program: a warp holds its part of a state of 128 key features in 32 registers a thread.
VALUES_A_PROGRAM = 8
_FEW_RUNS, _RUN_TOKENS = 4, 4  # of a segment's tokens, each of which one program prepares


@dataclass(frozen=True)
class SegmentTables:
    """segments int64 [S, words]: see STATE_WORDS; end is not above begin where a segment is nobody's. positions int32
    [M]: -1 is a padding row, for which nothing is written. num_rows: of the buffers that also hold rows computed again.
    """

    segments: Tensor
    positions: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.positions) + REPLAYED_ROWS * len(self.segments)


@triton.jit
def floats_at(address, offset):
    return tl.multiple_of((address + offset).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def raw_of(
    wide, gates, ring, begin, past, position, column, mask, wide_stride,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, APART: tl.constexpr = 0,
):  # fmt: skip
    """Columns of what goes into the layer at a position, fp32: from the batch, or from what was kept before it; zeros
    before the first token. APART: columns of the batch's gates that are not kept; `gates` is where those would begin
    that this reads, if these lay in front."""
    row, is_new, is_gate = begin + position - past, position >= past, column >= CHANNELS
    is_kept = (position >= 0) & (position < past)
    kept = tl.load(ring + (position + KEPT) % KEPT * ROW + column, mask=mask & is_kept, other=0.0)
    new = tl.load(wide + row * wide_stride + column, mask=mask & is_new & (column < CHANNELS), other=0.0)
    gate = tl.load(gates + row * (ROW - CHANNELS + APART) + column - CHANNELS, mask=mask & is_new & is_gate, other=0.0)
    return tl.where(is_new, tl.where(is_gate, gate, new.to(tl.float32)), kept)


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + e^-|x|), the logarithm by its series, as a card's own is not exact near one: with
    z = y / (2 + y), log(1 + y) = 2 (z + z^3 / 3 + z^5 / 5 + ...), z being a third at most."""
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    square = z * z
    series = square * 0.0 + 1.0 / 15
    for i in tl.static_range(7):
        series = tl.fma(series, square, square * 0.0 + 1.0 / (13 - 2 * i))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def first_of(state, past, POSITIONS: tl.constexpr):
    """The position of the first token that a state lacks."""
    position = tl.load((state + POSITIONS).to(tl.pointer_type(tl.int64)))
    return tl.maximum(tl.minimum(position, past), past - _REPLAYED)


@triton.jit
def taps_of(conv, column, mask, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    weights = ()
    for tap in tl.static_range(TAPS):
        weights = appended(weights, tl.load(conv + tap * CHANNELS + column, mask=mask, other=0.0))
    return weights


@triton.jit
def convolved(
    value, weights, wide, gates, ring, begin, past, position, column, mask, wide_stride,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """value, and the convolution of these columns at a position."""
    for tap in tl.static_range(TAPS):
        seen = raw_of(
            wide, gates, ring, begin, past, position - (TAPS - 1) + tap, column, mask, wide_stride,
            CHANNELS, ROW, KEPT,
        )  # fmt: skip
        value = tl.fma(seen, weights[tap], value)
    return value


@triton.jit
def store_tails(
    wide, gates, ring, words, begin, past, first, end, snapshot_at, column, mask, wide_stride,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, MATRIX_BYTES: tl.constexpr,
    APART: tl.constexpr = 0,
):  # fmt: skip
    """Columns of the rows before each snapshot's position, to the snapshot."""
    pairs = tl.load(words + 6).to(tl.pointer_type(tl.int64))
    for n in range(tl.load(words + 7)):
        wanted, address = tl.load(pairs + 2 * n), tl.load(pairs + 2 * n + 1)
        if (wanted > first) & (wanted <= end):
            tail = floats_at(address + snapshot_at, MATRIX_BYTES)
            for tap in tl.static_range(TAPS - 1):
                row = raw_of(
                    wide, gates, ring, begin, past, wanted - (TAPS - 1) + tap, column, mask, wide_stride,
                    CHANNELS, ROW, KEPT, APART,
                )  # fmt: skip
                tl.store(tail + tap * ROW + column, row, mask=mask)


@triton.jit
def stop_of(pairs, n, num, snapshot_at, state, own_end):
    """Before which position the state is to be stored next, and where: a snapshot, or behind the last of them the state
    itself. -1 behind that."""
    is_snapshot = n < num
    wanted = tl.load(pairs + 2 * n, mask=is_snapshot, other=0)
    address = tl.load(pairs + 2 * n + 1, mask=is_snapshot, other=0) + snapshot_at
    stop = tl.where(is_snapshot, wanted, tl.where(n == num, own_end, -1))
    return stop, tl.where(is_snapshot, address, state)


@triton.jit
def due_of(pairs, num, first):
    """How many snapshots are of no token behind `first`."""
    n = first * 0
    for i in range(num):
        n += (tl.load(pairs + 2 * i) <= first).to(tl.int64)
    return n


@triton.jit
def keep_rows(
    wide, gates, state, begin, past, end, column, wide_stride,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr, MATRIX_BYTES: tl.constexpr, APART: tl.constexpr = 0,
):  # fmt: skip
    """Columns of the last rows, to where the sequence keeps them."""
    ring = floats_at(state, MATRIX_BYTES)
    for position in range(tl.maximum(past, end - KEPT), end):
        kept = raw_of(
            wide, gates, ring, begin, past, position, column, column < ROW, wide_stride, CHANNELS, ROW, KEPT, APART
        )  # fmt: skip
        tl.store(ring + position % KEPT * ROW + column, kept, mask=column < ROW)


def runs_of(rows: int) -> int:
    """Return into how many runs the tokens of a segment are shared out, where a batch has so many rows."""
    return min(rows + 1, _FEW_RUNS) if rows <= STEP_ROWS else triton.cdiv(rows, _RUN_TOKENS)
