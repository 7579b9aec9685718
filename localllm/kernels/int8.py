"""8-bit weights in tiles of 16 rows x 4 k, one 64-byte vector each.

qweight  int8  [N/16, K/4, 16, 4]
scale    fp32  [N/16, 16]          w = scale * q, q in -127..127
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.sizes import INT8_WORD as WORD
from localllm.kernels.tile16 import TILE


def pack(q: Tensor) -> Tensor:
    """q int8 [N, K], N % 16 == 0, K % 4 == 0. Returns qweight int8 [N/16, K/4, 16, 4]."""
    N, K = q.shape
    assert q.dtype is torch.int8 and N % TILE == 0 and K % WORD == 0
    return q.view(N // TILE, TILE, K // WORD, WORD).transpose(1, 2).contiguous()


def unpack(qweight: Tensor) -> Tensor:
    """The inverse of `pack`: int8 [N, K]."""
    tiles, words, _, _ = qweight.shape
    return qweight.transpose(1, 2).reshape(tiles * TILE, words * WORD)
