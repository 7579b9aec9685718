"""Weights as they are: bf16, or fp32 on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.cpu_gemv import dense_linear
from localllm.quant.weight_format import TensorSpec


@dataclass(frozen=True)
class Dense:
    """One tensor, `weight` [N, K] of `dtype`."""

    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((out_features, in_features), self.dtype)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.to(self.dtype)}

    def working_bytes(self, _in_features: int, /) -> int:
        return 0

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        assert tensors["weight"].shape == (out_features, in_features)
        return tensors["weight"]

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        assert tensors["weight"].shape[1] == in_features
        return functional.embedding(indices, tensors["weight"])

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        assert tensors["weight"].shape[0] == out_features
        return dense_linear(x, tensors["weight"], bias)
