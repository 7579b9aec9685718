"""Normalisation: by the root mean square (arXiv:1910.07467), or by mean and variance (arXiv:1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(eq=False)
class RMSNorm:
    """weight * x / rms(x) over the last dimension, in fp32, returned in x's dtype.

    weight [D] fp32, any family's offset (gemma stores w - 1) already added.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).mul_(self.weight).to(x.dtype)


@dataclass(eq=False)
class LayerNorm:
    """weight * (x - mean(x)) / deviation(x) + bias over the last dimension, in fp32, returned in x's dtype.

    weight, bias [D] fp32, or [heads, D] of x [T, heads, D].
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight)
        return (normed if self.bias is None else normed.add_(self.bias)).to(x.dtype)


Norm = RMSNorm | LayerNorm


def as_rms(norm: Norm | None) -> RMSNorm | None:
    """Return the norm for kernels, which know no other kind; see `capabilities.has_plain_steps`."""
    assert norm is None or isinstance(norm, RMSNorm)
    return norm
