"""Mixtures of experts as the CPU's native steps take them, and the rooms in which these compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from localllm.kernels.cpu_expert_room import ExpertMatrix, ExpertRoom, Mixture, block_rows
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.sizes import TILE
from localllm.layers.moe import ExpertBank, MoE
from localllm.layers.norm import RMSNorm
from localllm.models.expert_records import ExpertRecords, PooledExperts, RecordForm
from localllm.models.layout import Matrix


def is_native(records: ExpertBank) -> bool:
    """Return whether the kernels compute them: INT4 or INT8 records whose matrices fill whole tiles and groups.

    What all tokens share is a matter of `CpuProgram.supports`.
    """
    if not isinstance(records, ExpertRecords | PooledExperts):
        return False
    return all(_expert_matrix(matrix, records.form) is not None for matrix in records.form.matrices)


def mixture_of(body: MoE, norm: RMSNorm | None) -> Mixture:
    """Return the mixture of a body whose experts are native. norm: of what goes in."""
    assert isinstance(body.experts, ExpertRecords | PooledExperts)
    matrix = body.router.tensors["weight"]
    if body.shared_gate is not None:
        matrix = torch.cat((matrix, body.shared_gate.tensors["weight"]))
    bias = body.router.bias
    if bias is not None:  # of the experts' rows alone
        bias = functional.pad(bias, (0, len(matrix) - len(bias)))
    norm = norm if body.norms is None else body.norms.experts_in
    return replace(
        host_mixture(body, body.experts, norm),
        matrix=matrix,
        matrix_bias=bias,
        correction=body.correction,
        router_norm=None if body.norms is None else body.norms.router.weight,
        expert_scales=body.expert_scales,
    )


def host_mixture(body: MoE, records: ExpertRecords | PooledExperts, norm: RMSNorm | None) -> Mixture:
    """Return the experts alone of a body whose router is elsewhere. records: its experts, native and on the host."""
    gate_up, down = (_expert_matrix(matrix, records.form) for matrix in records.form.matrices)
    assert gate_up is not None and down is not None, "`is_native` said so"
    return Mixture(
        router=body.config.router,
        matrix=torch.empty(0, gate_up.in_features),
        table=records.table,
        gate_up=gate_up,
        down=down,
        glu=body.config.expert.glu,
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
    )


class ExpertRooms:
    """A room for each number of rows that blocks of a forward may have, made when one is wanted."""

    def __init__(self, isa: Isa, rows: int, mixtures: Sequence[Mixture]) -> None:
        """rows: the most tokens of a forward. mixtures: all of the model's."""
        self._isa, self._rows = isa, rows
        routers = [mixture.router for mixture in mixtures]
        self._router = replace(
            routers[0],
            num_experts=max(router.num_experts for router in routers),
            top_k=max(router.top_k for router in routers),
        )
        self._widest = max((mixture.gate_up for mixture in mixtures), key=lambda matrix: matrix.out_features)
        self._rooms: dict[int, ExpertRoom] = {}

    def room(self, tokens: int) -> ExpertRoom:
        """Return the room for so many tokens, which it is told of. It is made for all that have blocks of its size, and
        stays the same: tapes point at it."""
        assert tokens <= self._rows
        size = block_rows(self._isa, tokens, self._router)
        if size not in self._rooms:
            same = (rows for rows in range(tokens, self._rows + 1) if block_rows(self._isa, rows, self._router) == size)
            self._rooms[size] = ExpertRoom(self._isa, max(same), self._router, self._widest, size)
        room = self._rooms[size]
        room.shape[0] = tokens
        return room


def _expert_matrix(matrix: Matrix, form: RecordForm) -> ExpertMatrix | None:
    """Return where a matrix is in each record; None where the kernels do not know its format or its sizes."""
    weights = matrix.format(form.recipe).weights
    if weights is None or matrix.out_features % TILE or matrix.in_features % weights.columns:
        return None
    begins = {name: placed.begin for name, placed in form.record.tensors.items()}
    return ExpertMatrix(
        weights=weights,
        out_features=matrix.out_features,
        in_features=matrix.in_features,
        qweight=begins[f"{matrix.name}.qweight"],
        scale=begins[f"{matrix.name}.scale"],
        bias=begins.get(f"{matrix.name}.bias", 0),
        linear_bias=begins.get(f"{matrix.name}.linear_bias"),
    )
