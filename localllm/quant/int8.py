"""8-bit weights: symmetric, one scale per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import int8
from localllm.kernels.packed_linear import packed_linear
from localllm.kernels.packed_matrix import packed_matrix
from localllm.kernels.sizes import INT8_WORD, TILE
from localllm.quant.layouts import INT8_SLAB, Int8Layout
from localllm.quant.weight_format import require_finite

LEVELS = 127
SLAB_WEIGHTS = INT8_SLAB


@dataclass(frozen=True)
class Int8(Int8Layout):
    """|w - dequantized| <= scale / 2."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Raises CheckpointError where the weight is not finite."""
        require_finite(weight)
        N, K = weight.shape
        specs = self.specs(N, K)
        tensors = {name: torch.zeros(s.shape, dtype=s.torch_dtype, device=weight.device) for name, s in specs.items()}
        tiles, words, _, _ = specs["qweight"].shape
        step = max(1, SLAB_WEIGHTS // max(1, TILE * K))
        for first in range(0, tiles, step):
            part = slice(first, first + step)
            tiled_scale = tensors["scale"][part]
            rows = functional.pad(weight[first * TILE : (first + step) * TILE].float(), (0, words * INT8_WORD - K))
            rows = functional.pad(rows, (0, 0, 0, tiled_scale.numel() - len(rows)))
            scale = rows.abs().amax(dim=1, keepdim=True) / LEVELS
            codes = rows.div_(torch.where(scale > 0, scale, 1)).round_().clamp_(-LEVELS, LEVELS)
            tensors["qweight"][part] = int8.pack(codes.to(torch.int8))
            tiled_scale.copy_(scale.view_as(tiled_scale))
        return tensors

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        return packed_matrix(tensors).dequantize(out_features, in_features, torch.float32)

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        return packed_matrix(tensors).rows(indices, in_features)

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        y = packed_linear(x, packed_matrix(tensors), out_features)
        return y if bias is None else y + bias
