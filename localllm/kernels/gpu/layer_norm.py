"""A norm by mean and variance on a GPU: one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous

_COLUMNS_A_WARP, _MOST_WARPS = 1024, 16


@triton.jit
def _layer_norm(
    x, weight, bias, y, features, eps,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has a row."""
    after_previous(OVERLAPS)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < features
    values = tl.load(x + row * features + column, mask=mask, other=0.0)
    centred = tl.where(mask, values - tl.sum(values, axis=0) / features, 0.0)
    normed = centred * (1 / tl.sqrt(tl.sum(centred * centred, axis=0) / features + eps))
    normed = normed * tl.load(weight + column, mask=mask, other=0.0)
    if bias is not None:
        normed += tl.load(bias + column, mask=mask, other=0.0)
    tl.store(y + row * features + column, normed, mask=mask)


def layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> KernelLaunch:
    """x, y fp32 [M, features], which may be the same; weight, bias fp32 [features]."""
    features = x.shape[1]
    assert x.is_contiguous() and y.is_contiguous() and weight.shape == (features,)
    block = triton.next_power_of_2(features)
    return KernelLaunch(
        _layer_norm,
        (len(x),),
        {"x": x, "weight": weight, "bias": bias, "y": y, "features": features, "eps": float(eps)},
        {"BLOCK": block},
        num_warps=min(_MOST_WARPS, max(1, block // _COLUMNS_A_WARP)),
    )
