"""y = x @ W.T + b for unquantized weights: the fastest way that this machine has for the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_gemv


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N], all of one dtype and device. Returns [T, N].

    In bf16 a row of up to `cpu_gemv.MAX_ROWS` has the same bits whatever rows stand beside it.
    """
    rows = x.shape[0]
    if x.dtype is not torch.bfloat16 or rows > cpu_gemv.MAX_ROWS:
        return functional.linear(x, weight, bias)
    if x.device.type == "cpu" and cpu_gemv.supports(rows, weight.shape[0], weight.shape[1]):
        y = cpu_gemv.cpu_gemv(x.contiguous(), weight)
        return y if bias is None else y + bias
    # The library sums in another order for other numbers of rows; with one number for all, a row's sums stay. The
    # weights are read once either way, so the empty rows cost next to nothing.
    padded = functional.pad(x, (0, 0, 0, cpu_gemv.MAX_ROWS - rows))
    return functional.linear(padded, weight, bias)[:rows]
