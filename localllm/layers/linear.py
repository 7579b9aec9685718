"""A matrix: plain tensors, and a format that says what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.packed_matrix import PackedMatrix, packed_matrix
from localllm.quant.stacked import Stacked
from localllm.quant.weight_format import WeightFormat


@dataclass(eq=False)
class Linear:
    """y = x @ W.T + b. The loader fills `tensors`; a streamer may re-point them at any time between two forwards.

    name: of the layer in its model, "layers.0.attention.qkv_proj", by which adapters change it.
    """

    format: WeightFormat
    tensors: dict[str, Tensor]
    out_features: int
    in_features: int
    bias: Tensor | None = None
    name: str = ""

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def packed(self) -> PackedMatrix | None:
        """The matrix as compiled kernels take it; None where its format is not theirs."""
        weights = self.format.weights
        return None if weights is None else packed_matrix(self.tensors, weights.table)

    @property
    def packed_parts(self) -> list[PackedMatrix]:
        """The matrices that compiled kernels take, which have its rows one below the other; none where a format is not
        theirs."""
        if not isinstance(self.format, Stacked):
            return [] if self.packed is None else [self.packed]
        parts = [(part.weights, tensors) for part, _, tensors in self.format.split(self.tensors)]
        packed = [packed_matrix(tensors, weights.table) for weights, tensors in parts if weights is not None]
        return packed if len(packed) == len(parts) else []

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self.format.linear(x, self.tensors, self.out_features, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W, [len(indices), in_features]."""
        return self.format.rows(self.tensors, indices, self.in_features)


class RowLookup(Protocol):
    """A matrix [V, K] of which some rows are looked up, wherever it is."""

    @property
    def device(self) -> torch.device: ...

    def rows(self, indices: Tensor) -> Tensor:
        """[len(indices), K]."""


@dataclass(eq=False)
class Embedding:
    """The rows of a matrix [V, hidden]; `scale` multiplies them (gemma: sqrt(hidden), rounded to `dtype`). norm_eps: of
    the norm that is taken of each, where one is."""

    matrix: RowLookup
    dtype: torch.dtype
    scale: float = 1.0
    norm_eps: float | None = None

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden] of `dtype`."""
        rows = self.matrix.rows(token_ids).to(self.dtype)
        if self.norm_eps is not None:
            rows = functional.rms_norm(rows.float(), rows.shape[-1:], eps=self.norm_eps).to(self.dtype)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=self.dtype)
