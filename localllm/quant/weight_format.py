"""What the bytes of a weight mean. Knows nothing of where they rest: that is the tier's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightFormat(Protocol):
    """A stateless meaning for the tensors of one linear layer: [out_features, in_features], rows in dimension 0."""

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]: ...

    def quantize(self, weight: Tensor) -> dict[str, Tensor]: ...

    def dequantize(self, tensors: dict[str, Tensor]) -> Tensor: ...

    def linear(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor: ...
