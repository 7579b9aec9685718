"""Mamba 2 between its two projections on the CPU, as three steps of a tape. `mamba2_rule` defines what it computes.

The first two are those of `cpu_delta`, with B in the place of keys, C in that of queries, and x in that of values: the
convolution, and the walk over the tokens, a tile of a head's state at a time, which takes a token in and adds up S^T C
of the next one on its way. With S before a token and u = dt x, y = g S^T C + (C . B) u + D x: so the last token of a
step costs no sweep. The third is the norm of each group, with the gates of what comes out.

80 heads of 64 features, one group, states of 128, with AVX-512 on one core: 512 tokens take 4.7 ms, 22.9 ms and
4.0 ms, where the multiplications and additions of the second kernel alone are 17.2 ms at the rate of a matrix product.
A step of one token takes 0.32 ms, of which 0.24 ms are needed to read and write the states.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_recurrence import ROWS_AHEAD, Prepared, Sweep, TokenSegment, TokenWalk, softplus
from localllm.kernels.cpu_states import StateTables
from localllm.kernels.mamba2_rule import Mamba2Weights
from localllm.kernels.state_shapes import STEP_ROWS, Mamba2Shape, StatePlace


def group_floats(shape: Mamba2Shape) -> int:
    """Floats of a token and a group, as the second kernel reads them: B, C, the product of both."""
    return 2 * shape.state_size + LANES


def head_floats(shape: Mamba2Shape) -> int:
    """Floats of a token and a head, as the second kernel reads them: x, its decay, its step."""
    return shape.head_dim + LANES


def _segment(k: Kernel, shape: Mamba2Shape, number: Value) -> TokenSegment[Mamba2Shape]:
    return TokenSegment(k, shape, number, group_floats(shape), head_floats(shape))


def prepare_source(shape: Mamba2Shape) -> Kernel:
    """wide, steps, keys, values and the tables: see `Mamba2Room`. zeros: fp32 [row_floats]. least, most: the bits of
    floats."""
    pointers = "wide gates zeros conv conv_bias a_log dt_bias keys values segments count"
    k = Kernel("prepare_mamba", f"{pointers} | stride gates_stride rows state snapshot least most")
    num_segments = k.arg.count.load(I64, 8)
    # Each thread has its part of both: a group's channels take longer than a head's.
    begin, end = k.share(num_segments * shape.num_groups)
    with k.range(begin, end) as item:
        _Prepared(k, shape, item % num_segments).group(item / num_segments)
    begin, end = k.share(num_segments * shape.num_heads)
    with k.range(begin, end) as item:
        _Prepared(k, shape, item % num_segments).head(item / num_segments)
    return k


class _Prepared(Prepared[Mamba2Shape]):
    """A segment's tokens, one group or head at a time."""

    def __init__(self, k: Kernel, shape: Mamba2Shape, number: Value) -> None:
        super().__init__(k, shape, _segment(k, shape, number), has_bias=True)

    def group(self, group: Value) -> None:
        k, segment, shape, size = self.k, self.segment, self.shape, self.shape.state_size
        b = group * (4 * size) + 4 * shape.features  # bytes into a row
        c = b + 4 * shape.num_groups * size
        first, end = segment.first(k.i64(0)), segment.end
        with self._windows(first, end) as (position, rows):
            row = segment.keys(group, position)
            products = k.variable(k.f32v(0))
            with k.range(k.i64(0), k.i64(4 * size), 4 * LANES) as i:
                into, read = self._convolved(rows, b + i), self._convolved(rows, c + i)
                row.at(i).store(into)
                row.at(4 * size).at(i).store(read)
                products.set(k.fma(into, read, products.get()))
            row.at(8 * size).store(cpu_math.total(k, products.get()))
        self._keep(first, [b, c], size, None)

    def head(self, head: Value) -> None:
        k, segment, dim = self.k, self.segment, self.shape.head_dim
        channel, first = head * (4 * dim), self.segment.first(head)
        with self._windows(first, segment.end) as (position, rows):
            row = segment.values(head, position)
            with k.range(k.i64(0), k.i64(4 * dim), 4 * LANES) as i:
                row.at(i).store(self._convolved(rows, channel + i))
        self._steps_and_decays(head, first)
        self._keep(first, [channel], dim, head)

    def _steps_and_decays(self, head: Value, first: Value) -> None:
        k, a = self.k, self.k.arg
        rate = cpu_math.exp(k, a.a_log.at(head * 4).load(F32).splat())
        dt_bias = a.dt_bias.at(head * 4).load(F32).splat()
        least, most = (bits.convert("trunc", I32).convert("bitcast", F32).splat() for bits in (a.least, a.most))

        def make(dt: Value) -> list[Value]:
            step = k.smaller(most, k.larger(least, softplus(k, dt + dt_bias)))  # in this order NaN stays
            return [cpu_math.exp(k, k.f32v(0) - rate * step), step]

        self._make_gates(head, first, 1, make)


