"""A short convolution between two gates on the CPU, as one step of a tape. `short_conv` defines what it computes.

Threads share out channels, each with its own part of every row. A token's B * x takes the place of its B, where the
convolution of the tokens behind it, snapshots and the kept rows read it: the rows before a step's first are those that
are kept. A token's bits depend on nothing beside it: nothing is summed over channels.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from localllm.kernels.cpu_ir import F32V, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Step
from localllm.kernels.cpu_states import StateSegment, StateTables
from localllm.kernels.short_conv import ConvWeights
from localllm.kernels.state_shapes import ConvShape, StatePlace

_BYTES = 4 * LANES  # of a vector


def short_conv_source(shape: ConvShape, *, has_bias: bool) -> Kernel:
    """wide, mixed and the tables: see `ConvRoom`. zeros: fp32 [channels]."""
    k = Kernel("short_conv", "wide zeros taps bias mixed segments count | stride state snapshot")
    num_segments, vectors = k.arg.count.load(I64, 8), k.i64(shape.channels // LANES)
    with k.share_pairs(num_segments, vectors) as (number, first, last):
        part = _Part(k, shape, number, first * _BYTES, last * _BYTES)
        part.convolve(has_bias=has_bias)
        part.keep()
    return k


class _Part:
    """A segment's tokens in some channels: those from so many bytes into a row on."""

    def __init__(self, k: Kernel, shape: ConvShape, number: Value, begin: Value, end: Value) -> None:
        self.k, self.shape, self.begin, self.end = k, shape, begin, end
        self.segment = StateSegment(k, shape, number)

    def convolve(self, *, has_bias: bool) -> None:
        k, shape, segment, a = self.k, self.shape, self.segment, self.k.arg
        before, row_bytes = shape.conv_width - 1, 4 * shape.channels
        window = [k.variable(self._raw(segment.past - (before - n))) for n in range(before)]
        with k.range(segment.past, segment.end, rolled=True) as position:
            row = segment.batch_row(position)
            own, mixed = a.wide.at(row * a.stride * 4), a.mixed.at(row * row_bytes)
            rows = [each.get() for each in window]
            with k.range(self.begin, self.end, _BYTES) as at:
                taps = [a.taps.at(at).at(row_bytes * n).load(F32V) for n in range(shape.conv_width)]
                value = own.at(at).load(F32V) * own.at(at).at(2 * row_bytes).load(F32V)
                own.at(at).store(value)
                seen = [*(each.at(at).load(F32V) for each in rows), value]
                total = seen[0] * taps[0]
                for each, tap in zip(seen[1:], taps[1:], strict=True):
                    total = total + each * tap
                if has_bias:
                    total = total + a.bias.at(at).load(F32V)
                mixed.at(at).store(own.at(at).at(row_bytes).load(F32V) * total)
            for variable, following in zip(window, [*rows[1:], own], strict=True):
                variable.set(following)

    def keep(self) -> None:
        """Write snapshots and the kept rows."""
        self.segment.keep_rows(lambda position, target: self._copy(self._raw(position), target))

    def _raw(self, position: Value) -> Value:
        """A pointer to what the convolution sees at a position: zeros before the first token."""
        own = self.k.arg.wide.at(self.segment.batch_row(position) * self.k.arg.stride * 4)
        old = position.compare("slt", 0).choose(self.k.arg.zeros, self.segment.kept(position))
        return position.compare("slt", self.segment.past).choose(old, own)

    def _copy(self, source: Value, target: Value) -> None:
        with self.k.range(self.begin, self.end, _BYTES) as at:
            target.at(at).store(source.at(at).load(F32V))


@cache
def short_conv(isa: Isa, shape: ConvShape, *, has_bias: bool) -> Native:
    return compile_kernel(short_conv_source(shape, has_bias=has_bias), isa)


class ConvRoom:
    """What layers of one shape share for a batch, at fixed places that a tape can point at."""

    def __init__(self, shape: ConvShape, tables: StateTables) -> None:
        assert shape.fills_vectors
        self.shape, self._tables = shape, tables
        self._zeros = torch.zeros(shape.channels)

    def steps(
        self, isa: Isa, weights: ConvWeights, place: StatePlace, *, wide: Tensor, stride: int, mixed: Tensor
    ) -> list[Step]:
        """wide: fp32 rows of `stride` floats: B, C, x; B becomes B * x. mixed: fp32 [rows, channels], written."""
        bias = weights.bias
        assert all(each is None or each.dtype is torch.float32 for each in (weights.taps, bias, wide, mixed))
        assert weights.taps.is_contiguous() and mixed.is_contiguous()
        kernel = short_conv(isa, self.shape, has_bias=bias is not None)
        place_words = {"stride": stride, "state": place.state, "snapshot": place.snapshot}
        own = {"wide": wide, "mixed": mixed, "zeros": self._zeros, "taps": weights.taps}
        return [kernel.step(**own, **place_words, **self._tables.words, bias=0 if bias is None else bias)]
