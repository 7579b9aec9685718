"""y = x @ W.T for a few rows of bf16 activations on the CPU, at the speed at which W can be read.

torch's own bf16 linear reads weights at 0.57 of DRAM bandwidth for one row (28 of 50 GB/s, 2 cores, AVX512-BF16).
Here each thread walks its part of W as one linear stream, prefetching: 0.9 of a plain read; four rows of W at once, one
page each, gave 0.78. Products and sums are fp32, in an order that depends on K alone: a row of x gives the same bits
whatever rows stand beside it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import I32V, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.sizes import MAX_ROWS as MAX_ROWS

VECTOR = 32  # bf16 values in one 64-byte load: the even ones and the odd ones make two fp32 vectors
PREFETCH_BYTES = 4096  # 2 KB ahead reads 12 % less, 32 KB is no better


def gemv_source(rows: int) -> Kernel:
    """x bf16 [rows, K], w bf16 [N, K], y bf16 [rows, N]. Threads share out the rows of W."""
    k = Kernel("gemv", "x w y | out_features in_features")
    a = k.arg
    begin, end = k.share(a.out_features)
    with k.range(begin, end) as n:
        multiply_row(k, rows, n, a.w.at(n * (a.in_features * 2)), PREFETCH_BYTES)
    return k


def multiply_row(k: Kernel, rows: int, n: Value, weights: Value, prefetch_bytes: int = 0) -> None:
    """Row n of W at `weights`, times every row of x, into y. The kernel has the words x, y, out_features, in_features.

    prefetch_bytes: so far ahead; 0 where the row is in a cache.
    """
    a = k.arg
    row_bytes = a.in_features * 2
    sums = [[k.variable(k.f32v(0)) for _ in ("even", "odd")] for _ in range(rows)]
    with k.range(k.i64(0), row_bytes, 2 * VECTOR) as at:
        if prefetch_bytes:
            k.prefetch(weights.at(at).at(prefetch_bytes))
        w = cpu_math.from_bf16_pairs(weights.at(at).load(I32V, 2))
        for m, pair in enumerate(sums):
            x = cpu_math.from_bf16_pairs(a.x.at(row_bytes * m + at).load(I32V, 2))
            for half in (0, 1):
                pair[half].set(k.fma(w[half], x[half], pair[half].get()))
    for m, (even, odd) in enumerate(sums):
        total = cpu_math.total(k, even.get() + odd.get())
        rounded = cpu_math.to_bf16(k, total.splat())
        a.y.at((a.out_features * m + n) * 2).store(k.lane(rounded, 0), 2)


@cache
def _kernel(isa: Isa, rows: int) -> Native:
    return compile_kernel(gemv_source(rows), isa)


@cache
def supports(rows: int, out_features: int, in_features: int) -> bool:
    """Return whether `cpu_gemv` can run this shape on this machine; asking compiles the kernel (15-150 ms, once)."""
    is_fit = 1 <= rows <= MAX_ROWS and in_features % VECTOR == 0 and out_features > 0
    return is_fit and compiles(lambda: _kernel(best_isa(), rows))


def cpu_gemv(x: Tensor, weight: Tensor) -> Tensor:
    """y = x @ weight.T.

    x [M, K] bf16, weight [N, K] bf16, both contiguous, 1 <= M <= 8, K % 32 == 0. Returns [M, N] bf16.
    The caller asks `supports` first.
    """
    M, K = x.shape
    N = weight.shape[0]
    assert x.dtype == weight.dtype == torch.bfloat16 and x.is_contiguous() and weight.is_contiguous()
    assert weight.shape[1] == K and supports(M, N, K)
    y = torch.empty((M, N), dtype=torch.bfloat16)
    kernel = _kernel(best_isa(), M)
    Tape([kernel.step(x=x, w=weight, y=y, out_features=N, in_features=K)]).run()
    return y


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N], all of one dtype and device. Returns [T, N].

    In bf16 a row of up to `MAX_ROWS` has the same bits whatever rows stand beside it.
    """
    rows = x.shape[0]
    if x.dtype is not torch.bfloat16 or rows > MAX_ROWS:
        return functional.linear(x, weight, bias)
    if x.device.type == "cpu" and supports(rows, weight.shape[0], weight.shape[1]):
        y = cpu_gemv(x.contiguous(), weight)
        return y if bias is None else y + bias
    # The library sums in another order for other numbers of rows; with one number for all, a row's sums stay. The
    # weights are read once either way, so the empty rows cost next to nothing.
    padded = functional.pad(x, (0, 0, 0, MAX_ROWS - rows))
    return functional.linear(padded, weight, bias)[:rows]
