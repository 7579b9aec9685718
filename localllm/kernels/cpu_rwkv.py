"""A time mix of RWKV-7 between its products on the CPU, as one step of a tape. `rwkv7` defines what it computes.

Threads share out heads, each with its own columns of the rows that are kept: a head reads those it needs before it
writes those of this step, and no other head's. A head walks its tokens, and of each it first makes what the state is
changed by: decays, the unit vector of the key that removes, what that takes back, the key that replaces. Then tiles of
16 value features take the token in, two side by side: one pass adds up S^T kk, a second one changes S and adds up
S^T r. The state of all tiles, 16 KiB of a head with 64 features, stays in the first-level cache all the while. A sum
has two halves, of the even and the odd key features: a token's bits depend on nothing beside it, not on the step that
computes it, nor on where its state is written.

32 heads of 64 features with AVX-512 on one core: a token takes 46 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, LANES, Kernel, Value, Variable
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_states import StateSegment, StateTables
from localllm.kernels.rwkv7 import LOG_DECAY, SMALLEST_NORM, TimeMixWeights
from localllm.kernels.state_shapes import RWKV7_KEPT, RWKV7_PROJECTED, Rwkv7Shape, StatePlace

HALVES = 2  # of a sum over key features
FEATURES_A_STEP = 4
SIDE_BY_SIDE = 2  # tiles that share the loads of what a key feature is multiplied by
_MADE = ("decay", "unit", "taken", "key")  # of a token and a head, before its state takes it in


def time_mix_source(shape: Rwkv7Shape, *, is_first: bool) -> Kernel:
    """wide, first, mixed and the tables: see `TimeMixPlaces`. eps: the bits of a float."""
    words = "wide first mixed removal_key rate_key bonus norm norm_bias segments count | stride state snapshot eps"
    k = Kernel("rwkv7_time_mix", words)
    num_segments = k.arg.count.load("i64", 8)
    made = {name: k.stack(F32V, shape.head_dim // LANES) for name in (*_MADE, "out")}
    private = k.stack(F32V, shape.head_dim * shape.head_dim // LANES)
    # All segments of one head before the next: threads have equal parts of the long ones too.
    begin, end = k.share(num_segments * shape.num_heads)
    with k.range(begin, end) as item:
        head = _Head(k, shape, item % num_segments, item / num_segments, made, is_first=is_first)
        head.walk(private)
        head.keep()
    return k


class _Head:
    """A segment's tokens in one head."""

    def __init__(
        self, k: Kernel, shape: Rwkv7Shape, number: Value, head: Value, made: dict[str, Value], *, is_first: bool
    ) -> None:
        self.k, self.shape, self.head, self.made, self.is_first = k, shape, head, made, is_first
        self.segment = StateSegment(k, shape, number)
        self.first, self.end = self.segment.first(head), self.segment.end
        self._own_end = k.larger(self.segment.committed, self.first)  # tokens before it change the state in place
        self._column = head * (4 * shape.head_dim)  # bytes into the features of all heads
        self._matrix = head * (4 * shape.head_dim * shape.head_dim)

    def walk(self, private: Value) -> None:
        k, segment = self.k, self.segment
        own = segment.matrices.at(self._matrix)
        source = k.variable(own)
        with k.range(self.first, self.end, rolled=True) as position:
            is_new = position.compare("uge", segment.past)
            row = self._row(position)
            with k.when(is_new):
                self._value(position, row)
            # Of a token that is computed again nobody asks what comes out: anything stands for what reads it.
            receptance = is_new.choose(self._at(row, "r"), row)
            self._make(row)
            is_own = (position + 1).compare("ule", self._own_end)
            target = is_own.choose(own, private)
            self._take_in(source.get(), target, self._at(row, "v"), receptance)
            source.set(target)
            with segment.snapshots() as (wanted, part), k.when(wanted.compare("eq", position + 1)):
                self._copy(target, part.at(self._matrix), 4 * self.shape.head_dim * self.shape.head_dim)
            with k.when(is_new):
                self._finish(position, row)

    def keep(self) -> None:
        """Write this head's columns of rows to snapshots and into the kept rows, and the state's new position."""
        shape, segment = self.shape, self.segment
        segment.positions.at(self.head * 8).store(self._own_end, 8)

        def copy(position: Value, target: Value) -> None:
            source = self._row(position)
            for name in RWKV7_KEPT:
                self._copy(self._at(source, name), self._at(target.at(self._column), name), 4 * shape.head_dim)

        segment.keep_rows(copy, self.first)

    def _row(self, position: Value) -> Value:
        """A pointer to this head's columns of the batch's row at a position, or of the kept one."""
        segment = self.segment
        own = self.k.arg.wide.at(segment.batch_row(position) * self.k.arg.stride * 4)
        return position.compare("slt", segment.past).choose(segment.kept(position), own).at(self._column)

    def _at(self, row: Value, name: str) -> Value:
        return row.at(4 * self.shape.features * RWKV7_PROJECTED.index(name))

    def _value(self, position: Value, row: Value) -> None:
        """Leave a token's values to the other layers, or mix them with those of the first one."""
        k, v = self.k, self._at(row, "v")
        first = k.arg.first.at(self.segment.batch_row(position) * (4 * self.shape.features)).at(self._column)
        for at in self._vectors():
            own = v.at(at).load(F32V)
            if self.is_first:
                first.at(at).store(own)
            else:
                share = cpu_math.sigmoid(k, self._at(row, "value_gate").at(at).load(F32V))
                v.at(at).store(k.fma(first.at(at).load(F32V) - own, share, own))

    def _make(self, row: Value) -> None:
        """Make of a row what the state is changed by."""
        k, squares = self.k, self.k.f32v(0)
        for at in self._vectors():
            key = self._at(row, "k").at(at).load(F32V)
            removing = key * self._weight("removal_key", at)
            squares = k.fma(removing, removing, squares)
            self.made["unit"].at(at).store(removing, 64)
            rate = cpu_math.sigmoid(k, self._at(row, "a").at(at).load(F32V))
            change = key * (rate - 1.0)
            self.made["key"].at(at).store(k.fma(change, self._weight("rate_key", at), key), 64)
            self.made["taken"].at(at).store(rate, 64)
            decay = cpu_math.sigmoid(k, self._at(row, "w").at(at).load(F32V)) * LOG_DECAY
            self.made["decay"].at(at).store(cpu_math.exp(k, decay), 64)
        length = k.unary("sqrt", cpu_math.total(k, squares))
        smallest = k.constant(F32, SMALLEST_NORM)
        length = length.compare("olt", smallest).choose(smallest, length).splat()  # in this order a NaN stays one
        for at in self._vectors():
            unit = self.made["unit"].at(at).load(F32V, 64) / length
            self.made["unit"].at(at).store(unit, 64)
            self.made["taken"].at(at).store(self.made["taken"].at(at).load(F32V, 64) * unit, 64)

    def _take_in(self, source: Value, target: Value, values: Value, receptance: Value) -> None:
        """Write diag(decay) S - taken (x) (S^T unit) + key (x) value to `target`, and S^T r of it to `out`."""
        k, tiles = self.k, self.shape.head_dim // LANES
        count = SIDE_BY_SIDE if tiles % SIDE_BY_SIDE == 0 else 1
        tile_bytes = 4 * LANES * self.shape.head_dim
        sums = [[k.variable(k.f32v(0)) for _ in range(HALVES)] for _ in range(count)]
        with k.range(k.i64(0), k.i64(tiles), count, rolled=True) as tile:
            offsets = [tile * tile_bytes + n * tile_bytes for n in range(count)]
            columns = [tile * (4 * LANES) + 4 * LANES * n for n in range(count)]
            self._sweep(sums, lambda at, n: self._held(source, offsets[n], at), self.made["unit"])
            held = [self._total(each) for each in sums]
            own = [values.at(column).load(F32V) for column in columns]

            def changed(at: Value, n: int) -> Value:
                decay, taken, key = (self._factor(self.made[name], at) for name in ("decay", "taken", "key"))
                state = self._held(source, offsets[n], at) * decay
                state = k.fma(key, own[n], state - taken * held[n])
                target.at(offsets[n]).at(at * LANES).store(state)
                return state

            self._sweep(sums, changed, receptance)
            for column, each in zip(columns, sums, strict=True):
                self.made["out"].at(column).store(self._total(each), 64)

    def _sweep(self, sums: list[list[Variable]], state: Callable[[Value, int], Value], factors: Value) -> None:
        """Add up the states of all key features times their factors. state: of a feature, by the bytes of those before
        it, in a tile of those side by side."""
        k = self.k
        for each in sums:
            for half in each:
                half.set(k.f32v(0))
        with k.range(k.i64(0), k.i64(4 * self.shape.head_dim), 4 * FEATURES_A_STEP, rolled=True) as i:
            for feature in range(FEATURES_A_STEP):
                at = i + 4 * feature
                factor = self._factor(factors, at)
                for n, each in enumerate(sums):
                    total = each[feature % HALVES]
                    total.set(k.fma(factor, state(at, n), total.get()))

    def _held(self, source: Value, offset: Value, at: Value) -> Value:
        return source.at(offset).at(at * LANES).load(F32V)

    def _factor(self, factors: Value, at: Value) -> Value:
        return factors.at(at).load(F32).splat()

    def _total(self, halves: list[Variable]) -> Value:
        return halves[0].get() + halves[1].get()

    def _finish(self, position: Value, row: Value) -> None:
        """(norm(out) + (r . k bonus) v) * g, as the last matrix reads it."""
        k, dim, out = self.k, self.shape.head_dim, self.made["out"]
        products, total = k.f32v(0), k.f32v(0)
        for at in self._vectors():
            total = total + out.at(at).load(F32V, 64)
            weighted = self.made["key"].at(at).load(F32V, 64) * self._weight("bonus", at)
            products = k.fma(self._at(row, "r").at(at).load(F32V), weighted, products)
        mean = (cpu_math.total(k, total) / float(dim)).splat()
        squares = k.f32v(0)
        for at in self._vectors():
            centred = out.at(at).load(F32V, 64) - mean
            squares = k.fma(centred, centred, squares)
        eps = k.arg.eps.convert("trunc", I32).convert("bitcast", F32)
        deviation = k.unary("sqrt", cpu_math.total(k, squares) / float(dim) + eps)
        inverse = (k.constant(F32, 1.0) / deviation).splat()
        bonus = cpu_math.total(k, products).splat()
        mixed = k.arg.mixed.at(self.segment.batch_row(position) * (4 * self.shape.features)).at(self._column)
        for at in self._vectors():
            normed = (out.at(at).load(F32V, 64) - mean) * inverse * self._weight("norm", at)
            value = k.fma(bonus, self._at(row, "v").at(at).load(F32V), normed + self._weight("norm_bias", at))
            mixed.at(at).store(value * self._at(row, "g").at(at).load(F32V))

    def _weight(self, name: str, at: int) -> Value:
        weights: Value = getattr(self.k.arg, name).at(self._column).at(at).load(F32V)
        return weights

    def _vectors(self) -> Sequence[int]:
        """The bytes before each 16 features of a head."""
        return range(0, 4 * self.shape.head_dim, 4 * LANES)

    def _copy(self, source: Value, target: Value, num_bytes: int) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(num_bytes), 4 * LANES) as at:
            target.at(at).store(source.at(at).load(F32V))


