"""A mixture of experts on a GPU, by the kernels that suit the number of tokens; a token's bits are the same from
either. What it is beside them, the choice of experts, is `routing`'s."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from localllm.kernels.gpu import expert_gemm, expert_gemv
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.expert_record import ExpertTable
from localllm.kernels.gpu.expert_rows import ExpertRows, group_rows
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.routing import Routes


def mixture(
    dispatch: Dispatch, x: Codes, routes: Routes, experts: ExpertTable, y: Tensor, *, adds: bool
) -> list[KernelLaunch]:
    """x: of T rows, for the experts' first matrix. y [T, out features] of any float type, in rows of any stride: the
    weighted sum of each token's experts, in the order of its slots, of those that are on this device; adds: to what
    is in it."""
    pairs, device = routes.experts.numel(), routes.experts.device
    down = experts.down.shape
    codes = Codes.empty(pairs, down.in_features, down.group, device, down.bits)
    if is_few(dispatch, len(y), pairs, len(experts.addresses)):
        return [
            expert_gemv.gates(x, routes, experts, codes),
            expert_gemv.mixed(codes, routes, experts, y, adds=adds),
        ]
    # As many rows of a program as an expert has of them, if all have the same.
    gate = Gate(codes, experts.activation, experts.features)
    shape = replace(dispatch.shape(experts.gate_up.shape, triton.cdiv(pairs, len(experts.addresses)), gate), parts=1)
    rows = ExpertRows.empty(pairs, len(experts.addresses), shape.rows, device)
    parts = torch.empty((pairs, y.shape[1]), device=device)
    down_shape = replace(dispatch.shape(down, shape.rows), parts=1)
    return [
        group_rows(routes.experts, experts.addresses, rows),
        expert_gemm.gates(x, rows, experts, codes, routes.experts.shape[1], shape),
        *expert_gemm.mixed(codes, rows, routes, experts, y, parts, down_shape, adds=adds),
    ]


def is_few(dispatch: Dispatch, rows: int, pairs: int, experts: int) -> bool:
    """Return whether so many tokens are for dot products of bytes: where an expert has hardly more than one, nothing
    is gained by reading its weights once for all of them."""
    return rows <= dispatch.gemv_rows or (dispatch.gemv_rows > 0 and pairs <= experts)
