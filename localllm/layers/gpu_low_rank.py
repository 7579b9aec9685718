"""The adapters of a batch for a GPU's kernels: tables of where their matrices are, and which of them each row has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor

from localllm.kernels.gpu.low_rank import RECORD_WORDS, USE_WORDS, expand, new_ranks, shrink
from localllm.layers.batch import Batch, moved
from localllm.layers.low_rank import EMBED, Adapter, LowRank

_ALIGN = 16  # bytes, of the addresses that kernels read from


@dataclass(frozen=True, eq=False)
class PlacedAdapter:
    """An adapter on a device. records: int64 [sites, most parts of a site, RECORD_WORDS], of `parts`."""

    records: Tensor
    parts: Mapping[str, tuple[LowRank, ...]]

    @property
    def most_parts(self) -> int:
        return self.records.shape[1]


@dataclass(frozen=True, eq=False)
class RowAdapters:
    """What is added to the rows of a batch.

    uses: int64 [M, adapters, USE_WORDS], on the device.
    sites: the number of each in the adapters' tables, and the dtype of its matrices.
    placed: the adapters that the batch has.
    """

    uses: Tensor
    sites: Mapping[str, tuple[int, torch.dtype]]
    placed: Mapping[Adapter, PlacedAdapter]

    def changes(self, site: str) -> bool:
        """Return whether any of the adapters does."""
        return any(site in each.parts for each in self.placed.values())

    def of_rows(self, rows: Tensor) -> RowAdapters:
        """rows: of the batch, int64 [R], on the device."""
        return replace(self, uses=self.uses[rows])

    def add(self, site: str, x: Tensor, y: Tensor) -> None:
        """Add to y [M, N] what the adapters of each row make of x fp32 [M, K]."""
        number, dtype = self.sites[site]
        t = self._new_ranks(site)
        shrink(self.uses, number, x, t, dtype).run()
        expand(self.uses, number, t, y, dtype).run()

    def add_to_embedding(self, batch: Batch, token_ids: Tensor, scale: float, x: Tensor) -> None:
        """Add to the embeddings x fp32 [M, hidden] of the batch what the adapters have for its tokens.

        token_ids: int64 [M], on the device.
        scale: of the embedding.
        """
        t, most_parts = self._new_ranks(EMBED), self._most_parts
        for segment in batch.adapted_segments:
            own = slice(segment.begin, segment.end)
            for use, each in enumerate(segment.kv.adapters):
                for slot, part in enumerate(self.placed[each.adapter].parts.get(EMBED, ()), use * most_parts):
                    t[own, slot, : part.rank] = part.a[:, token_ids[own]].T.float() * (each.scale * scale)
        number, dtype = self.sites[EMBED]
        expand(self.uses, number, t, x, dtype).run()

    @property
    def _most_parts(self) -> int:
        return max(each.most_parts for each in self.placed.values())

    def _new_ranks(self, site: str) -> Tensor:
        rank = max(part.rank for each in self.placed.values() for part in each.parts.get(site, ()))
        return new_ranks(self.uses, self._most_parts, rank)


class AdapterTables:
    """Puts adapters on a device, each of them once."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
        """dtypes: of the matrices of every site that kernels add to."""
        self.sites = {site: (number, dtype) for number, (site, dtype) in enumerate(dtypes.items())}
        self._device = device
        self._placed: WeakKeyDictionary[Adapter, PlacedAdapter] = WeakKeyDictionary()

    def rows_of(self, batch: Batch) -> RowAdapters | None:
        """Return what is added to the rows of a batch; None where none has an adapter."""
        segments = batch.adapted_segments
        if not segments:
            return None
        placed = {each.adapter: self._of(each.adapter) for segment in segments for each in segment.kv.adapters}
        most = max(len(segment.kv.adapters) for segment in segments)
        uses = torch.zeros((len(batch), most, len(USE_WORDS)), dtype=torch.int64)
        for segment in segments:
            for index, each in enumerate(segment.kv.adapters):
                own, bits = placed[each.adapter], int(numpy.float32(each.scale).view(numpy.int32))
                words = torch.tensor((own.records.data_ptr(), own.most_parts, bits))
                uses[segment.begin : segment.end, index] = words
        return RowAdapters(moved(uses, self._device), self.sites, placed)

    def _of(self, adapter: Adapter) -> PlacedAdapter:
        """Its tensors stay here as long as the adapter does, wherever operators move those that it has itself."""
        if adapter not in self._placed:
            self._placed[adapter] = self._place(adapter)
        return self._placed[adapter]

    def _place(self, adapter: Adapter) -> PlacedAdapter:
        parts = {
            site: tuple(LowRank(self._put(part.a, dtype), self._put(part.b, dtype), part.first_row) for part in own)
            for site, (_, dtype) in self.sites.items()
            if (own := adapter.parts.get(site))
        }
        adapter.parts.update(parts)
        most_parts = max(map(len, parts.values()), default=1)
        records = torch.zeros((len(self.sites), most_parts, len(RECORD_WORDS)), dtype=torch.int64)
        for site, each in parts.items():
            for index, part in enumerate(each):
                words = (part.a.data_ptr(), part.b.data_ptr(), part.rank, part.first_row, len(part.b))
                records[self.sites[site][0], index] = torch.tensor(words)
        return PlacedAdapter(moved(records, self._device), parts)

    def _put(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        matrix = moved(matrix.to(dtype), self._device).contiguous()
        return matrix.clone() if matrix.data_ptr() % _ALIGN else matrix
