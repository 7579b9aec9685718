"""Token ids to hidden states."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class Embedding:
    """weight [V, hidden]; `scale` multiplies the rows (gemma: sqrt(hidden), rounded to the weight's dtype)."""

    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        rows = functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows * rows.new_tensor(self.scale)
