"""Mamba between its projections on the CPU, as steps of a tape. `selective_scan` defines what it computes.

The first step is the convolution, of which products make B, C and the steps. The second walks over the tokens: threads
share out runs of 16 features, whose states stay in the first-level cache, and nothing is summed over features. A token
that is computed again is convolved again: what is kept of it is what the convolution saw. The third keeps what has gone
in, when nobody reads the kept rows any more: all features share a token's B.

5120 features, states of 16, with AVX-512 on one core: 512 tokens take 0.8 ms, 11.9 ms and 0.03 ms, one takes 0.04 ms.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import MOST_ROWS, Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Step
from localllm.kernels.cpu_recurrence import ROWS_AHEAD, Prepared, TokenSegment, softplus
from localllm.kernels.cpu_states import StateTables
from localllm.kernels.selective_scan import ScanWeights
from localllm.kernels.state_shapes import STEP_ROWS, MambaShape, StatePlace

_BYTES = 4 * LANES  # of a vector
_STATES_A_STEP = 8
_TABLES = "segments count | stride state snapshot"


def convolution_source(shape: MambaShape) -> Kernel:
    """wide, x and the tables: see `ScanRoom`. zeros: fp32 [row_floats]."""
    k = Kernel("scan_convolution", f"wide zeros conv conv_bias x {_TABLES}")
    with k.share_pairs(k.arg.count.load(I64, 8), k.i64(shape.heads)) as (number, first, last):
        _Rows(k, shape, number).convolve(first * _BYTES, last * _BYTES)
    return k


def scan_source(shape: MambaShape) -> Kernel:
    """wide, steps, low, mixed and the tables: see `ScanRoom`."""
    k = Kernel("selective_scan", f"wide zeros conv conv_bias steps low dt_bias rates d mixed {_TABLES}")
    private = k.stack(F32V, shape.state_size)
    num_segments = k.arg.count.load(I64, 8)
    # All segments of a run of features before the next: threads have equal parts of the long ones too.
    begin, end = k.share(num_segments * shape.heads)
    with k.range(begin, end) as item:
        _Rows(k, shape, item % num_segments).walk(item / num_segments, private)
    return k


def keep_source(shape: MambaShape) -> Kernel:
    k = Kernel("keep_scanned", f"wide zeros steps low {_TABLES}")
    num_segments = k.arg.count.load(I64, 8)
    begin, end = k.share(num_segments * shape.heads)
    with k.range(begin, end) as item:
        _Rows(k, shape, item % num_segments).keep(item / num_segments)
    return k


class _Rows(Prepared[MambaShape]):
    """A segment's tokens, 16 features at a time."""

    def __init__(self, k: Kernel, shape: MambaShape, number: Value) -> None:
        super().__init__(k, shape, TokenSegment(k, shape, number, 0, 0), has_bias=True)
        self._row_bytes = 4 * shape.features

    def convolve(self, begin: Value, end: Value) -> None:
        """Write the convolution of the new tokens in some features: those from so many bytes into a row on."""
        with self._windows(self.segment.past, self.segment.end) as (position, window):
            x = self.k.arg.x.at(self.segment.batch_row(position) * self._row_bytes)
            with self.k.range(begin, end, _BYTES) as at:
                x.at(at).store(self._convolved(window, at))

    def walk(self, tile: Value, private: Value) -> None:
        """Take the tokens in, and write y * silu(z) of each that is new."""
        k, shape, segment, a = self.k, self.shape, self.segment, self.k.arg
        at, own = tile * _BYTES, segment.matrices.at(tile * (_BYTES * shape.state_size))
        first = segment.first(tile)
        own_end, source = k.larger(segment.committed, first), k.variable(own)
        dt_bias, d = (vector.at(at).load(F32V) for vector in (a.dt_bias, a.d))
        with self._windows(first, segment.end) as (position, window):
            is_new = position.compare("uge", segment.past)
            row, x = segment.batch_row(position), self._convolved(window, at)
            z = a.wide.at(row * a.stride * 4).at(self._row_bytes).at(at)
            k.prefetch(z.at(a.stride * (4 * ROWS_AHEAD)))
            k.prefetch(a.steps.at((row + ROWS_AHEAD) * self._row_bytes).at(at))
            step = softplus(k, self._steps(position).at(at).load(F32V) + dt_bias)
            b = self._b(position)
            c = is_new.choose(b.at(4 * shape.state_size), b)  # nobody asks what comes out of a token computed again
            target = (position + 1).compare("ule", own_end).choose(own, private)
            y = k.variable(d * x)
            with k.range(k.i64(0), k.i64(4 * shape.state_size), 4 * _STATES_A_STEP, rolled=True) as i:
                for n in range(_STATES_A_STEP):
                    number = i + 4 * n
                    decay = cpu_math.exp(k, step * a.rates.at(number * shape.features).at(at).load(F32V))
                    h = source.get().at(number * LANES).load(F32V) * decay
                    h = k.fma(b.at(number).load(F32).splat(), step * x, h)
                    target.at(number * LANES).store(h)
                    y.set(k.fma(c.at(number).load(F32).splat(), h, y.get()))
            source.set(target)
            with k.when(is_new):
                a.mixed.at(row * self._row_bytes).at(at).store(y.get() * cpu_math.silu(k, z.load(F32V)))
            with segment.snapshots() as (wanted, part), k.when(wanted.compare("eq", position + 1)):
                self._copy_floats(target, part.at(tile * (_BYTES * shape.state_size)), LANES * shape.state_size)

    def keep(self, tile: Value) -> None:
        """Write 16 features of the rows to the snapshots and into the kept rows, and the state's new position."""
        segment, at = self.segment, tile * _BYTES
        first = segment.first(tile)

        def copy(position: Value, row: Value) -> None:
            self._copy(position, row, [at], LANES, None)
            self._copy_floats(self._steps(position).at(at), row.at(self._row_bytes).at(at), LANES)
            with self.k.when(tile.compare("eq", 0)):
                self._copy_floats(self._b(position), row.at(2 * self._row_bytes), self.shape.state_size)

        segment.keep_rows(copy, first)
        segment.positions.at(tile * 8).store(self.k.larger(segment.committed, first), 8)

    def _steps(self, position: Value) -> Value:
        """A pointer to a token's steps."""
        own = self.k.arg.steps.at(self.segment.batch_row(position) * self._row_bytes)
        return self._old_or(position, own, self._row_bytes)

    def _b(self, position: Value) -> Value:
        """A pointer to a token's B, behind which is C where the token is new."""
        own = self.k.arg.low.at(self.segment.batch_row(position) * (4 * self.shape.low_floats))
        return self._old_or(position, own, 2 * self._row_bytes)

    def _copy_floats(self, source: Value, target: Value, count: int) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(4 * count), _BYTES) as at:
            target.at(at).store(source.at(at).load(F32V))


