"""y = x @ W.T for tile16 weights, on the fastest way that this machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import cpu_linear, tile16
from localllm.kernels.cpu_linear import PackedMatrix
from localllm.kernels.dense import dense_linear
from localllm.kernels.gpu.ready import why_not

SLAB_WEIGHTS = 1 << 22  # dequantized for one matrix product: 8 MiB of bf16, enough rows for the library to work well


def int4_linear(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor, out_features: int) -> Tensor:
    """x [T, K] bf16 or fp32; qweight, scale and bias as in tile16.py, padded beyond [out_features, K] or not.

    Returns [T, out_features] of x's dtype. Padding columns meet no activation, whatever their codes say.
    """
    if x.device.type == "cpu" and cpu_linear.is_available():
        return cpu_linear.packed_linear(x, PackedMatrix("int4", qweight, scale, bias), out_features)
    if x.is_cuda and not why_not(x.device):
        from localllm.kernels.gpu import gemv, product  # import Triton, which not every system has

        return product.packed_linear(x, gemv.GpuMatrix(qweight, scale, bias), out_features)
    return dequantized_linear(x, qweight, scale, bias, out_features)


def dequantized_linear(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor, out_features: int) -> Tensor:
    """Slab by slab dequantized to x's dtype, then the library's product: for many rows of x, and any device."""
    T, K = x.shape
    y = torch.empty((T, out_features), dtype=x.dtype, device=x.device)
    step = max(1, SLAB_WEIGHTS // max(1, tile16.TILE * K))
    for first in range(0, len(qweight), step):
        part, begin = slice(first, first + step), first * tile16.TILE
        N = min(out_features - begin, step * tile16.TILE)
        weight = tile16.dequantize(qweight[part], scale[part], bias[part], N, K, x.dtype)
        y[:, begin : begin + N] = dense_linear(x, weight)
    return y
