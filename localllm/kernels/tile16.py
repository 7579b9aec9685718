"""tile16: 4-bit codes and group values in tiles of 16 rows, as the int4 kernels read them.

    qweight  int32  [N/16, K/8, 16]    byte b of a word: low nibble = k_b, high nibble = k_(4+b)
    scale    fp16   [N/16, K/G, 16]    bias likewise; w = scale * q + bias, q in 0..15

One 64-byte vector is 16 rows x 8 k: `w & 0x0F0F0F0F` and `(w >> 4) & 0x0F0F0F0F` are each four unsigned bytes ready for
an 8-bit dot product. Plain torch operations, for the CPU and for CUDA; little-endian machines only, as all of ours are.
Knows nothing of calibration, nor of matrices that do not fill their tiles: whoever calls pads and cuts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.sizes import TILE as TILE
from localllm.kernels.sizes import WORD as WORD


def pack(q: Tensor) -> Tensor:
    """q uint8 [N, K] of values 0..15, N % 16 == 0, K % 8 == 0. Returns qweight int32 [N/16, K/8, 16]."""
    N, K = q.shape
    assert q.dtype is torch.uint8 and N % TILE == 0 and K % WORD == 0
    words = q.view(N // TILE, TILE, K // WORD, 2, WORD // 2).permute(3, 0, 2, 1, 4)  # [2, N/16, K/8, 16, 4]
    return (words[0] | words[1] << 4).contiguous().view(torch.int32).squeeze(-1)


def unpack(qweight: Tensor) -> Tensor:
    """The inverse of `pack`: qweight int32 [N/16, K/8, 16] -> uint8 [N, K]."""
    tiles, words, _ = qweight.shape
    packed = qweight.contiguous().view(torch.uint8).view(tiles, words, TILE, WORD // 2).transpose(1, 2)
    q = torch.empty((tiles, TILE, words, 2, WORD // 2), dtype=torch.uint8, device=qweight.device)
    torch.bitwise_and(packed, 0x0F, out=q[:, :, :, 0])
    torch.bitwise_right_shift(packed, 4, out=q[:, :, :, 1])
    return q.view(tiles * TILE, words * WORD)


def pack_groups(values: Tensor) -> Tensor:
    """values [N, K/G] -> [N/16, K/G, 16]."""
    N, groups = values.shape
    assert N % TILE == 0
    return values.view(N // TILE, TILE, groups).transpose(1, 2).contiguous()


def unpack_groups(tiled: Tensor) -> Tensor:
    """The inverse of `pack_groups`: [N/16, K/G, 16] -> [N, K/G]."""
    tiles, groups, _ = tiled.shape
    return tiled.transpose(1, 2).reshape(tiles * TILE, groups)
