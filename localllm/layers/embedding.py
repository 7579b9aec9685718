"""Token ids to hidden states."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RowLookup(Protocol):
    """A matrix [V, K] of which some rows are looked up, wherever it is."""

    @property
    def device(self) -> torch.device: ...

    def rows(self, indices: Tensor) -> Tensor:
        """[len(indices), K]."""
        ...


class Embedding:
    """The rows of a matrix [V, hidden]; `scale` multiplies them (gemma: sqrt(hidden), rounded to `dtype`)."""

    def __init__(self, matrix: RowLookup, dtype: torch.dtype, scale: float = 1.0) -> None:
        self.matrix = matrix
        self.dtype = dtype
        self.scale = scale

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden] of `dtype`."""
        rows = self.matrix.rows(token_ids).to(self.dtype)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=self.dtype)
