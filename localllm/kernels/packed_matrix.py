"""A matrix in packed codes: its tensors, and what they mean.

Plain torch operations, for the CPU and for CUDA. Knows nothing of calibration, nor of the matrix that its tiles are
padded from: whoever asks says its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from localllm.kernels import int8, tile16
from localllm.kernels.sizes import Weights
from localllm.kernels.tile16 import TILE

SLAB_WEIGHTS = 1 << 18  # dequantized at once: 1 MiB of fp32, what a core's L2 holds
# On a GPU, where each slab takes ten launches of 5 us: 4000 of them for a token's 4-bit MLP of an 8B model, one after
# the other, would be 20 ms.
CUDA_SLAB_WEIGHTS = 1 << 22
MOST_SLICES = 8  # as many as a GPU's warp sums side by side


@dataclass(frozen=True)
class PackedMatrix:
    """Tensors of `tile16`, or of `int8` where codes are bytes, padded to whole tiles and groups.

    scale: of groups, or of rows. bias: of groups. table: see `Weights`.
    """

    qweight: Tensor
    scale: Tensor
    bias: Tensor | None
    table: tuple[int, ...] | None = None

    @property
    def bits(self) -> Literal[4, 8]:
        return 8 if self.qweight.dtype is torch.int8 else 4

    @property
    def tiles(self) -> int:
        return self.qweight.shape[0]

    @property
    def weights(self) -> Weights:
        group = None if self.scale.dim() == 2 else self.in_features // self.scale.shape[1]
        return Weights(self.bits, group, self.bias is not None, self.table)

    @property
    def words(self) -> int:
        """32-bit words in a group of one row."""
        return self.group * self.bits // 32

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        return self.weights.columns

    @property
    def groups(self) -> int:
        return self.in_features // self.group

    @property
    def slices(self) -> int:
        """Slices of the columns on a GPU: a power of two. More would have no group, and add zeros, which change no
        sum."""
        return min(MOST_SLICES, 1 << (self.groups - 1).bit_length())

    def part(self, tiles: slice) -> PackedMatrix:
        """Return some of the tiles."""
        bias = None if self.bias is None else self.bias[tiles]
        return PackedMatrix(self.qweight[tiles], self.scale[tiles], bias, self.table)

    def dequantize(self, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
        """Return the weights, computed in fp32 and rounded once to `dtype`: [out_features, in_features], cut from the
        tiles. Works through slabs, so that little more than the result is ever allocated."""
        out = torch.empty((out_features, in_features), dtype=dtype, device=self.qweight.device)
        slab = SLAB_WEIGHTS if self.qweight.device.type == "cpu" else CUDA_SLAB_WEIGHTS
        step = max(1, slab // max(1, TILE * self.in_features))
        for first in range(0, self.tiles, step):
            part = self.part(slice(first, first + step))
            codes = int8.unpack(part.qweight) if self.bits == 8 else tile16.unpack(part.qweight)
            bias = None if part.bias is None else _by_row(part.bias)
            into = out[first * TILE : (first + step) * TILE]
            into.copy_(self._weights(codes, _by_row(part.scale), bias)[: len(into), :in_features])
        return out

    def rows(self, indices: Tensor, in_features: int) -> Tensor:
        """Return some rows of `dequantize`, fp32 [len(indices), in_features], read from their tiles alone."""
        tile, lane = indices // TILE, indices % TILE
        if self.bits == 8:
            codes = self.qweight[tile, :, lane].flatten(1)
        else:
            words = self.qweight[tile, :, lane].contiguous()  # [R, K/8]
            packed = words.view(torch.uint8).view(*words.shape, 1, tile16.WORD // 2)
            codes = torch.cat([packed & 0x0F, packed >> 4], dim=2).flatten(1)  # [R, K]
        scale = self.scale[tile, lane].unsqueeze(1) if self.scale.dim() == 2 else self.scale[tile, :, lane]
        bias = None if self.bias is None else self.bias[tile, :, lane]
        return self._weights(codes, scale, bias)[:, :in_features]

    def _weights(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """codes [R, K]; scale, bias [R, groups]. Returns fp32 [R, K]."""
        values = codes.float() if self.table is None else codes.new_tensor(self.table, dtype=torch.float32)[codes.int()]
        rows, groups = scale.shape
        values = values.view(rows, groups, values.shape[1] // groups).mul_(scale.float().unsqueeze(-1))
        return (values if bias is None else values.add_(bias.float().unsqueeze(-1))).flatten(1)


def packed_matrix(tensors: Mapping[str, Tensor], table: tuple[int, ...] | None = None) -> PackedMatrix:
    """Return the matrix of these tensors: qweight, scale, and bias where there is one."""
    return PackedMatrix(tensors["qweight"], tensors["scale"], tensors.get("bias"), table)


def _by_row(tiled: Tensor) -> Tensor:
    """[tiles, groups, 16], or [tiles, 16] of whole rows, -> [rows, groups]."""
    return tiled.reshape(-1, 1) if tiled.dim() == 2 else tile16.unpack_groups(tiled)
