"""Gated DeltaNet and Kimi Delta Attention between their projections on the CPU, as two steps of a tape. `delta_rule`
defines what it computes.

The first kernel does what one token or its few predecessors decide: the convolution, the lengths of queries and keys,
the gates. Threads share out heads, each with its own channels of the kept rows: a head reads those it needs before it
writes those of this step, and no other head's.

The second walks the tokens, a tile of a head's state at a time, so that the tile stays in the first-level cache. One
sweep over a tile takes in a token and adds up what the next one reads of it. With S before a token, S^T k and S^T q
give delta = beta (v - g S^T k) and o = g S^T q + (q . k) delta; then S is changed, and while it is, S^T k and S^T q of
the next token are added up. A sum has two halves, of the even and the odd key features: a token's bits depend on
nothing beside it, not on the step that computes it, nor on where its state is written.

16 heads of keys, 32 of values, 128 features each, with AVX-512 on two cores: 512 tokens take 1.4 ms and 7.4 ms, where
the second kernel's multiplications and additions alone are 5.6 ms at best.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_recurrence import ROWS_AHEAD, Prepared, Sweep, TokenSegment, TokenWalk, softplus
from localllm.kernels.cpu_states import StateTables
from localllm.kernels.delta_rule import L2_EPS, DeltaWeights
from localllm.kernels.sizes import OutputGate
from localllm.kernels.state_shapes import STEP_ROWS, DeltaShape, StatePlace


def key_floats(shape: DeltaShape) -> int:
    """Floats of a token and a key head, as the second kernel reads them: its key, its query, the product of both. Where
    key features have decays: key and query times the decay, their product without it, the key, the decay."""
    return (2 if shape.decays == "head" else 4) * shape.key_dim + LANES


def key_begin(shape: DeltaShape) -> int:
    """Where in those the key is, in bytes; behind it, if key features have decays, these."""
    return 0 if shape.decays == "head" else 4 * (2 * shape.key_dim + LANES)


def value_floats(shape: DeltaShape) -> int:
    """Floats of a token and a value head, as the second kernel reads them: its value, its beta, its decay if the head
    has one."""
    return shape.value_dim + LANES


def _segment(k: Kernel, shape: DeltaShape, number: Value) -> TokenSegment[DeltaShape]:
    return TokenSegment(k, shape, number, key_floats(shape), value_floats(shape))


def prepare_source(shape: DeltaShape) -> Kernel:
    """wide, gates, decays, keys, values and the tables: see `DeltaRoom`. zeros: fp32 [row_floats]. beta_scale: the bits
    of a float."""
    words = "wide gates decays zeros conv a_log dt_bias keys values segments count"
    words += " | stride gates_stride decays_stride rows state snapshot beta_scale"
    k = Kernel("prepare_delta", words)
    num_segments = k.arg.count.load(I64, 8)
    # Each thread has its part of both kinds of heads: a query's and a key's channels take twice as long as a value's.
    begin, end = k.share(num_segments * shape.key_heads)
    with k.range(begin, end) as item:
        _Prepared(k, shape, item % num_segments).key_head(item / num_segments)
    begin, end = k.share(num_segments * shape.value_heads)
    with k.range(begin, end) as item:
        _Prepared(k, shape, item % num_segments).value_head(item / num_segments)
    return k


class _Prepared(Prepared[DeltaShape]):
    """A segment's tokens, one head at a time."""

    def __init__(self, k: Kernel, shape: DeltaShape, number: Value) -> None:
        super().__init__(k, shape, _segment(k, shape, number))
        self._keys_begin = shape.key_heads * shape.key_dim
        self._decays_begin = self._gates_begin + 4 * shape.value_heads

    def key_head(self, head: Value) -> None:
        k, segment, dim = self.k, self.segment, self.shape.key_dim
        query, key = head * (4 * dim), head * (4 * dim) + 4 * self._keys_begin  # bytes into a row
        first, end = segment.first(k.i64(0)), segment.end
        with self._windows(first, end) as (position, rows):
            row = segment.keys(head, position)
            key_scale = self._unit(rows, key, row)
            query_scale = self._unit(rows, query, row.at(4 * dim)) * dim**-0.5
            products = k.variable(k.f32v(0))
            with k.range(k.i64(0), k.i64(4 * dim), 4 * LANES) as i:
                at, query_at = row.at(i), row.at(4 * dim).at(i)
                unit, scaled = at.load(F32V) * key_scale.splat(), query_at.load(F32V) * query_scale.splat()
                at.store(unit)
                query_at.store(scaled)
                products.set(k.fma(unit, scaled, products.get()))
            row.at(8 * dim).store(cpu_math.total(k, products.get()))
            if self.shape.decays == "key":
                self._key_decays(head, position, row)
        self._keep(first, [query, key], dim, None)

    def _key_decays(self, head: Value, position: Value, row: Value) -> None:
        """Write the decays of a head's key features, and multiply key and query by them."""
        k, dim, a = self.k, self.shape.key_dim, self.k.arg
        rate = cpu_math.exp(k, a.a_log.at(head * 4).load(F32).splat())
        raw, begin = self._raw_decays(position).at(head * (4 * dim)), row.at(key_begin(self.shape))
        dt_bias = a.dt_bias.at(head * (4 * dim))
        with k.range(k.i64(0), k.i64(4 * dim), 4 * LANES) as i:
            steps = softplus(k, raw.at(i).load(F32V) + dt_bias.at(i).load(F32V))
            decay, key = cpu_math.exp(k, k.f32v(0) - rate * steps), row.at(i).load(F32V)
            begin.at(i).store(key)
            begin.at(4 * dim).at(i).store(decay)
            row.at(i).store(key * decay)
            query = row.at(4 * dim).at(i)
            query.store(query.load(F32V) * decay)

    def value_head(self, head: Value) -> None:
        k, segment, dim = self.k, self.segment, self.shape.value_dim
        channel = head * (4 * dim) + 8 * self._keys_begin
        first, end = segment.first(head), segment.end
        with self._windows(first, end) as (position, rows):
            row = segment.values(head, position)
            with k.range(k.i64(0), k.i64(4 * dim), 4 * LANES) as i:
                row.at(i).store(self._convolved(rows, channel + i))
        self._gates(head, first)
        self._keep(first, [channel], dim, head)

    def _head_gates(self, position: Value) -> list[tuple[Value, int]]:
        betas = super()._head_gates(position)
        if self.shape.decays == "key":
            return betas
        return [*betas, (self._raw_decays(position), self._decays_begin)]

    def _gates(self, head: Value, first: Value) -> None:
        """Write beta of each token, and the decay where a head has one."""
        k, a = self.k, self.k.arg
        beta_scale = a.beta_scale.convert("trunc", I32).convert("bitcast", F32).splat()
        rate = cpu_math.exp(k, a.a_log.at(head * 4).load(F32).splat())
        dt_bias = a.dt_bias.at(head * 4).load(F32).splat()

        def make(b: Value, *decays: Value) -> list[Value]:
            beta = cpu_math.sigmoid(k, b) * beta_scale
            return [beta, *(cpu_math.exp(k, k.f32v(0) - rate * softplus(k, raw + dt_bias)) for raw in decays)]

        self._make_gates(head, first, 1 if self.shape.decays == "key" else 2, make)

    def _raw_decays(self, position: Value) -> Value:
        own = self.k.arg.decays.at(self.segment.batch_row(position) * self.k.arg.decays_stride * 4)
        return self._old_or(position, own, self._decays_begin)

    def _copy(self, position: Value, target: Value, channels: list[Value], features: int, head: Value | None) -> None:
        super()._copy(position, target, channels, features, head)
        if head is None and self.shape.decays == "key":  # which lie like queries
            source, into = self._raw_decays(position), target.at(self._decays_begin)
            with self.k.range(channels[0], channels[0] + 4 * features, 4 * LANES) as at:
                into.at(at).store(source.at(at).load(F32V))

    def _unit(self, rows: list[Value], channel: Value, target: Value) -> Value:
        """Write a head's channels to `target`. Returns what brings them to length one."""
        k = self.k
        squares = k.variable(k.f32v(0))
        with k.range(k.i64(0), k.i64(4 * self.shape.key_dim), 4 * LANES) as i:
            value = self._convolved(rows, channel + i)
            target.at(i).store(value)
            squares.set(k.fma(value, value, squares.get()))
        return k.constant(F32, 1.0) / k.unary("sqrt", cpu_math.total(k, squares.get()) + L2_EPS)


