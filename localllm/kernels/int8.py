"""8-bit weights in tiles of 16 rows x 4 k, one 64-byte vector each.

qweight  int8  [N/16, K/4, 16, 4]
scale    fp32  [N/16, 16]          w = scale * q, q in -127..127
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.sizes import INT8_WORD as WORD
from localllm.kernels.tile16 import TILE, slab_tiles


def pack(q: Tensor) -> Tensor:
    """q int8 [N, K], N % 16 == 0, K % 4 == 0. Returns qweight int8 [N/16, K/4, 16, 4]."""
    N, K = q.shape
    assert q.dtype is torch.int8 and N % TILE == 0 and K % WORD == 0
    return q.view(N // TILE, TILE, K // WORD, WORD).transpose(1, 2).contiguous()


def unpack(qweight: Tensor) -> Tensor:
    """The inverse of `pack`: int8 [N, K]."""
    tiles, words, _, _ = qweight.shape
    return qweight.transpose(1, 2).reshape(tiles * TILE, words * WORD)


def dequantize(qweight: Tensor, scale: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """w = scale * q, computed in fp32, rounded once to `dtype`: [out_features, in_features], slab by slab."""
    tiles, words, _, _ = qweight.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=qweight.device)
    step = slab_tiles(words * WORD, qweight.device)
    for first in range(0, tiles, step):
        part = slice(first, first + step)
        rows = out[first * TILE : (first + step) * TILE]
        weights = unpack(qweight[part]).float().mul_(scale[part].reshape(-1, 1))
        rows.copy_(weights[: len(rows), :in_features])
    return out


def rows(qweight: Tensor, scale: Tensor, indices: Tensor, in_features: int) -> Tensor:
    """fp32 [len(indices), in_features]: those rows of `dequantize`, read from their tiles alone."""
    tile, lane = indices // TILE, indices % TILE
    codes = qweight[tile, :, lane].flatten(1).float()  # [R, K]
    return codes.mul_(scale[tile, lane].unsqueeze(-1))[:, :in_features]
