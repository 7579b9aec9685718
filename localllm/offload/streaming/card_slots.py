"""Slots of a device's memory for experts that rest in the host's: those used last stay, the others are copied there
behind the step that wanted them.

A table of each block has the addresses of its experts that are in slots, 0 for the others. It is renewed before the
device is given work of that block, and at no other time: until then the host changes nothing that the device may read.
Knows nothing of what a record holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.page_locked import page_locked
from localllm.offload.streaming.device_stream import Lane
from localllm.offload.streaming.expert_uses import ExpertUses
from localllm.offload.streaming.lru_slots import LruSlots


@dataclass
class _Table:
    """arriving: events of copies whose addresses are in it, and not on the device yet."""

    on_host: Tensor
    on_device: Tensor
    has_changed: bool = False
    arriving: list[Any] = field(default_factory=list)


class CardSlots:
    """Records of one size in the slots of `memory`, uint8 [slots, bytes of a record], on the lane's device. One thread
    asks."""

    def __init__(
        self, homes: Mapping[str, Tensor], memory: Tensor, lane: Lane, active: Mapping[str, int], uses: ExpertUses
    ) -> None:
        """
        homes: by the block's name, uint8 [experts, bytes of a record] of the host's memory, best pinned
        active: by the same name, how many experts a token wants
        uses: is told of every step
        """
        self.memory = memory
        self._homes, self._lane, self._active, self._uses = homes, lane, active, uses
        self._slots = LruSlots(len(memory))
        self._tables = {
            name: _Table(
                page_locked((len(home),), torch.int64, memory.device),
                torch.zeros(len(home), dtype=torch.int64, device=memory.device),
            )
            for name, home in homes.items()
        }

    @property
    def num_slots(self) -> int:
        return len(self.memory)

    def table(self, block: str) -> Tensor:
        """The addresses of a block's records, int64 [experts], on the device. It is always the same tensor."""
        return self._tables[block].on_device

    def renew(self, block: str) -> None:
        """Let the device's table be the host's, for what is launched from here on. What the last call began must be
        done, which whoever reads the device's choice of experts has waited for."""
        table = self._tables[block]
        if not table.has_changed:
            return
        for arrived in table.arriving:
            self._lane.wait(arrived)
        table.arriving.clear()
        table.on_device.copy_(table.on_host, non_blocking=table.on_host.is_pinned())
        table.has_changed = False

    def missing(self, block: str, experts: Sequence[int]) -> list[int]:
        """Return those of the experts that were not in slots when the table was renewed; the others are used now."""
        found = []
        for index in experts:
            if (block, index) in self._slots:
                self._slots.use((block, index))
            else:
                found.append(index)
        hits = len(experts) - len(found) if len(experts) == self._active[block] else None
        self._uses.see(block, experts, len(self._homes[block]), hits)
        return found

    def bring(self, block: str, missing: Sequence[int], wanted: Sequence[int]) -> None:
        """Begin to copy missing experts, once all that was launched so far is done. wanted: of which none gives way, so
        that the rest of the block's work may still read them."""
        if not missing:
            return
        kept, table, after = {(block, index) for index in wanted}, self._tables[block], self._lane.mark()
        for index in missing:
            taken = self._slots.take((block, index), kept)
            if taken is None:
                return
            slot, evicted = taken
            if evicted is not None:
                other = self._tables[evicted[0]]
                other.on_host[evicted[1]], other.has_changed = 0, True
            table.arriving.append(self._lane.copy(self._homes[block][index], self.memory[slot], after))
            table.on_host[index] = self.memory[slot].data_ptr()
            table.has_changed = True
