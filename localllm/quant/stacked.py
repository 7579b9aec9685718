"""Matrices whose rows have several formats, one below the other: queries in one, values in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.quant.layouts import StackedLayout
from localllm.quant.weight_format import WeightFormat


@dataclass(frozen=True)
class Stacked(StackedLayout[WeightFormat]):
    """Each part computes its rows as it does alone."""

    def split(self, tensors: dict[str, Tensor]) -> Iterator[tuple[WeightFormat, int, dict[str, Tensor]]]:
        """Yield each part's format, rows and tensors."""
        for number, (part, rows) in enumerate(self.parts):
            prefix = f"{number}."
            own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
            yield part, rows, own

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        parts = zip(self.parts, torch.split(weight, [rows for _, rows in self.parts]), strict=True)
        return {
            f"{number}.{name}": tensor
            for number, ((part, _), rows) in enumerate(parts)
            for name, tensor in part.quantize(rows).items()
        }

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        assert out_features == sum(rows for _, rows in self.parts)
        return torch.cat([part.dequantize(own, rows, in_features) for part, rows, own in self.split(tensors)])

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        out = torch.empty((len(indices), in_features), device=indices.device)
        first = 0
        for part, rows, own in self.split(tensors):
            is_own = (indices >= first) & (indices < first + rows)
            out[is_own] = part.rows(own, indices[is_own] - first, in_features).float()
            first += rows
        return out

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        assert out_features == sum(rows for _, rows in self.parts)
        y = torch.cat([part.linear(x, own, rows, None) for part, rows, own in self.split(tensors)], dim=1)
        return y if bias is None else y + bias
