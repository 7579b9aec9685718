"""A matrix: plain tensors, and a format that says what they mean."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.packed_matrix import PackedMatrix
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.weight_format import WeightFormat


class Linear:
    """y = x @ W.T + b. The loader fills `tensors`; a streamer may re-point them at any time between two forwards."""

    def __init__(
        self,
        weight_format: WeightFormat,
        tensors: dict[str, Tensor],
        out_features: int,
        in_features: int,
        bias: Tensor | None = None,
    ) -> None:
        self.format = weight_format
        self.tensors = tensors
        self.out_features = out_features
        self.in_features = in_features
        self.bias = bias

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def packed(self) -> PackedMatrix | None:
        """The matrix as compiled kernels take it; None where its format is not theirs."""
        if isinstance(self.format, Int4 | Int8):
            return PackedMatrix(self.tensors["qweight"], self.tensors["scale"], self.tensors.get("bias"))
        return None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self.format.linear(x, self.tensors, self.out_features, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W, [len(indices), in_features]."""
        return self.format.rows(self.tensors, indices, self.in_features)
