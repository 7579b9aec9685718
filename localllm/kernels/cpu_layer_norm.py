"""Layer normalisation of fp32 rows on the CPU, as a step of a tape."""

from __future__ import annotations

from functools import cache

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, LANES, Kernel
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel


def layer_norm_source(*, has_bias: bool) -> Kernel:
    """y = (x - mean) / deviation * weight + bias, features % 16 == 0; y may be x.

    x, y fp32 rows of `features` floats; weight, bias fp32 [features]. shape: a pointer to {T}. eps: the bits of a
    float. Threads share out the rows.
    """
    k = Kernel("layer_norm", "x weight bias y shape | features eps")
    a = k.arg
    count = a.features.convert("uitofp", F32)
    begin, end = k.share(a.shape.load("i64", 8))
    with k.range(begin, end) as row:
        x, y = a.x.at(row * a.features * 4), a.y.at(row * a.features * 4)
        total, squares = k.variable(k.f32v(0)), k.variable(k.f32v(0))
        with k.range(k.i64(0), a.features, LANES) as i:
            total.add(x.at(i * 4).load(F32V))
        mean = (cpu_math.total(k, total.get()) / count).splat()
        with k.range(k.i64(0), a.features, LANES) as i:
            centred = x.at(i * 4).load(F32V) - mean
            squares.set(k.fma(centred, centred, squares.get()))
        eps = a.eps.convert("trunc", "i32").convert("bitcast", F32)
        deviation = k.unary("sqrt", cpu_math.total(k, squares.get()) / count + eps)
        inverse = (k.constant(F32, 1.0) / deviation).splat()
        with k.range(k.i64(0), a.features, LANES) as i:
            value = (x.at(i * 4).load(F32V) - mean) * inverse * a.weight.at(i * 4).load(F32V)
            y.at(i * 4).store(value + a.bias.at(i * 4).load(F32V) if has_bias else value)
    return k


@cache
def layer_norm(isa: Isa, *, has_bias: bool) -> Native:
    return compile_kernel(layer_norm_source(has_bias=has_bias), isa)