def mamba_source(isa: Isa, shape: Mamba2Shape) -> Kernel:
    """mixed, keys, values and the tables: see `Mamba2Room`. d: fp32 [num_heads]."""
    k = Kernel("mamba", "mixed d keys values segments count | rows state snapshot")
    num_segments = k.arg.count.load(I64, 8)
    tiles = shape.head_dim // LANES
    wide = 2 if isa.sums >= 16 and tiles % 2 == 0 else 1
    sweep = Sweep(k, shape.state_size, wide, ("query",))
    # All segments of one head before the next: threads have equal parts of the long ones too.
    begin, end = k.share(num_segments * shape.num_heads)
    with k.range(begin, end) as item:
        head = _Head(k, shape, item % num_segments, item / num_segments)
        with k.range(k.i64(0), k.i64(tiles), wide) as tile:
            head.walk(sweep, tile)
        head.finish()
    return k


class _Head(TokenWalk[Mamba2Shape]):
    """A segment's tokens in one head."""

    def __init__(self, k: Kernel, shape: Mamba2Shape, number: Value, head: Value) -> None:
        super().__init__(k, shape, _segment(k, shape, number), head, head / (shape.num_heads // shape.num_groups))

    def _outputs(self, sweep: Sweep, tile: Value, position: Value, row: Value) -> tuple[Value, list[Value]]:
        """Write y of one token over its x. Returns its decay, and what the state takes in."""
        k, shape = self.k, self.shape
        product = row.at(8 * shape.state_size).load(F32).splat()
        values = self.segment.values(self.head, position)
        decay, step = (values.at(4 * shape.head_dim + 4 * n).load(F32).splat() for n in range(2))
        d = k.arg.d.at(self.head * 4).load(F32).splat()
        taken = []
        for n in range(sweep.tiles):
            (read,) = sweep.sums(n)
            value = values.at(tile * (4 * LANES) + 4 * LANES * n)
            x = value.load(F32V)
            taken.append(x * step)
            value.store(k.fma(d, x, k.fma(product, taken[-1], decay * read)))
        return decay, taken

    def finish(self) -> None:
        """Write y where the norm finds it, and the state's new position."""
        k, shape, segment = self.k, self.shape, self.segment
        segment.positions.at(self.head * 8).store(self._own_end, 8)
        with k.range(segment.past, self.end, rolled=True) as position:
            y, row = segment.values(self.head, position), segment.batch_row(position)
            mixed = k.arg.mixed.at((row * shape.num_heads + self.head) * (4 * shape.head_dim))
            with k.range(k.i64(0), k.i64(4 * shape.head_dim), 4 * LANES) as i:
                mixed.at(i).store(y.at(i).load(F32V))


def norm_source(shape: Mamba2Shape, *, has_norm: bool, is_gated: bool) -> Kernel:
    """mixed = norm(mixed * silu(z)) * weight where it is gated, else norm(mixed) * weight * silu(z), or without a norm.

    mixed fp32 [T, features]; z: `stride` floats a row; weight fp32 [features]; shape: a pointer to {T}. eps: the bits
    of a float. Threads share out the rows by groups.
    """
    k = Kernel("gated_group_norm", "mixed z weight shape | stride eps")
    a, features = k.arg, shape.features // shape.num_groups
    eps = a.eps.convert("trunc", I32).convert("bitcast", F32)
    begin, end = k.share(a.shape.load(I64, 8) * shape.num_groups)
    with k.range(begin, end) as item:
        row, group = item / shape.num_groups, item % shape.num_groups
        mixed = a.mixed.at(item * (4 * features))
        z, weight = a.z.at(row * a.stride * 4 + group * (4 * features)), a.weight.at(group * (4 * features))
        squares = k.variable(k.f32v(0))
        with k.range(k.i64(0), k.i64(4 * features), 4 * LANES) as i:
            k.prefetch(z.at(a.stride * (4 * ROWS_AHEAD) + i))
            value = mixed.at(i).load(F32V)
            if is_gated or not has_norm:
                value = value * cpu_math.silu(k, z.at(i).load(F32V))
                mixed.at(i).store(value)
            squares.set(k.fma(value, value, squares.get()))
        if has_norm:
            mean = cpu_math.total(k, squares.get()) / float(features)
            inverse = (k.constant(F32, 1.0) / k.unary("sqrt", mean + eps)).splat()
            with k.range(k.i64(0), k.i64(4 * features), 4 * LANES) as i:
                value = mixed.at(i).load(F32V) * inverse * weight.at(i).load(F32V)
                mixed.at(i).store(value if is_gated else value * cpu_math.silu(k, z.at(i).load(F32V)))
    return k


@cache
def prepare(isa: Isa, shape: Mamba2Shape) -> Native:
    return compile_kernel(prepare_source(shape), isa)


@cache
def mamba(isa: Isa, shape: Mamba2Shape) -> Native:
    return compile_kernel(mamba_source(isa, shape), isa)


@cache
def gated_norm(isa: Isa, shape: Mamba2Shape, *, has_norm: bool, is_gated: bool) -> Native:
    return compile_kernel(norm_source(shape, has_norm=has_norm, is_gated=is_gated), isa)


class Mamba2Room:
    """The buffers of a batch for the layers of one shape, at fixed places that a tape can point at."""

    def __init__(self, shape: Mamba2Shape, tables: StateTables) -> None:
        assert shape.fills_vectors and shape.conv_width - 1 <= STEP_ROWS
        self.shape, self._tables = shape, tables
        rows = tables.prepared_rows
        self._keys = torch.zeros(shape.num_groups, rows, group_floats(shape))
        self._values = torch.zeros(shape.num_heads, rows, head_floats(shape))
        self._zeros = torch.zeros(shape.row_floats)

    def steps(
        self,
        isa: Isa,
        weights: Mamba2Weights,
        place: StatePlace,
        *,
        wide: Tensor,
        stride: int,
        steps: Tensor,
        mixed: Tensor,
        num_rows: Tensor,
    ) -> list[Step]:
        """wide: fp32 rows of `stride` floats in one run: z, then x, B and C before the convolution. steps: fp32
        [rows, num_heads]. mixed: fp32 [rows, features], written. num_rows: int64 {T}."""
        own = {name: getattr(weights, name) for name in ("conv", "conv_bias", "a_log", "dt_bias")}
        assert all(x.dtype is torch.float32 and x.is_contiguous() for x in (*own.values(), weights.d, steps, mixed))
        shared: dict[str, Tensor | int]
        shared = {"keys": self._keys, "values": self._values, **self._tables.words}
        shared |= {"rows": self._tables.prepared_rows, "state": place.state, "snapshot": place.snapshot}
        bounds = {"least": float_bits(weights.least_step), "most": float_bits(weights.most_step)}
        strides = {"stride": stride, "gates_stride": self.shape.num_heads}
        raw = {"wide": wide.view(-1)[self.shape.features :], "gates": steps, "zeros": self._zeros}
        first = prepare(isa, self.shape).step(**raw, **strides, **own, **bounds, **shared)
        second = mamba(isa, self.shape).step(mixed=mixed, d=weights.d, **shared)
        norm = gated_norm(isa, self.shape, has_norm=weights.norm is not None, is_gated=weights.norm_is_gated)
        weight = 0 if weights.norm is None else weights.norm
        third = norm.step(
            mixed=mixed, z=wide, weight=weight, shape=num_rows, stride=stride, eps=float_bits(weights.eps)
        )
        return [first, second, third]
