"""Token ids to hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.layers.linear import Linear


class Embedding:
    """The rows of a matrix [V, hidden]; `scale` multiplies them (gemma: sqrt(hidden), rounded to `dtype`)."""

    def __init__(self, matrix: Linear, dtype: torch.dtype, scale: float = 1.0) -> None:
        self.matrix = matrix
        self.dtype = dtype
        self.scale = scale

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden] of `dtype`."""
        rows = self.matrix.rows(token_ids).to(self.dtype)
        return rows if self.scale == 1.0 else rows * rows.new_tensor(self.scale)
