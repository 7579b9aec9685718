"""Weights as they are: bf16, or fp32 on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.cpu_gemv import dense_linear
from localllm.quant.layouts import DTYPE_NAMES, DenseLayout, torch_dtype


def dense_name(dtype: torch.dtype) -> str:
    """Return "bf16" or "fp32"."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


@dataclass(frozen=True)
class Dense(DenseLayout):
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.to(torch_dtype(DTYPE_NAMES[self.name]))}

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        assert tensors["weight"].shape == (out_features, in_features)
        return tensors["weight"]

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        assert tensors["weight"].shape[1] == in_features
        return functional.embedding(indices, tensors["weight"])

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        assert tensors["weight"].shape[0] == out_features
        return dense_linear(x, tensors["weight"], bias)
