"""8-bit weights: symmetric, one scale per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import int8
from localllm.kernels.packed_linear import packed_linear
from localllm.kernels.tile16 import TILE, PackedMatrix
from localllm.quant.weight_format import TensorSpec, require_finite

COLUMNS = 64  # K is padded to a multiple of it
LEVELS = 127
SLAB_WEIGHTS = 1 << 18  # quantized at once: 1 MiB of fp32
_SLABS = 6  # fp32 copies of them that are there at once


@dataclass(frozen=True)
class Int8:
    """`qweight` and `scale` in the layout of kernels/int8.py; padding is zero. |w - dequantized| <= scale / 2."""

    name: str = "int8"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        tiles, columns = -(-out_features // TILE), -(-in_features // COLUMNS) * COLUMNS
        return {
            "qweight": TensorSpec((tiles, columns // int8.WORD, TILE, int8.WORD), torch.int8),
            "scale": TensorSpec((tiles, TILE), torch.float32),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Raises CheckpointError where the weight is not finite."""
        require_finite(weight)
        N, K = weight.shape
        specs = self.specs(N, K)
        tensors = {name: torch.zeros(s.shape, dtype=s.dtype, device=weight.device) for name, s in specs.items()}
        tiles, words, _, _ = specs["qweight"].shape
        step = max(1, SLAB_WEIGHTS // max(1, TILE * K))
        for first in range(0, tiles, step):
            part = slice(first, first + step)
            tiled_scale = tensors["scale"][part]
            rows = functional.pad(weight[first * TILE : (first + step) * TILE].float(), (0, words * int8.WORD - K))
            rows = functional.pad(rows, (0, 0, 0, tiled_scale.numel() - len(rows)))
            scale = rows.abs().amax(dim=1, keepdim=True) / LEVELS
            codes = rows.div_(torch.where(scale > 0, scale, 1)).round_().clamp_(-LEVELS, LEVELS)
            tensors["qweight"][part] = int8.pack(codes.to(torch.int8))
            tiled_scale.copy_(scale.view_as(tiled_scale))
        return tensors

    def working_bytes(self, in_features: int, /) -> int:
        return _SLABS * 4 * max(SLAB_WEIGHTS, TILE * in_features)

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        return int8.dequantize(tensors["qweight"], tensors["scale"], out_features, in_features, torch.float32)

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        return int8.rows(tensors["qweight"], tensors["scale"], indices, in_features)

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        y = packed_linear(x, PackedMatrix(**tensors, bias=None), out_features)
        return y if bias is None else y + bias
