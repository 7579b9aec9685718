"""Root-mean-square norms of whole rows on the CPU, where no matrix follows that would want them quantized."""

from __future__ import annotations

from functools import cache

from localllm.kernels.cpu_ir import F32V, I64, LANES, Kernel
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_quantize import inverse_rms


def norm_source(*, adds: bool) -> Kernel:
    """y = x / rms(x) * weight, or y += it where `adds`; y may be x.

    x, y fp32, x_stride and y_stride floats a row; weight fp32 [features]. shape: a pointer to {T}. eps: the bits of a
    float. Threads share out the rows.
    """
    k = Kernel("norm", "x weight y shape | features x_stride y_stride eps")
    a = k.arg
    begin, end = k.share(a.shape.load(I64, 8))
    with k.range(begin, end) as row:
        x, y = a.x.at(row * a.x_stride * 4), a.y.at(row * a.y_stride * 4)
        inverse = inverse_rms(k, x, a.features).splat()
        with k.range(k.i64(0), a.features, LANES) as i:
            value = x.at(i * 4).load(F32V) * inverse * a.weight.at(i * 4).load(F32V)
            y.at(i * 4).store(value + y.at(i * 4).load(F32V) if adds else value)
    return k


@cache
def norm(isa: Isa, *, adds: bool) -> Native:
    return compile_kernel(norm_source(adds=adds), isa)