@cache
def convolution(isa: Isa, shape: MambaShape) -> Native:
    return compile_kernel(convolution_source(shape), isa)


@cache
def selective_scan(isa: Isa, shape: MambaShape) -> Native:
    return compile_kernel(scan_source(shape), isa)


@cache
def keep(isa: Isa, shape: MambaShape) -> Native:
    return compile_kernel(keep_source(shape), isa)


class ScanRoom:
    """What layers of one shape share for a batch, at fixed places that a tape can point at, fp32 rows.

    x: [features], what the convolution makes. low: [low_floats], B, C, and what makes the steps, with zeros behind it.
    steps: [features]. The steps of a tape write the first; what is between `convolution` and `scan` writes the others.
    """

    def __init__(self, shape: MambaShape, tables: StateTables) -> None:
        assert shape.fills_vectors and shape.conv_width - 1 <= STEP_ROWS
        self.shape, self._tables = shape, tables
        rows = tables.prepared_rows + MOST_ROWS
        self.x, self.steps = torch.zeros(rows, shape.features), torch.zeros(rows, shape.features)
        self.low, self._zeros = torch.zeros(rows, shape.low_floats), torch.zeros(shape.row_floats)

    def convolution(self, isa: Isa, weights: ScanWeights, place: StatePlace, wide: Tensor, stride: int) -> Step:
        """wide: fp32 rows of `stride` floats: what the convolution sees, and gates."""
        conv = {"conv": weights.conv, "conv_bias": weights.conv_bias}
        return convolution(isa, self.shape).step(x=self.x, **conv, **self._shared(place, wide, stride))

    def scan(
        self, isa: Isa, weights: ScanWeights, place: StatePlace, wide: Tensor, stride: int, mixed: Tensor
    ) -> list[Step]:
        """wide: as above. mixed: fp32 [rows, features], written."""
        own = vars(weights)
        assert all(x.dtype is torch.float32 and x.is_contiguous() for x in (*own.values(), mixed))
        shared = self._shared(place, wide, stride) | {"steps": self.steps, "low": self.low}
        walked = selective_scan(isa, self.shape).step(mixed=mixed, **own, **shared)
        return [walked, keep(isa, self.shape).step(**shared)]

    def _shared(self, place: StatePlace, wide: Tensor, stride: int) -> dict[str, Tensor | int]:
        words = {"stride": stride, "state": place.state, "snapshot": place.snapshot}
        return {"wide": wide, "zeros": self._zeros, **words, **self._tables.words}
