"""bf16 in 12 bits without loss: sign and mantissa as a byte, the exponent as one of 15 that follow each other.

The exponents of a trained matrix need 2.6 bits (DFloat11, arXiv:2504.11651); four that are read without decoding what
comes before are what a CPU unpacks at the speed of memory. A row's codes count from its `base`, so that 15 is its
largest exponent; code 0 means exponent 0, that is, zero and subnormal numbers. What lies between, below 2^-14 of the
largest, is kept whole among the exceptions of its tile of 16 rows.

    packed      uint8 [tiles, 16, units, 192]: 128 columns each. Of columns l, 32 + l, 64 + l and 96 + l, l below 32:
                words of 16 bits with the four codes, the lowest bits first; then words with sign and mantissa of the
                first two; then those of the last two
    row         int32 [tiles, 16, 3]: base, and where the row's exceptions begin and end in its tile
    exceptions  int32 [tiles, capacity]: column << 16 | bf16
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.sizes import TILE, capacity, units
from localllm.kernels.sizes import UNIT as UNIT
from localllm.kernels.sizes import UNIT_BYTES as UNIT_BYTES

_LANES = 32
CODES = 15
MOST_COLUMNS = 1 << 16


class ManyExceptionsError(ValueError):
    """More weights of some tile are exceptions than there is room for, or there are more columns than have a number."""


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """packed, row, exceptions of bf16 [N, K]. Raises ManyExceptionsError."""
    N, K = weight.shape
    tiles, U = -(-N // TILE), units(K)
    if K > MOST_COLUMNS:
        raise ManyExceptionsError(f"{K} columns, {MOST_COLUMNS} have a number")
    bits = functional.pad(weight, (0, U * UNIT - K, 0, tiles * TILE - N)).view(torch.int16).int() & 0xFFFF
    exponents = (bits >> 7) & 0xFF
    base = (exponents.amax(dim=1, keepdim=True) - CODES).clamp_(min=0)
    codes = exponents - base
    is_exception = (codes <= 0) & (exponents > 0) & (base > 0)
    codes = torch.where((codes <= 0) | (exponents == 0), 0, codes)
    rests = torch.where(is_exception, 0, (bits >> 8) & 0x80 | bits & 0x7F)
    row, exceptions = _exceptions(bits, base, is_exception, tiles, capacity(K))
    code, rest = (part.view(-1, U, 4, _LANES) for part in (codes, rests))
    words = torch.stack(
        (
            code[:, :, 0] | code[:, :, 1] << 4 | code[:, :, 2] << 8 | code[:, :, 3] << 12,
            rest[:, :, 0] | rest[:, :, 1] << 8,
            rest[:, :, 2] | rest[:, :, 3] << 8,
        ),
        dim=2,
    )
    packed = words.to(torch.int16).contiguous().view(torch.uint8)
    return packed.view(tiles, TILE, U, UNIT_BYTES), row, exceptions


def _exceptions(bits: Tensor, base: Tensor, is_exception: Tensor, tiles: int, most: int) -> tuple[Tensor, Tensor]:
    counts = is_exception.sum(dim=1).view(tiles, TILE)
    ends = counts.cumsum(dim=1)
    if int(ends.max()) > most:
        raise ManyExceptionsError(f"{int(ends.max())} of the weights of 16 rows are, {most} can be")
    row = torch.stack((base.view(tiles, TILE), ends - counts, ends), dim=2).int()
    exceptions = torch.zeros((tiles, most), dtype=torch.int32, device=bits.device)
    rows, columns = is_exception.nonzero(as_tuple=True)  # row by row
    tile_begins = functional.pad(ends[:, -1].cumsum(dim=0), (1, 0))[:-1]
    tile = rows // TILE
    place = torch.arange(len(rows), device=bits.device) - tile_begins[tile]
    exceptions[tile, place] = (columns << 16 | bits[rows, columns]).int()
    return row, exceptions


def unpack(packed: Tensor, row: Tensor, exceptions: Tensor, in_features: int) -> Tensor:
    """bf16 [tiles * rows, K], of tiles of 16 rows, or of fewer with the exceptions of the tile that they are from."""
    tiles, R, U, _ = packed.shape
    words = packed.view(torch.int16).view(-1, U, 3, _LANES).int() & 0xFFFF
    base = row[..., 0].reshape(-1, 1, 1, 1)
    codes = torch.stack([words[:, :, 0] >> shift & 15 for shift in (0, 4, 8, 12)], dim=2)
    rests = torch.stack([words[:, :, vector] >> shift & 0xFF for vector in (1, 2) for shift in (0, 8)], dim=2)
    exponents = torch.where(codes > 0, codes + base, 0)
    bits = ((rests & 0x80) << 8 | exponents << 7 | rests & 0x7F).view(tiles * R, U * UNIT)
    counts = (row[..., 2] - row[..., 1]).view(-1)
    rows = torch.repeat_interleave(torch.arange(tiles * R, device=packed.device), counts)
    place = torch.arange(exceptions.shape[1], device=packed.device)
    kept = exceptions[(place >= row[:, :1, 1]) & (place < row[:, -1:, 2])]
    bits[rows, kept >> 16 & 0xFFFF] = kept & 0xFFFF
    return bits.to(torch.int16).view(torch.bfloat16)[:, :in_features]
