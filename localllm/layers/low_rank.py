"""Adapters (LoRA): to each matrix that one changes, a product of two thin ones is added.

`AdapterWeights` are what a file says, for one model; an `Adapter` is what a forward computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from localllm.kernels.low_rank_record import LowRank as LowRank
from localllm.kernels.low_rank_record import LowRankRecord

EMBED, HEAD = "embed", "head"  # the sites that are no layer's


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter as it was read for one model.

    name: for people. digest: of all that it computes with; equal ones compute the same.
    sites: by the matrix that is changed, "layers.0.attention.qkv_proj"; "embed" and "head" are the embedding and the
        head; "layers.0.mlp.experts.3.gate_up_proj" is one of an expert. Of the embedding `a` is [rank, V] and `b`
        [hidden, rank].
    """

    name: str
    digest: bytes
    sites: Mapping[str, tuple[LowRank, ...]]

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max((each.rank for parts in self.sites.values() for each in parts), default=0)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that was loaded for one model.

    digest: of all that it computes with.
    parts: what torch's operators and a GPU's kernels compute with, by the layer; on its device, or brought there at
        first use.
    records: the same for the CPU's native steps. A layer is in one of the two.
    """

    name: str
    digest: bytes
    parts: dict[str, tuple[LowRank, ...]]
    records: Mapping[str, LowRankRecord]

    @property
    def needs_operators(self) -> bool:
        """Return whether a layer is changed that the CPU's native steps do not add to."""
        return bool(self.parts.keys() - {EMBED, HEAD})

    @property
    def num_bytes(self) -> int:
        parts = sum(part.num_bytes for each in self.parts.values() for part in each)
        return parts + sum(record.num_bytes for record in self.records.values())

    def parts_of(self, site: str, like: Tensor) -> tuple[LowRank, ...]:
        """Return what changes a layer, of this tensor's dtype and on its device."""
        parts = self.parts.get(site, ())
        if any((part.a.dtype, part.a.device) != (like.dtype, like.device) for part in parts):
            parts = tuple(LowRank(part.a.to(like), part.b.to(like), part.first_row) for part in parts)
            self.parts[site] = parts
        return parts


@dataclass(frozen=True, eq=False)
class AppliedAdapter:
    adapter: Adapter
    scale: float

    def add(self, site: str, x: Tensor, y: Tensor) -> None:
        """Add to y [T, N] what the adapter makes of x [T, K] in this layer."""
        for part in self.adapter.parts_of(site, x):
            rows = y[:, part.first_row : part.first_row + len(part.b)]
            rows += ((x @ part.a.T) @ part.b.T * self.scale).to(y.dtype)