def delta_source(isa: Isa, shape: DeltaShape, gate: OutputGate = "silu") -> Kernel:
    """z, mixed, keys, values and the tables: see `DeltaRoom`. norm: fp32 [value_dim]. eps: the bits of a float."""
    k = Kernel("delta", "z mixed norm keys values segments count | z_stride rows state snapshot eps")
    num_segments = k.arg.count.load(I64, 8)
    tiles = shape.value_dim // LANES
    wide = 2 if isa.sums >= 16 and tiles % 2 == 0 else 1
    sweep = Sweep(k, shape.key_dim, wide, key_begin=key_begin(shape))
    # All segments of one head before the next: threads have equal parts of the long ones too.
    begin, end = k.share(num_segments * shape.value_heads)
    with k.range(begin, end) as item:
        head = _Head(k, shape, item % num_segments, item / num_segments)
        with k.range(k.i64(0), k.i64(tiles), wide) as tile:
            head.walk(sweep, tile)
        head.finish(cpu_math.silu if gate == "silu" else cpu_math.sigmoid)
    return k


class _Head(TokenWalk[DeltaShape]):
    """A segment's tokens in one value head."""

    def __init__(self, k: Kernel, shape: DeltaShape, number: Value, head: Value) -> None:
        key_head = head % shape.key_heads if shape.is_tiled else head / (shape.value_heads // shape.key_heads)
        super().__init__(k, shape, _segment(k, shape, number), head, key_head)

    def _outputs(self, sweep: Sweep, tile: Value, position: Value, row: Value) -> tuple[Value | None, list[Value]]:
        """Write o of one token over its value. Returns its decay, if it has one, and its deltas."""
        k, shape = self.k, self.shape
        product = row.at(8 * shape.key_dim).load(F32).splat()
        values = self.segment.values(self.head, position)
        gates = values.at(4 * shape.value_dim)
        beta, deltas = gates.load(F32).splat(), []
        decay = gates.at(4).load(F32).splat() if shape.decays == "head" else None
        for n in range(sweep.tiles):
            by_key, by_query = sweep.sums(n)
            if decay is not None:
                by_key, by_query = decay * by_key, decay * by_query
            value = values.at(tile * (4 * LANES) + 4 * LANES * n)
            deltas.append((value.load(F32V) - by_key) * beta)
            value.store(k.fma(product, deltas[-1], by_query))
        return decay, deltas

    def finish(self, gate: Callable[[Kernel, Value], Value]) -> None:
        """norm(o) * weight * gate(z), and the state's new position."""
        k, shape, segment, a = self.k, self.shape, self.segment, self.k.arg
        segment.positions.at(self.head * 8).store(self._own_end, 8)
        eps = a.eps.convert("trunc", I32).convert("bitcast", F32)
        with k.range(segment.past, self.end, rolled=True) as position:
            o, row = segment.values(self.head, position), segment.batch_row(position)
            mixed = a.mixed.at((row * shape.value_heads + self.head) * (4 * shape.value_dim))
            z = a.z.at(row * a.z_stride * 4 + self.head * (4 * shape.value_dim))
            squares = k.variable(k.f32v(0))
            with k.range(k.i64(0), k.i64(4 * shape.value_dim), 4 * LANES) as i:
                k.prefetch(z.at(a.z_stride * (4 * ROWS_AHEAD) + i))
                value = o.at(i).load(F32V)
                squares.set(k.fma(value, value, squares.get()))
            mean = cpu_math.total(k, squares.get()) / float(shape.value_dim)
            inverse = (k.constant(F32, 1.0) / k.unary("sqrt", mean + eps)).splat()
            with k.range(k.i64(0), k.i64(4 * shape.value_dim), 4 * LANES) as i:
                value = o.at(i).load(F32V) * inverse * a.norm.at(i).load(F32V)
                mixed.at(i).store(value * gate(k, z.at(i).load(F32V)))


@cache
def prepare(isa: Isa, shape: DeltaShape) -> Native:
    return compile_kernel(prepare_source(shape), isa)


@cache
def delta(isa: Isa, shape: DeltaShape, gate: OutputGate) -> Native:
    return compile_kernel(delta_source(isa, shape, gate), isa)


class Strided(NamedTuple):
    """fp32 numbers of rows, of which each begins so many floats behind the one before."""

    rows: Tensor
    stride: int

    def behind(self, floats: int) -> Strided:
        """Return what is behind the first numbers of each row."""
        return Strided(self.rows[floats:], self.stride)


class DeltaRoom:
    """The buffers of a batch for the layers of one shape, at fixed places that a tape can point at."""

    def __init__(self, shape: DeltaShape, tables: StateTables) -> None:
        assert shape.fills_vectors and shape.conv_width - 1 <= STEP_ROWS
        self.shape, self._tables = shape, tables
        rows = tables.prepared_rows
        self._keys = torch.zeros(shape.key_heads, rows, key_floats(shape))
        self._values = torch.zeros(shape.value_heads, rows, value_floats(shape))
        self._zeros = torch.zeros(shape.row_floats)

    def steps(
        self,
        isa: Isa,
        weights: DeltaWeights,
        place: StatePlace,
        wide: Strided,
        *,
        gates: Strided,
        decays: Strided,
        z: Strided,
        mixed: Tensor,
    ) -> list[Step]:
        """wide: rows that begin with queries, keys and values before the convolution. gates, decays: b [rows,
        value_heads] and a [rows, decay_features]. z: [rows, value_features]. mixed: fp32 of that shape, written; it may
        be z.
        """
        own = {"conv": weights.conv, "a_log": weights.a_log, "dt_bias": weights.dt_bias}
        assert all(x.dtype is torch.float32 and x.is_contiguous() for x in (*own.values(), weights.norm, mixed))
        shared: dict[str, Tensor | int]
        shared = {"keys": self._keys, "values": self._values, **self._tables.words}
        shared |= {"rows": self._tables.prepared_rows, "state": place.state, "snapshot": place.snapshot}
        first = prepare(isa, self.shape).step(
            wide=wide.rows,
            stride=wide.stride,
            gates=gates.rows,
            gates_stride=gates.stride,
            decays=decays.rows,
            decays_stride=decays.stride,
            zeros=self._zeros,
            beta_scale=float_bits(weights.beta_scale),
            **own,
            **shared,
        )
        second = delta(isa, self.shape, weights.gate).step(
            z=z.rows, z_stride=z.stride, mixed=mixed, norm=weights.norm, eps=float_bits(weights.eps), **shared
        )
        return [first, second]
