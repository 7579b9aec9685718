"""The adapters of a batch as the CPU's kernels find them: tables that are told once, for all layers of a forward."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import cpu_low_rank
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Activations, Step
from localllm.kernels.cpu_low_rank import SHAPE_WORDS
from localllm.kernels.low_rank_record import LowRankRecord
from localllm.kernels.sizes import TILE

Records = Mapping[str, LowRankRecord]  # of one adapter, by the layer


@dataclass(frozen=True, eq=False)
class AdaptedRows:
    """Rows of a batch that have the same adapters, and what multiplies each."""

    first_row: int
    rows: int
    adapters: Sequence[tuple[Records, float]]


class LowRankRoom:
    """The tables of a batch, at a place that tapes can point at. sites: names of all layers that adapters may change.

    changed: those that an adapter of the batch does change; no other layer has a step.
    """

    def __init__(self, isa: Isa, sites: Sequence[str]) -> None:
        self._isa = isa
        self._numbers = {name: number for number, name in enumerate(sites)}
        self._shape = torch.zeros(len(SHAPE_WORDS), dtype=torch.int64)
        self._tables: tuple[Tensor, ...] = ()  # which the shape points at
        self._placed: tuple[object, ...] = ()
        self._adapters: list[Records] = []  # which stay as long as they are pointed at
        self.changed: frozenset[str] = frozenset()

    def place(self, batch: Sequence[AdaptedRows]) -> None:
        """Place the adapters of a batch. What was placed last is left as it is where it is the same."""
        key = tuple((each.first_row, each.rows, *((id(own), scale) for own, scale in each.adapters)) for each in batch)
        if key == self._placed:
            return
        if not batch:
            self._tables, self._placed, self._adapters, self.changed = (), (), [], frozenset()
            return
        adapters = list({id(own): own for each in batch for own, _ in each.adapters}.values())
        numbers = {id(own): number for number, own in enumerate(adapters)}
        most_tiles = [max((record.rank_tiles for record in own.values()), default=0) for own in adapters]
        segments: list[tuple[int, ...]] = []
        uses: list[tuple[int, ...]] = []
        floats = 0
        for each in batch:
            segments.append((each.first_row, each.rows, len(uses), len(each.adapters)))
            for own, scale in each.adapters:
                number = numbers[id(own)]
                uses.append((each.first_row, each.rows, number, floats, _bits(scale)))
                floats += each.rows * most_tiles[number] * TILE
        records = [[own[site].words.data_ptr() if site in own else 0 for own in adapters] for site in self._numbers]
        tables = torch.tensor(segments), torch.tensor(uses), torch.empty(floats), torch.tensor(records)
        counts = len(segments), len(uses), max(each.rows for each in batch), max(most_tiles)
        addresses = (table.data_ptr() for table in tables)
        self._shape[:] = torch.tensor([*counts, *addresses, len(adapters)])
        self._tables, self._placed, self._adapters = tables, key, adapters
        self.changed = frozenset(site for own in adapters for site in own)

    def steps(
        self,
        site: str,
        activations: Activations,
        block_rows: int,
        group: int,
        columns: int,
        y: Tensor,
        features: int,
        stride: int | None = None,
    ) -> list[Step]:
        """Return the steps that add to a layer's output; none where no adapter of the batch changes it.

        activations: of the layer's input, in groups of `group` of its `columns`. y: its output, `features` floats a
        row, or `stride` with what is behind them.
        """
        if site not in self.changed:
            return []
        number = self._numbers[site]
        groups = {name: tensor for name, tensor in activations.groups.items() if name != "x_bias"}
        shrink = cpu_low_rank.shrink(self._isa, group, block_rows).step(
            shape=self._shape, x=activations.q, groups=columns // group, site=number, **groups
        )
        expand = cpu_low_rank.expand(self._isa).step(
            shape=self._shape, y=y, features=stride or features, tiles=features // TILE, site=number
        )
        return [shrink, expand]


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
