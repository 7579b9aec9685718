"""What CPU kernels of layers share that keep a matrix a head: the convolution in front, and the walk over the tokens.

Each kernel of such a layer has, as far as it needs them, the arguments `wide`, `gates`, `zeros`, `conv`, `stride`,
`gates_stride`, `rows`, `keys`, `values` and those of `StateSegment`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, LANES, Kernel, Value
from localllm.kernels.cpu_states import StateSegment
from localllm.kernels.state_shapes import ConvolvedShape

HALVES = 2  # of a sum over key features; with one, a sweep waits 3 % longer for its own additions
FEATURES_A_STEP = 8  # with four, a sweep takes 3 % longer
# Rows of the projection that are fetched before they are read: their strides are too long for a prefetcher. Without it
# each kernel takes 0.9 ms more for 512 tokens.
ROWS_AHEAD = 4


S = TypeVar("S", bound=ConvolvedShape)


class TokenSegment(StateSegment[S]):
    """A segment, and what a first kernel has prepared of it: so many floats a token and head of keys, or of values."""

    def __init__(self, k: Kernel, shape: S, number: Value, key_floats: int, value_floats: int) -> None:
        super().__init__(k, shape, number)
        self._key_floats, self._value_floats = key_floats, value_floats

    def keys(self, head: Value, position: Value) -> Value:
        """A pointer to what is prepared of a token for a head of keys."""
        return self._prepared(self.k.arg.keys, head, position, self._key_floats)

    def values(self, head: Value, position: Value) -> Value:
        """A pointer to what is prepared of a token for a head of values."""
        return self._prepared(self.k.arg.values, head, position, self._value_floats)

    def _prepared(self, prepared: Value, head: Value, position: Value, floats: int) -> Value:
        return prepared.at((head * self.k.arg.rows + self.row + (position - self.past)) * (4 * floats))


class Prepared(Generic[S]):
    """A segment's tokens, one head at a time: reads what goes into the convolution, and keeps it. has_bias: of the
    convolution, an argument `conv_bias`."""

    def __init__(self, k: Kernel, shape: S, segment: TokenSegment[S], *, has_bias: bool = False) -> None:
        self.k, self.shape, self.segment, self._has_bias = k, shape, segment, has_bias
        self._gates_begin = 4 * shape.channels  # bytes into a kept row

    def _raw(self, position: Value) -> Value:
        """A pointer to what goes into the convolution at a position."""
        own = self.k.arg.wide.at(self.segment.batch_row(position) * self.k.arg.stride * 4)
        return self._old_or(position, own, 0)

    def _raw_gates(self, position: Value) -> Value:
        own = self.k.arg.gates.at(self.segment.batch_row(position) * self.k.arg.gates_stride * 4)
        return self._old_or(position, own, self._gates_begin)

    def _head_gates(self, position: Value) -> list[tuple[Value, int]]:
        """What heads have one gate each of: pointers to them, and where they are kept."""
        return [(self._raw_gates(position), self._gates_begin)]

    def _old_or(self, position: Value, own: Value, offset: int) -> Value:
        """The row of this batch, or a pointer so many bytes into the kept row, or to zeros before the first token."""
        old = position.compare("slt", 0).choose(self.k.arg.zeros, self.segment.kept(position)).at(offset)
        return position.compare("slt", self.segment.past).choose(old, own)

    @contextmanager
    def _windows(self, first: Value, end: Value) -> Iterator[tuple[Value, list[Value]]]:
        """For each position: pointers to the rows that the convolution sees there, its own last."""
        k, before = self.k, self.shape.conv_width - 1
        window = [k.variable(self._raw(first - (before - n))) for n in range(before)]
        with k.range(first, end, rolled=True) as position:
            rows = [*(row.get() for row in window), self._raw(position)]
            yield position, rows
            for variable, row in zip(window, rows[1:], strict=True):
                variable.set(row)

    def _convolved(self, rows: list[Value], offset: Value) -> Value:
        """SiLU of the convolution of 16 channels, `offset` bytes into each row."""
        self.k.prefetch(rows[-1].at(self.k.arg.stride * (4 * ROWS_AHEAD)).at(offset))
        taps = self.k.arg.conv.at(offset)
        first, weight = rows[0].at(offset).load(F32V), taps.load(F32V)
        if self._has_bias:
            value = self.k.fma(first, weight, self.k.arg.conv_bias.at(offset).load(F32V))
        else:
            value = first * weight
        for n, row in enumerate(rows[1:], 1):
            weight = taps.at(4 * self.shape.channels * n).load(F32V)
            value = self.k.fma(row.at(offset).load(F32V), weight, value)
        return cpu_math.silu(self.k, value)

    def _make_gates(self, head: Value, first: Value, num_gates: int, make: Callable[..., list[Value]]) -> None:
        """Write behind each token's values what `make` makes of as many gates, of 16 tokens at once."""
        k, segment = self.k, self.segment
        lanes = [k.stack(F32V) for _ in range(num_gates)]
        for each in lanes:
            each.store(k.f32v(0), 64)
        with k.range(first, segment.end, LANES) as block:
            count = k.smaller(segment.end - block, k.i64(LANES))
            with k.range(k.i64(0), count, rolled=True) as i:
                for each, (raw, _) in zip(lanes, self._head_gates(block + i), strict=True):
                    each.at(i * 4).store(raw.at(head * 4).load(F32))
            made = [k.variable(vector).slot for vector in make(*(each.load(F32V, 64) for each in lanes))]
            with k.range(k.i64(0), count, rolled=True) as i:
                row = segment.values(head, block + i).at(4 * self.shape.matrix_dims[1])
                for n, each in enumerate(made):
                    row.at(4 * n).store(each.at(i * 4).load(F32))

    def _keep(self, first: Value, channels: list[Value], features: int, head: Value | None) -> None:
        """Write a head's raw channels, and a value head's gates, to the snapshots and into the kept rows."""
        self.segment.keep_rows(lambda position, row: self._copy(position, row, channels, features, head), first)

    def _copy(self, position: Value, target: Value, channels: list[Value], features: int, head: Value | None) -> None:
        k, source = self.k, self._raw(position)
        for channel in channels:
            with k.range(channel, channel + 4 * features, 4 * LANES) as at:
                target.at(at).store(source.at(at).load(F32V))
        if head is not None:
            for raw, begin in self._head_gates(position):
                target.at(begin).at(head * 4).store(raw.at(head * 4).load(F32))


