"""Weights as they are: bf16, or fp32 on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.dense import dense_linear
from localllm.quant.weight_format import TensorSpec


@dataclass(frozen=True)
class Dense:
    """One tensor, `weight` [N, K] of `dtype`."""

    dtype: torch.dtype

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((out_features, in_features), self.dtype)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.to(self.dtype)}

    def dequantize(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["weight"]

    def linear(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        return dense_linear(x, tensors["weight"], bias)
