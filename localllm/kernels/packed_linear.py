"""y = x @ W.T for packed weights, on the fastest way that this machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import cpu_linear
from localllm.kernels.cpu_gemv import dense_linear
from localllm.kernels.gpu.ready import lacks_bf16, why_not
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE

SLAB_WEIGHTS = 1 << 22  # dequantized for one matrix product: 8 MiB of bf16, enough rows for the library to work well


def packed_linear(x: Tensor, matrix: PackedMatrix, out_features: int) -> Tensor:
    """x [T, K] bf16 or fp32, the matrix padded beyond [out_features, K] or not -> [T, out_features] of x's dtype.

    Padding columns meet no activation, whatever their codes say.
    """
    if x.device.type == "cpu" and cpu_linear.is_available():
        return cpu_linear.packed_linear(x, matrix, out_features)
    if x.is_cuda and not why_not(x.device):
        from localllm.kernels.gpu import product  # imports Triton, which not every system has

        if len(x) <= product.dispatch_for(x.device).most_rows:
            return product.packed_linear(x, matrix, out_features)
    if x.dtype is torch.float32 and lacks_bf16(x.device):
        return halved_linear(x, matrix, out_features)
    return dequantized_linear(x, matrix, out_features)


def halved_linear(x: Tensor, matrix: PackedMatrix, out_features: int) -> Tensor:
    """x [T, K] fp32 -> [T, out_features], multiplied in fp16: a card with tensor cores does that eight times as fast as
    fp32. Each row is scaled to at most 1 before, so that no activation overflows: rounding to fp16 costs 2**-11."""
    peaks = x.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return dequantized_linear((x / peaks).half(), matrix, out_features).float().mul_(peaks)


def dequantized_linear(x: Tensor, matrix: PackedMatrix, out_features: int) -> Tensor:
    """Slab by slab dequantized to x's dtype, then the library's product: for many rows of x, and any device."""
    T, K = x.shape
    y = torch.empty((T, out_features), dtype=x.dtype, device=x.device)
    step = max(1, SLAB_WEIGHTS // max(1, TILE * K))
    for first in range(0, matrix.tiles, step):
        part, begin = slice(first, first + step), first * TILE
        N = min(out_features - begin, step * TILE)
        weight = matrix.part(part).dequantize(N, K, x.dtype)
        y[:, begin : begin + N] = dense_linear(x, weight)
    return y
