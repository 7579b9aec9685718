"""4-bit groups found and packed on the CPU: what quant/hqq.py describes, 16 rows a vector, to the same bits.

2 ns a weight on one core where the torch operations take 35: a model is converted at the speed at which it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from localllm.kernels.cpu_ir import F32, F32V, I32V, LANES, Kernel, Value, Variable, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.tile16 import TILE, WORD

LEVELS = 15
SUM_LANES = 8  # partial sums, as in quant/hqq.py
HALFS = vector_of("half")


def calibrate_source(group: int) -> Kernel:
    """weight fp32 [tiles * 16, stride]; qweight, scale, bias: tile16 with `groups` groups a row, `whole` of which are
    written. starts: fp32 pairs (1 + growth, shift), `num_starts` of them; with none, round-to-nearest."""
    k = Kernel("calibrate", "weight qweight scale bias starts | tiles groups whole stride num_starts")
    a = k.arg
    weights = _Columns(k, group)
    centred = _Columns(k, group)
    begin, end = k.share(a.tiles * a.whole)
    with k.range(begin, end) as i:
        tile, g = i / a.whole, i % a.whole
        at = tile * a.groups + g
        weights.transpose(a.weight.at((tile * TILE * a.stride + g * group) * 4), a.stride * 4)
        scale, bias = k.variable(k.constant(HALFS, 0)), k.variable(k.constant(HALFS, 0))
        _round_to_nearest(weights, scale, bias)
        with k.when(a.num_starts.compare("ugt", 0)):
            _half_quadratic(weights, centred, scale, bias)
        a.scale.at(at * (2 * TILE)).store(scale.get(), 2 * TILE)
        a.bias.at(at * (2 * TILE)).store(bias.get(), 2 * TILE)
        _pack(weights, scale.get(), bias.get(), a.qweight.at(at * (group * TILE // 2)))
    return k


class _Columns:
    """One group of 16 rows: a vector for each column, on the stack."""

    def __init__(self, k: Kernel, group: int) -> None:
        self.k, self.group = k, group
        self.memory = k.stack(F32V, group)

    def at(self, column: Value) -> Value:
        return self.memory.at(column * (4 * LANES))

    def load(self, column: Value) -> Value:
        return self.at(column).load(F32V, 64)

    def transpose(self, rows: Value, stride_bytes: Value) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(self.group), LANES) as first:
            block = [rows.at(stride_bytes * row).at(first * 4).load(F32V) for row in range(LANES)]
            for width in (8, 4, 2, 1):  # swap the off-diagonal quarters of blocks of 2 * width
                low = [j if not j & width else j - width + LANES for j in range(LANES)]
                high = [j + width if not j & width else j + LANES for j in range(LANES)]
                block = [
                    self.k.shuffle(block[j], block[j + width], low)
                    if not j & width
                    else self.k.shuffle(block[j - width], block[j], high)
                    for j in range(LANES)
                ]
            for j, column in enumerate(block):
                self.at(first + j).store(column, 64)

    def sum(self, term: Callable[[Value], Value]) -> Value:
        """Sum a function of the column's number: eight partial sums, then by halves."""
        partial = [self.k.variable(self.k.f32v(0)) for _ in range(SUM_LANES)]
        with self.k.range(self.k.i64(0), self.k.i64(self.group), SUM_LANES) as first:
            for lane, total in enumerate(partial):
                total.add(term(first + lane))
        sums = [total.get() for total in partial]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [low + high for low, high in zip(sums[:half], sums[half:], strict=True)]
        return sums[0]


def _nearest(k: Kernel, position: Value) -> Value:
    """The nearest of the codes, as floats, to a position on their scale."""
    return k.smaller(k.larger(k.unary("rint", position), k.f32v(0)), k.f32v(LEVELS))


def _encoder(k: Kernel, scale: Value, bias: Value) -> Callable[[Value], Value]:
    """weights -> codes, for scale and bias as they are stored, halfs."""
    step, start = scale.convert("fpext", F32V), bias.convert("fpext", F32V)
    divisor = step.compare("oeq", 0.0).choose(k.f32v(float("inf")), step)
    return lambda weight: _nearest(k, (weight - start) / divisor)


def _round_to_nearest(weights: _Columns, scale: Variable, bias: Variable) -> None:
    k = weights.k
    low, high = k.variable(k.f32v(float("inf"))), k.variable(k.f32v(float("-inf")))
    with k.range(k.i64(0), k.i64(weights.group)) as column:
        weight = weights.load(column)
        low.set(k.smaller(weight, low.get()))
        high.set(k.larger(weight, high.get()))
    scale.set(((high.get() - low.get()) * (1 / LEVELS)).convert("fptrunc", HALFS))
    bias.set(low.get().convert("fptrunc", HALFS))


