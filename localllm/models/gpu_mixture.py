"""Mixtures of experts as the GPU's kernels take them, and a block of one: norm, choice, experts, what all tokens share.

Records lie wherever the device reads them; the table of their addresses is made once, of their place, and is data.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localllm.kernels.gpu import activations
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.expert_record import ExpertTable, RecordMatrix
from localllm.kernels.gpu.experts import mixture
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import dispatch_for
from localllm.kernels.gpu.routing import RouterWeights, Routes, route
from localllm.kernels.packed_matrix import packed_matrix
from localllm.kernels.sizes import Weights
from localllm.layers.gpu_block import GpuForward, floats_of, run_mlp
from localllm.layers.moe import MoE
from localllm.layers.norm import RMSNorm
from localllm.models.capabilities import is_for_gpu
from localllm.models.expert_records import ExpertRecords, RecordForm, SlottedExperts
from localllm.models.layout import Matrix


class AddExperts(Protocol):
    def __call__(self, y: Tensor, *, adds: bool) -> None:
        """y = the weighted sum of each row's experts; adds: to what is there."""


def is_for_kernels(body: MoE) -> bool:
    """Return whether the kernels compute it: experts in packed records in memory, which they know."""
    if not isinstance(body.experts, ExpertRecords | SlottedExperts):
        return False
    form = body.experts.form
    weights = [matrix.format(form.recipe).weights for matrix in form.matrices]
    return None not in weights and _shares_codes(body, weights[0]) and is_for_gpu(body.config)


def _shares_codes(body: MoE, weights: Weights | None) -> bool:
    """Return whether what all tokens share is multiplied with the codes that are made for the experts' first matrix."""
    if body.shared is None or weights is None:
        return True
    own = body.shared.gate_up_proj.packed
    return own is not None and (own.group, own.bits) == (weights.columns, weights.bits)


def table_of(body: MoE) -> ExpertTable:
    """Return the experts of a body for which `is_for_kernels` holds."""
    assert isinstance(body.experts, ExpertRecords | SlottedExperts)
    form = body.experts.form
    gate_up, down = (_record_matrix(matrix, form) for matrix in form.matrices)
    return ExpertTable(body.experts.table, gate_up, down, form.config.glu, form.config.intermediate_size)


def run_mixture(
    body: MoE, table: ExpertTable, norm_in: RMSNorm | None, norm_out: RMSNorm | None, x: Tensor, forward: GpuForward
) -> None:
    """x fp32 [M, hidden] += norm_out(body(norm_in(x))). A token has four launches, and those of a shared expert."""
    routes, codes = new_routes(body, len(x), x.device), new_codes(table, len(x), x.device)
    routed(body, norm_in, x, forward, routes, codes)

    def add(y: Tensor, *, adds: bool) -> None:
        run_all(mixture(dispatch_for(x.device), codes, routes, table, y, adds=adds))

    add_mixed(body, add, (norm_in, norm_out), codes, routes, x, forward)


def new_routes(body: MoE, rows: int, device: torch.device) -> Routes:
    return Routes.empty(rows, body.config.router, device, has_gate=body.shared_gate is not None)


def new_codes(table: ExpertTable, rows: int, device: torch.device) -> Codes:
    """Return a buffer for what the experts' first matrix, and a shared expert's, are multiplied with."""
    matrix = table.gate_up.shape
    return Codes.empty(rows, matrix.in_features, matrix.group, device, matrix.bits)


def routed(body: MoE, norm: RMSNorm | None, x: Tensor, forward: GpuForward, routes: Routes, codes: Codes) -> None:
    """Choose the experts of each row, and make its codes."""
    parts = RouterWeights(
        body.router.tensors["weight"],
        body.router.bias,
        correction=body.correction,
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        gate=None if body.shared_gate is None else body.shared_gate.tensors["weight"],
    )
    positions = forward.tables.views["positions"]
    run_all(route(x, body.config.router, parts, routes, positions=positions, codes=codes))


def add_mixed(
    body: MoE,
    add: AddExperts,
    norms: tuple[RMSNorm | None, RMSNorm | None],
    codes: Codes,
    routes: Routes,
    x: Tensor,
    forward: GpuForward,
) -> None:
    """x fp32 [M, hidden] += norm_out(what `add` makes of the chosen experts, and what all tokens share). norms: the one
    with which `routed` made the codes, and norm_out."""
    norm_in, norm = norms
    is_changed = body.shared is not None and forward.changes(*body.shared.linears)
    floats = floats_of(x, x.shape[1], norm_in) if is_changed else None
    y = x if norm is None else torch.empty_like(x)
    add(y, adds=norm is None)
    if body.shared is not None:
        _add_shared(body, codes, routes, y, forward, floats)
    if norm is not None:
        activations.to_floats(y, x, x.shape[1], weight=norm.weight, eps=norm.eps, adds=True).run()


def _add_shared(body: MoE, codes: Codes, routes: Routes, y: Tensor, forward: GpuForward, floats: Tensor | None) -> None:
    """y fp32 [M, hidden] += what all tokens share, by each one's gate where there is one. floats: what the codes were
    made of, for adapters."""
    assert body.shared is not None
    if body.shared_gate is None:
        run_mlp(body.shared, codes, None, forward, y, floats)
        return
    shared = run_mlp(body.shared, codes, None, forward, floats=floats)
    y.addcmul_(shared, routes.gates.sigmoid())


def _record_matrix(matrix: Matrix, form: RecordForm) -> RecordMatrix:
    begins = {name: placed.begin for name, placed in form.record.tensors.items()}
    weight_format = matrix.format(form.recipe)
    specs, weights = weight_format.specs(matrix.out_features, matrix.in_features), weight_format.weights
    assert weights is not None, "`is_for_kernels` said so"
    tensors = {name: torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta") for name, spec in specs.items()}
    names = [*specs, "linear_bias"] if matrix.has_bias else specs
    places = {name: begins[f"{matrix.name}.{name}"] for name in names}
    return RecordMatrix(packed_matrix(tensors, weights.table), **places)
