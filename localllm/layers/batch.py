"""What one forward works on: the new tokens of several sequences, and where each one's keys and values are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class KVStore(Protocol):
    """Keys and values of one sequence. `write` may be repeated for the same tokens: only the owner advances it.

    keys, values: [layers, KH, capacity, D], where all layers have them on one device.
    """

    capacity: int

    @property
    def keys(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    def write(self, layer: int, past: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [T, KH, D] behind the first `past` tokens; return those and these, each [KH, past + T, D]
        on the device of k."""
        ...


@dataclass(frozen=True)
class Segment:
    """The rows [begin, end) of a batch belong to one sequence and are the tokens behind its first `past`."""

    begin: int
    end: int
    kv: KVStore
    past: int
    rope_length: int  # tokens by which length-dependent RoPE scalings choose their frequencies


def moved(x: Tensor, device: torch.device) -> Tensor:
    """x there; towards the host the values are waited for, who would else be read too early. The other way nothing is:
    the driver has taken what is in pageable memory when the call returns."""
    return x.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    logit_rows: Tensor  # [R] int64, ascending, none twice: the rows whose logits are wanted
    rotations: tuple[tuple[Tensor, Tensor], ...]  # cos, sin [T, 1, rotary_dim] of each of the model's RoPEs

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def on(self, device: torch.device) -> Batch:
        """The same batch with its tensors there; the keys and values stay where they are."""
        if self.token_ids.device == device:
            return self
        return replace(
            self,
            token_ids=moved(self.token_ids, device),
            positions=moved(self.positions, device),
            logit_rows=moved(self.logit_rows, device),
            rotations=tuple((moved(cos, device), moved(sin, device)) for cos, sin in self.rotations),
        )