@cache
def time_mix(isa: Isa, shape: Rwkv7Shape, *, is_first: bool) -> Native:
    return compile_kernel(time_mix_source(shape, is_first=is_first), isa)


class TimeMixPlaces(NamedTuple):
    """Where a time mix reads and writes, fp32.

    wide: rows of `stride` floats, RWKV7_PROJECTED side by side; values are mixed in place.
    first: [rows, features], the values of the first layer: written where this is the one, else read.
    mixed: [rows, features], written.
    """

    wide: Tensor
    stride: int
    first: Tensor
    mixed: Tensor


def time_mix_step(
    isa: Isa,
    shape: Rwkv7Shape,
    weights: TimeMixWeights,
    tables: StateTables,
    place: StatePlace,
    places: TimeMixPlaces,
    *,
    is_first: bool,
) -> Step:
    """Return the step of a layer. is_first: its values are left to the others as they are."""
    assert shape.fills_vectors
    names = ("removal_key", "rate_key", "bonus", "norm", "norm_bias")
    own = {name: getattr(weights, name) for name in names}
    assert all(x.dtype is torch.float32 and x.is_contiguous() for x in (*own.values(), places.first, places.mixed))
    return time_mix(isa, shape, is_first=is_first).step(
        state=place.state,
        snapshot=place.snapshot,
        eps=float_bits(weights.eps),
        **places._asdict(),
        **own,
        **tables.words,
    )
