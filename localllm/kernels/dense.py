"""y = x @ W.T + b for unquantized weights: the fastest way that this machine has for the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_gemv


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N], all of one dtype and device. Returns [T, N]."""
    if (
        x.dtype is torch.bfloat16
        and x.device.type == "cpu"
        and cpu_gemv.supports(x.shape[0], weight.shape[0], weight.shape[1])
    ):
        y = cpu_gemv.cpu_gemv(x.contiguous(), weight)
        return y if bias is None else y + bias
    return functional.linear(x, weight, bias)