def softplus(k: Kernel, x: Value) -> Value:
    """log(1 + e ** x) within 5e-7 relative, as max(x, 0) + log(1 + e ** -|x|); NaN of NaN."""
    return k.larger(k.f32v(0), x) + _log1p(k, cpu_math.exp(k, k.f32v(0) - k.unary("fabs", x)))


def _log1p(k: Kernel, y: Value) -> Value:
    """log(1 + y) of 0 <= y <= 1: 2 artanh(z) with z = y / (2 + y), which is at most a third; what its series lacks is
    below 2e-8 of it."""
    z = y / (y + 2.0)
    square = z * z
    series = k.f32v(1 / 15)
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = k.fma(series, square, k.f32v(1 / n))
    return z * 2.0 * series


class Sweep:
    """One pass over a tile of a state, or over two side by side, which share the loads of keys and queries. factors: by
    which of those a state is multiplied to be read. key_begin: where in a row the key is that writes, in bytes; behind
    it are the decays of key features, if they have their own."""

    def __init__(
        self, k: Kernel, key_dim: int, tiles: int, factors: tuple[str, ...] = ("key", "query"), key_begin: int = 0
    ) -> None:
        self.k, self.tiles, self.key_dim, self.factors, self._key_begin = k, tiles, key_dim, factors, key_begin
        self.tile_bytes = 4 * LANES * key_dim
        self.private = k.stack(F32V, tiles * key_dim)
        each = itertools.product(factors, range(tiles), range(HALVES))
        self._sums = {one: k.variable(k.f32v(0)) for one in each}

    def read(self, source: Value, row: Value) -> None:
        """Add up S^T k and S^T q of a token."""
        self._clear()
        with self.k.range(self.k.i64(0), self.k.i64(self.key_dim), FEATURES_A_STEP, rolled=True) as i:
            for n in range(FEATURES_A_STEP):
                states = [source.at(i * (4 * LANES) + self._offset(tile, n)).load(F32V) for tile in range(self.tiles)]
                self._add(states, row, i, n)

    def take_in(
        self, source: Value, target: Value, row: Value, decay: Value | None, deltas: list[Value], next_row: Value
    ) -> None:
        """Write decay * S + k (x) delta to `target`, and add up what `read` does of it for the next token. decay: None
        where key features have their own."""
        k, keys = self.k, row.at(self._key_begin)
        self._clear()
        with k.range(k.i64(0), k.i64(self.key_dim), FEATURES_A_STEP, rolled=True) as i:
            for n in range(FEATURES_A_STEP):
                key, own = keys.at(i * 4 + 4 * n).load(F32).splat(), decay
                if own is None:
                    own = keys.at(i * 4 + 4 * (self.key_dim + n)).load(F32).splat()
                states = []
                for tile, delta in enumerate(deltas):
                    at = i * (4 * LANES) + self._offset(tile, n)
                    states.append(k.fma(key, delta, source.at(at).load(F32V) * own))
                    target.at(at).store(states[-1])
                self._add(states, next_row, i, n)

    def sums(self, tile: int) -> list[Value]:
        """S^T k and S^T q of the token whose sums were added up last, or one of them."""
        return [self._sums[factor, tile, 0].get() + self._sums[factor, tile, 1].get() for factor in self.factors]

    def copy(self, source: Value, target: Value) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(self.tiles * self.tile_bytes), 4 * LANES) as at:
            target.at(at).store(source.at(at).load(F32V))

    def _add(self, states: list[Value], row: Value, i: Value, n: int) -> None:
        for factor in self.factors:
            begin = 0 if factor == "key" else 4 * self.key_dim
            number = row.at(i * 4 + (begin + 4 * n)).load(F32).splat()
            for tile, state in enumerate(states):
                total = self._sums[factor, tile, n % HALVES]
                total.set(self.k.fma(number, state, total.get()))

    def _clear(self) -> None:
        for total in self._sums.values():
            total.set(self.k.f32v(0))

    def _offset(self, tile: int, feature: int) -> int:
        return tile * self.tile_bytes + 4 * LANES * feature


