"""tile16: 4-bit codes and group values in tiles of 16 rows, as the int4 kernels read them.

    qweight  int32  [N/16, K/8, 16]    byte b of a word: low nibble = k_b, high nibble = k_(4+b)
    scale    fp16   [N/16, K/G, 16]    bias likewise; w = scale * q + bias, q in 0..15

One 64-byte vector is 16 rows x 8 k: `w & 0x0F0F0F0F` and `(w >> 4) & 0x0F0F0F0F` are each four unsigned bytes ready for
an 8-bit dot product. Plain torch operations, for the CPU and for CUDA; little-endian machines only, as all of ours are.
Knows nothing of calibration, nor of matrices that do not fill their tiles: whoever calls pads and cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.sizes import INT8_GROUP as INT8_GROUP
from localllm.kernels.sizes import TILE as TILE
from localllm.kernels.sizes import WORD as WORD
from localllm.kernels.sizes import Weights as Weights

SLAB_WEIGHTS = 1 << 18  # dequantized at once: 1 MiB of fp32, what a core's L2 holds
# On a GPU, where each slab takes ten launches of 5 us: 4000 of them for a token's 4-bit MLP of an 8B model, one after
# the other, would be 20 ms.
CUDA_SLAB_WEIGHTS = 1 << 22


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


def dequantize(
    qweight: Tensor, scale: Tensor, bias: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """w = scale * q + bias, computed in fp32, rounded once to `dtype`: [out_features, in_features], cut from the tiles.

    Works through slabs, so that little more than the result is ever allocated.
    """
    tiles, words, _ = qweight.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=qweight.device)
    step = slab_tiles(words * WORD, qweight.device)
    for first in range(0, tiles, step):
        part = slice(first, first + step)
        rows = out[first * TILE : (first + step) * TILE]
        codes = unpack(qweight[part])
        rows.copy_(_affine(codes, unpack_groups(scale[part]), unpack_groups(bias[part]))[: len(rows), :in_features])
    return out


def slab_tiles(columns: int, device: torch.device) -> int:
    """Return how many tiles of 16 rows are dequantized at once."""
    return max(1, (SLAB_WEIGHTS if device.type == "cpu" else CUDA_SLAB_WEIGHTS) // max(1, TILE * columns))


def rows(qweight: Tensor, scale: Tensor, bias: Tensor, indices: Tensor, in_features: int) -> Tensor:
    """fp32 [len(indices), in_features]: those rows of `dequantize`, read from their tiles alone."""
    tile, lane = indices // TILE, indices % TILE
    words = qweight[tile, :, lane].contiguous()  # [R, K/8]
    packed = words.view(torch.uint8).view(*words.shape, 1, WORD // 2)
    codes = torch.cat([packed & 0x0F, packed >> 4], dim=2).flatten(1)  # [R, K]
    return _affine(codes, scale[tile, :, lane], bias[tile, :, lane])[:, :in_features]


def _affine(codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """codes uint8 [R, K]; scale, bias [R, K/G]. Returns fp32 [R, K]."""
    rows, groups = scale.shape
    weights = codes.float().view(rows, groups, codes.shape[1] // groups)
    return weights.mul_(scale.float().unsqueeze(-1)).add_(bias.float().unsqueeze(-1)).flatten(1)


MOST_SLICES = 8  # as many as a GPU's warp sums side by side


@dataclass(frozen=True)
class PackedMatrix:
    """Tensors of `tile16`, or of `int8` where there is no bias, padded to whole tiles and groups."""

    qweight: Tensor
    scale: Tensor
    bias: Tensor | None  # of INT4's groups

    @property
    def bits(self) -> int:
        return 8 if self.bias is None else 4

    @property
    def tiles(self) -> int:
        return self.qweight.shape[0]

    @property
    def weights(self) -> Weights:
        return "int8" if self.bias is None else "int4"

    @property
    def words(self) -> int:
        """32-bit words in a group of one row."""
        return self.group * self.bits // 32

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        return INT8_GROUP if self.bias is None else self.in_features // self.scale.shape[1]

    @property
    def groups(self) -> int:
        return self.in_features // self.group

    @property
    def slices(self) -> int:
        """Slices of the columns on a GPU: a power of two. More would have no group, and add zeros, which change no
        sum."""
        return min(MOST_SLICES, 1 << (self.groups - 1).bit_length())
