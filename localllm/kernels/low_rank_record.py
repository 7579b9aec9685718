"""The thin matrices of an adapter for one layer, in INT8, as the CPU's kernels read them.

    a        int8 [rank tiles, K/4, 16, 4], scale fp32 [rank tiles * 16]      as `int8` has them, ranks of all parts
    parts    int64 [parts, 5]: see `cpu_low_rank.PART_WORDS`; in the order of their tiles
    b        int8 [ranks, 16] of each tile of a part, scale fp32 [N]

INT8 halves what a step reads: eight adapters of rank 16 beside a model of 1.1B weights in INT4 are a seventh of its
bytes, in bf16 they would be a quarter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import int8
from localllm.kernels.cpu_low_rank import CHAINS, PART_WORDS, RECORD_WORDS
from localllm.kernels.sizes import TILE

_MOST = 127
_ALIGN = 64


@dataclass(frozen=True, eq=False)
class LowRank:
    """y[:, first_row : first_row + rows] += (x @ a.T) @ b.T, for a linear layer x [T, K] -> y [T, N].

    a: [rank, K]. b: [rows, rank], multiplied by the adapter's own scale. Both of one device and one floating dtype.
    """

    a: Tensor
    b: Tensor
    first_row: int = 0

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True)
class LowRankRecord:
    """One adapter's matrices for one layer. words: see `cpu_low_rank.RECORD_WORDS`; tensors: what they point at."""

    words: Tensor
    tensors: tuple[Tensor, ...]
    rank_tiles: int

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def of(cls, pairs: Sequence[LowRank], out_features: int) -> LowRankRecord:
        """Round the matrices of an adapter to INT8. out_features: of the layer, a multiple of 16."""
        pairs = _tile_by_tile(sorted(pairs, key=lambda pair: pair.first_row))
        a = torch.cat([pair.a.float() for pair in pairs])
        rank_tiles = -(-len(a) // TILE)
        a = functional.pad(a, (0, 0, 0, rank_tiles * TILE - len(a)))
        a_codes, a_scale = _rounded(a)
        b_scale, pieces, parts = torch.zeros(out_features), [], []
        first_rank = first_byte = 0
        for pair in pairs:
            rank, begin, count = len(pair.a), pair.first_row // TILE, len(pair.b) // TILE
            codes, scale = _rounded(pair.b.float())
            pieces.append(codes.view(count, TILE, rank).transpose(1, 2).reshape(-1))
            b_scale[pair.first_row : pair.first_row + len(pair.b)] = scale
            parts.append((begin, begin + count, first_rank, rank, first_byte))
            first_rank, first_byte = first_rank + rank, first_byte + codes.numel()
        return cls._of_tensors(
            (int8.pack(a_codes), a_scale, torch.tensor(parts), torch.cat(pieces), b_scale), rank_tiles
        )

    @classmethod
    def _of_tensors(cls, tensors: tuple[Tensor, ...], rank_tiles: int) -> LowRankRecord:
        words = torch.tensor([rank_tiles, len(tensors[2]), *(tensor.data_ptr() for tensor in tensors)])
        assert len(words) == len(RECORD_WORDS) and tensors[2].shape[1] == len(PART_WORDS)
        return cls(words, tensors, rank_tiles)

    @property
    def room_bytes(self) -> int:
        """Return what its tensors take in one run of memory."""
        return sum(_padded(tensor.nbytes) for tensor in self.tensors)

    def copied_to(self, memory: Tensor) -> LowRankRecord:
        """Return the same record in memory, uint8 [room_bytes], that begins at a multiple of 64."""
        placed, begin = [], 0
        for tensor in self.tensors:
            own = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            placed.append(own.copy_(tensor))
            begin += _padded(tensor.nbytes)
        return self._of_tensors(tuple(placed), self.rank_tiles)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int8 [N, K] and scales fp32 [N]."""
    scale = matrix.abs().amax(1) / _MOST
    codes = (matrix / torch.where(scale > 0, scale, 1.0).unsqueeze(1)).round_()
    return codes.to(torch.int8), scale


def _tile_by_tile(pairs: Sequence[LowRank]) -> list[LowRank]:
    """Return pairs whose rows are whole tiles: rows of zeros are added, and pairs that share a tile are joined."""
    joined: list[list[LowRank]] = []
    for pair in pairs:
        if joined and pair.first_row // TILE * TILE < joined[-1][-1].first_row + len(joined[-1][-1].b):
            joined[-1].append(pair)
        else:
            joined.append([pair])
    return [_whole_chains(_joined(group)) for group in joined]


def _whole_chains(pair: LowRank) -> LowRank:
    """Return the pair with ranks of zeros behind its own, so that the kernels' sums have as many terms each."""
    missing = -pair.rank % CHAINS
    return LowRank(functional.pad(pair.a, (0, 0, 0, missing)), functional.pad(pair.b, (0, missing)), pair.first_row)


def _joined(pairs: Sequence[LowRank]) -> LowRank:
    first = pairs[0].first_row // TILE * TILE
    end = -(-max(pair.first_row + len(pair.b) for pair in pairs) // TILE) * TILE
    ranks = [0, *itertools.accumulate(len(pair.a) for pair in pairs)]
    if len(pairs) == 1 and (first, end - first) == (pairs[0].first_row, len(pairs[0].b)):
        return pairs[0]
    b = torch.zeros(end - first, ranks[-1])
    for pair, rank in zip(pairs, ranks, strict=False):
        rows = slice(pair.first_row - first, pair.first_row - first + len(pair.b))
        b[rows, rank : rank + len(pair.a)] = pair.b.float()
    return LowRank(torch.cat([pair.a.float() for pair in pairs]), b, first)