class TokenWalk(ABC, Generic[S]):
    """A segment's tokens in one head, of which a state takes in one after the other. key_head: whose keys are its."""

    def __init__(self, k: Kernel, shape: S, segment: TokenSegment[S], head: Value, key_head: Value) -> None:
        self.k, self.shape, self.segment, self.head, self._key_head = k, shape, segment, head, key_head
        self.first, self.end = segment.first(head), segment.end
        self._own_end = k.larger(segment.committed, self.first)  # tokens before it change the state in place
        self._matrix_offset = head * (shape.matrix_bytes // shape.heads)

    def walk(self, sweep: Sweep, tile: Value) -> None:
        """All tokens in the tiles of a sweep from this one on: o takes the place of their values."""
        k, segment = self.k, self.segment
        offset = self._matrix_offset + tile * sweep.tile_bytes
        own = segment.matrices.at(offset)
        source = k.variable(own)
        sweep.read(own, segment.keys(self._key_head, self.first))
        with k.range(self.first, self.end, rolled=True) as position:
            after = position + 1
            row = segment.keys(self._key_head, position)
            decay, deltas = self._outputs(sweep, tile, position, row)
            is_last = after.compare("eq", self.end)
            is_own = after.compare("ule", self._own_end)
            with k.when(is_own | (is_last ^ True)):
                target = is_own.choose(own, sweep.private)
                # Behind the last token its own key stands for the next one's, and nobody asks for the sums.
                next_row = segment.keys(self._key_head, is_last.choose(position, after))
                sweep.take_in(source.get(), target, row, decay, deltas, next_row)
                source.set(target)
                with segment.snapshots() as (wanted, part), k.when(wanted.compare("eq", after)):
                    sweep.copy(target, part.at(offset))

    @abstractmethod
    def _outputs(self, sweep: Sweep, tile: Value, position: Value, row: Value) -> tuple[Value | None, list[Value]]:
        """Write what comes out of one token over its values. Returns its decay, if it has one, and what its keys
        write."""
