"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
