"""What one forward works on: the new tokens of several sequences, and where each one's keys and values are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class KVStore(Protocol):
    """Keys and values of one sequence. `write` may be repeated for the same tokens: only the owner advances it.

    keys, values: [layers, KH, capacity, D].
    """

    keys: Tensor
    values: Tensor
    capacity: int

    def write(self, layer: int, past: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [T, KH, D] behind the first `past` tokens; return those and these, each [KH, past + T, D]."""
        ...


@dataclass(frozen=True)
class Segment:
    """The rows [begin, end) of a batch belong to one sequence and are the tokens behind its first `past`."""

    begin: int
    end: int
    kv: KVStore
    past: int
    rope_length: int  # tokens by which length-dependent RoPE scalings choose their frequencies


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    logit_rows: Tensor  # [R] int64, ascending, none twice: the rows whose logits are wanted
    rotations: tuple[tuple[Tensor, Tensor], ...]  # cos, sin [T, 1, rotary_dim] of each of the model's RoPEs

    def __len__(self) -> int:
        return self.token_ids.shape[0]
