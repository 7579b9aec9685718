"""What a host computes of mixtures whose experts lie in its memory, for a device that has not got them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.cpu_expert_room import ExpertRoom, Mixture
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_matmul import is_available
from localllm.kernels.cpu_tape import Tape
from localllm.layers.batch import Batch
from localllm.layers.moe import MoE
from localllm.layers.norm import RMSNorm
from localllm.models.cpu_mixture import ExpertRooms, host_mixture, is_native
from localllm.models.expert_records import ExpertRecords


class HostMixture(NamedTuple):
    """norm: of what goes in, on the host."""

    body: MoE
    records: ExpertRecords
    norm: RMSNorm | None


class HostExperts:
    """Experts of some blocks, by native steps where these know them, else by operators."""

    def __init__(self, mixtures: Mapping[str, HostMixture], rows: int) -> None:
        """mixtures: by the block's name. rows: as many as a step has."""
        self._mixtures = mixtures
        self._native: dict[str, Mixture] = {}
        self._tapes: dict[tuple[str, ExpertRoom], Tape] = {}
        if is_available() and all(is_native(each.records) for each in mixtures.values()):
            self._native = {name: host_mixture(each.body, each.records, each.norm) for name, each in mixtures.items()}
            self._isa = best_isa()
            self._rooms = ExpertRooms(self._isa, rows, [*self._native.values()])
            self._sources: dict[ExpertRoom, Tensor] = {}

    def compute(self, block: str, x: Tensor, chosen: Tensor, experts: Sequence[int], parts: Tensor) -> None:
        """Write what these experts have, before it is weighed, to the rows of their pairs. x fp32 [T, hidden], before
        the norm; chosen int32 [T, top_k]; parts fp32 [T * top_k, hidden]."""
        if self._native:
            self._by_steps(block, x, chosen, experts, parts)
            return
        body, records, norm = self._mixtures[block]
        x = x if norm is None else norm(x)
        for expert, mlp in next(records.held(experts)):
            pairs = (chosen.flatten() == expert).nonzero().squeeze(1)
            parts[pairs] = mlp(x[pairs // body.config.router.top_k], _NO_BATCH).float()

    def _by_steps(self, block: str, x: Tensor, chosen: Tensor, experts: Sequence[int], parts: Tensor) -> None:
        mixture, room = self._native[block], self._rooms.room(len(x))
        source = self._sources.setdefault(room, torch.zeros(room.rows, x.shape[1]))
        source[: len(x)] = x
        if (block, room) not in self._tapes:
            self._tapes[block, room] = Tape([*room.expert_steps(mixture, source)])
        for _ in room.arrange(chosen, [experts]):
            self._tapes[block, room].run()
        is_ours = torch.isin(chosen.flatten(), torch.tensor(experts, dtype=chosen.dtype))
        parts[: len(is_ours)][is_ours] = room.y[room.places[: len(is_ours)][is_ours].long()]


_NO_BATCH = Batch(torch.empty(0), torch.empty(0), (), torch.empty(0), ())  # rows of an MLP do not see each other
