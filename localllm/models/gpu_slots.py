"""Mixtures of a GPU whose experts rest in the host's memory, some of them in slots of the device's as well.

A block of a step has three parts. The device chooses, and the choice and the hidden states are copied to the host. It
computes with the experts that are in slots, while the host computes with the others where they lie, which are then
copied to slots. At last all are added, each expert in the turn of its slot of the token: where one was computed changes
no order of additions. (Its last bits it does change: host and device sum a product's columns in other orders.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from localllm.kernels.gpu import product
from localllm.kernels.gpu.expert_record import ExpertTable
from localllm.kernels.gpu.experts import Inner, gates, mixed
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.page_locked import copy_event, page_locked
from localllm.layers.gpu_block import GpuForward
from localllm.layers.moe import MoE
from localllm.layers.norm import RMSNorm, as_rms
from localllm.models.decoder import Block, Decoder
from localllm.models.expert_records import SlottedExperts
from localllm.models.gpu_mixture import add_mixed, new_codes, new_routes, routed, table_of
from localllm.models.host_experts import HostExperts, HostMixture


@dataclass(frozen=True)
class BlockPart:
    """A part of a block whose experts are in slots. Behind the second one the host has to compute."""

    block: Block
    name: Literal["choose", "begin", "end"]


def parts_of(block: Block) -> tuple[BlockPart, ...]:
    return BlockPart(block, "choose"), BlockPart(block, "begin"), BlockPart(block, "end")


def is_slotted(block: Block) -> bool:
    return isinstance(block.body, MoE) and isinstance(block.body.experts, SlottedExperts)


class _MixtureRoom:
    """The buffers of a mixture for so many rows, at the same addresses each time: parts of a block are in graphs of
    their own. Blocks that are alike share them, one after the other."""

    def __init__(self, body: MoE, table: ExpertTable, rows: int, hidden: int, device: torch.device) -> None:
        pairs = rows * body.config.router.top_k
        self.routes, self.codes = new_routes(body, rows, device), new_codes(table, rows, device)
        self.inner = Inner.empty(product.dispatch_for(device), self.routes, table)
        self.elsewhere = torch.empty((pairs, hidden), device=device)
        self.chosen = page_locked((rows, body.config.router.top_k), torch.int32, device)
        self.x, self.parts = (page_locked((count, hidden), torch.float32, device) for count in (rows, pairs))
        self.arrived: Any = copy_event() if device.type == "cuda" else None

    @property
    def is_pinned(self) -> bool:
        return self.chosen.device.type == "cpu" and all(each.is_pinned() for each in (self.chosen, self.x))


class SlottedMixtures:
    """The mixtures of a program whose experts are in slots. One block at a time, its parts in their order."""

    def __init__(self, decoder: Decoder) -> None:
        self._hidden, self._device = decoder.config.hidden_size, decoder.device
        self._bodies = {block.name: block.body for block in decoder.blocks if is_slotted(block)}
        self._tables = {name: table_of(body) for name, body in self._bodies.items() if isinstance(body, MoE)}
        self._host = HostExperts(
            {block.name: _host_mixture(block) for block in decoder.blocks if is_slotted(block)}, product.FEW_ROWS
        )
        self._rooms: dict[tuple[object, int], _MixtureRoom] = {}

    def launch(self, part: BlockPart, x: Tensor, forward: GpuForward) -> None:
        """Give the device its work of a part. x fp32 [M, hidden]: is added to."""
        block, room = part.block, self._room(part.block, len(x))
        body, table = _body(block), self._tables[block.name]
        if part.name == "choose":
            routed(body, as_rms(block.norm_in), x, forward, room.routes, room.codes)
            room.chosen.copy_(room.routes.experts, non_blocking=True)
            room.x.copy_(x, non_blocking=True)
        elif part.name == "begin":
            run_all(gates(room.codes, room.routes, table, room.inner))
        else:
            dispatch = product.dispatch_for(x.device)

            def add(y: Tensor, *, adds: bool) -> None:
                run_all(mixed(dispatch, room.inner, room.routes, table, y, adds=adds, elsewhere=room.elsewhere))

            norms = as_rms(block.norm_in), as_rms(block.norm_out)
            add_mixed(body, add, norms, room.codes, room.routes, x, forward)

    def before(self, part: BlockPart) -> None:
        """Called before a part is launched, in a graph or not."""
        if part.name == "choose":
            _experts(part.block).slots.renew(part.block.name)

    def behind(self, part: BlockPart, rows: int, tokens: int) -> None:
        """Called behind it. rows: of x, the first `tokens` of which are somebody's."""
        room, experts, name = self._room(part.block, rows), _experts(part.block), part.block.name
        if part.name == "choose" and room.arrived is not None:
            room.arrived.record(torch.cuda.current_stream(self._device))
        elif part.name == "begin":
            if room.arrived is not None:
                room.arrived.synchronize()
            chosen = room.chosen[:tokens]
            wanted = torch.unique(chosen).tolist()
            if missing := experts.slots.missing(name, wanted):
                self._host.compute(name, room.x[:tokens], chosen, missing, room.parts)
                room.elsewhere.copy_(room.parts, non_blocking=room.parts.is_pinned())
                experts.slots.bring(name, missing, wanted)

    def is_capturable(self, part: BlockPart, rows: int) -> bool:
        """Return whether a graph can hold the part: copies to memory that is not page-locked it cannot."""
        return part.name != "choose" or self._room(part.block, rows).is_pinned

    def _room(self, block: Block, rows: int) -> _MixtureRoom:
        body = _body(block)
        key = body.config, rows
        if key not in self._rooms:
            if rows > product.FEW_ROWS:  # which come in many numbers, and one after the other
                self._rooms = {kept: room for kept, room in self._rooms.items() if kept[1] <= product.FEW_ROWS}
            self._rooms[key] = _MixtureRoom(body, self._tables[block.name], rows, self._hidden, self._device)
        return self._rooms[key]


def _body(block: Block) -> MoE:
    assert isinstance(block.body, MoE)
    return block.body


def _experts(block: Block) -> SlottedExperts:
    experts = _body(block).experts
    assert isinstance(experts, SlottedExperts)
    return experts


def _host_mixture(block: Block) -> HostMixture:
    norm = as_rms(block.norm_in)
    on_host = None if norm is None else RMSNorm(norm.weight.to("cpu"), norm.eps)
    return HostMixture(_body(block), _experts(block).home, on_host)
