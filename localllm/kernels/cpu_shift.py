"""What a layer of RWKV-7 makes of each token and the one before it, on the CPU, as a step of a tape."""

from __future__ import annotations

from functools import cache

from localllm.kernels.cpu_ir import F32V, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_states import StateSegment
from localllm.kernels.state_shapes import StateShape

_VECTOR = 4 * LANES


def shift_source(shape: StateShape, features: int, count: int, *, keeps: bool) -> Kernel:
    """y = x + mixes * (what is before x - x), `count` times.

    x: fp32 [T, features]. mixes: fp32 [count, features]. y: fp32 rows of `features` floats, those of one mix `plane`
    floats behind those of the one before. kept: rows of `stride` floats, which x is copied to where the layer's rows
    are kept by another step; with `keeps` this one does, whose rows are x alone. Threads share out the features.
    """
    k = Kernel("shift", "x mixes y kept segments count | plane stride state snapshot")
    a = k.arg
    first, last = (part * _VECTOR for part in k.share(k.i64(features // LANES)))

    def copy(source: Value, target: Value) -> None:
        with k.range(first, last, _VECTOR) as at:
            target.at(at).store(source.at(at).load(F32V))

    with k.range(k.i64(0), a.count.load("i64", 8), rolled=True) as number:
        segment = StateSegment(k, shape, number)

        def row_of(position: Value, segment: StateSegment[StateShape] = segment) -> Value:
            own = a.x.at(segment.batch_row(position) * (4 * features))
            return position.compare("slt", segment.past).choose(segment.kept(position), own)

        with k.range(segment.past, segment.end, rolled=True) as position:
            row, own, previous = segment.batch_row(position), row_of(position), row_of(position - 1)
            is_begin = position.compare("eq", 0)
            with k.range(first, last, _VECTOR) as at:
                x = own.at(at).load(F32V)
                change = is_begin.choose(k.f32v(0), previous.at(at).load(F32V)) - x
                for mix in range(count):
                    factors = a.mixes.at(4 * features * mix).at(at).load(F32V)
                    a.y.at((a.plane * mix + row * features) * 4).at(at).store(k.fma(factors, change, x))
            if not keeps:
                copy(own, a.kept.at(row * a.stride * 4))
        if keeps:
            segment.keep_rows(lambda position, target: copy(row_of(position), target))
    return k


@cache
def shift(isa: Isa, shape: StateShape, features: int, count: int, *, keeps: bool) -> Native:
    return compile_kernel(shift_source(shape, features, count, keeps=keeps), isa)