def _half_quadratic(weights: _Columns, centred: _Columns, scale: Variable, bias: Variable) -> None:
    """Improve scale and bias from those of round-to-nearest."""
    k, a = weights.k, weights.k.arg
    centre = weights.sum(weights.load) * (1 / weights.group)
    with k.range(k.i64(0), k.i64(weights.group)) as column:
        centred.at(column).store(weights.load(column) - centre, 64)
    encode = _encoder(k, scale.get(), bias.get())
    best = [k.variable(value) for value in _fit(centred, lambda column: encode(weights.load(column)))]
    with k.range(k.i64(0), a.num_starts) as i:
        grown, shift = (a.starts.at(i * 8).at(4 * part).load(F32).splat() for part in (0, 1))
        found = _fit(centred, _start(centred, best[0].get(), best[1].get(), grown, shift))
        better = found[2].compare("ogt", best[2].get())
        for variable, value in zip(best, found, strict=True):
            variable.set(better.choose(value, variable.get()))
    fitted = best[0].get(), best[1].get() + centre
    stored = [value.convert("fptrunc", HALFS) for value in fitted]
    encode_fitted = _encoder(k, *stored)
    step, start, _ = _fit(centred, lambda column: encode_fitted(weights.load(column)))
    refitted = [value.convert("fptrunc", HALFS) for value in (step, start + centre)]
    for other in (stored, refitted):
        better = _squared_error(weights, *other).compare("olt", _squared_error(weights, scale.get(), bias.get()))
        scale.set(better.choose(other[0], scale.get()))
        bias.set(better.choose(other[1], bias.get()))


def _start(centred: _Columns, scale: Value, bias: Value, grown: Value, shift: Value) -> Callable[[Value], Value]:
    """A column's codes for another scale and bias than the best so far."""
    k = centred.k
    step = scale * grown
    start = bias + (scale - step) * (LEVELS / 2) + scale * shift
    inverse = k.f32v(1) / step
    origin = start * inverse
    return lambda column: _nearest(k, centred.load(column) * inverse - origin)


def _fit(centred: _Columns, codes: Callable[[Value], Value]) -> tuple[Value, Value, Value]:
    """The least-squares scale and bias for the codes of each column, and the squares that they explain."""
    k, count = centred.k, centred.group
    total, squares = k.variable(k.f32v(0)), k.variable(k.f32v(0))

    def product(column: Value) -> Value:
        code = codes(column)
        total.add(code)
        squares.set(k.fma(code, code, squares.get()))  # exact, as all these sums are
        return code * centred.load(column)

    covariance = centred.sum(product)
    mean = total.get() * (1 / count)
    scale = covariance / (squares.get() - mean * mean * count)
    return scale, k.f32v(-0.0) - scale * mean, covariance * scale


def _squared_error(weights: _Columns, scale: Value, bias: Value) -> Value:
    k = weights.k
    encode = _encoder(k, scale, bias)
    step, start = scale.convert("fpext", F32V), bias.convert("fpext", F32V)

    def square(column: Value) -> Value:
        weight = weights.load(column)
        error = encode(weight) * step + start - weight
        return error * error

    return weights.sum(square)


def _pack(weights: _Columns, scale: Value, bias: Value, qweight: Value) -> None:
    """Eight columns of codes make one vector of words."""
    k = weights.k
    encode = _encoder(k, scale, bias)
    with k.range(k.i64(0), k.i64(weights.group), WORD) as first:
        word = k.constant(I32V, 0)
        for column in range(WORD):
            code = encode(weights.load(first + column)).convert("fptosi", I32V)
            word = word + (code << (8 * (column % 4) + 4 * (column // 4)))
        qweight.at(first * (4 * LANES // WORD)).store(word, 64)


@cache
def _kernel(isa: Isa, group: int) -> Native:
    return compile_kernel(calibrate_source(group), isa)


@cache
def supports(group: int) -> bool:
    """Return whether `calibrate` can run on this machine; asking compiles the kernel."""
    return group % LANES == 0 and compiles(lambda: _kernel(best_isa(), group))


def calibrate(
    weight: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor, group: int, starts: Sequence[tuple[float, float]]
) -> None:
    """Fill the whole groups of qweight, scale and bias (tile16.py) from weight fp32 [tiles * 16, K], all contiguous.

    A group that K ends within is left as it was. The caller asks `supports` first.
    """
    tiles, groups, _ = scale.shape
    assert weight.dtype is torch.float32 and len(weight) == tiles * TILE and supports(group)
    assert all(tensor.is_contiguous() for tensor in (weight, qweight, scale, bias))
    table = torch.tensor([(1 + growth, shift) for growth, shift in starts], dtype=torch.float32)
    kernel = _kernel(best_isa(), group)
    words = {"groups": groups, "whole": weight.shape[1] // group, "stride": weight.shape[1], "num_starts": len(starts)}
    tensors = {"weight": weight, "qweight": qweight, "scale": scale, "bias": bias, "starts": table}
    Tape([kernel.step(tiles=tiles, **words, **tensors)]).run()
