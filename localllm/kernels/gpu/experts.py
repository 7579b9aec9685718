"""A mixture of experts on a GPU, by the kernels that suit the number of tokens; a token's bits are the same from
either. What it is beside them, the choice of experts, is `routing`'s."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from localllm.kernels.gpu import expert_gemm, expert_gemv
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.expert_record import ExpertTable
from localllm.kernels.gpu.expert_rows import ExpertRows, group_rows
from localllm.kernels.gpu.gemm import ProgramShape
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.routing import Routes


@dataclass(frozen=True)
class Inner:
    """What is between the experts' two matrices. codes: of T * top_k rows, for the second one. rows: the tokens by
    their experts, with the shape of programs; None where these are few."""

    codes: Codes
    rows: ExpertRows | None = None
    shape: ProgramShape | None = None

    @classmethod
    def empty(cls, dispatch: Dispatch, routes: Routes, experts: ExpertTable) -> Inner:
        pairs, device, down = routes.experts.numel(), routes.experts.device, experts.down.shape
        codes, count = Codes.empty(pairs, down.in_features, down.group, device, down.bits), len(experts.addresses)
        if is_few(dispatch, len(routes.experts), pairs, count):
            return cls(codes)
        # As many rows of a program as an expert has of them, if all have the same.
        gate = Gate(codes, experts.glu, experts.features)
        shape = replace(dispatch.shape(experts.gate_up.shape, triton.cdiv(pairs, count), gate), parts=1)
        return cls(codes, ExpertRows.empty(pairs, count, shape.rows, device), shape)


def mixture(
    dispatch: Dispatch, x: Codes, routes: Routes, experts: ExpertTable, y: Tensor, *, adds: bool
) -> list[KernelLaunch]:
    """x: of T rows, for the experts' first matrix. y [T, out features] of any float type, in rows of any stride: the
    weighted sum of each token's experts, in the order of its slots, of those that are on this device; adds: to what
    is in it."""
    inner = Inner.empty(dispatch, routes, experts)
    return [*gates(x, routes, experts, inner), *mixed(dispatch, inner, routes, experts, y, adds=adds)]


def gates(x: Codes, routes: Routes, experts: ExpertTable, inner: Inner) -> list[KernelLaunch]:
    """The first half of a mixture, of the experts that are here."""
    if inner.rows is None or inner.shape is None:
        return [expert_gemv.gates(x, routes, experts, inner.codes)]
    return [
        group_rows(routes.experts, experts.addresses, inner.rows),
        expert_gemm.gates(x, inner.rows, experts, inner.codes, routes.experts.shape[1], inner.shape),
    ]


def mixed(
    dispatch: Dispatch, inner: Inner, routes: Routes, experts: ExpertTable, y: Tensor, *, adds: bool,
    elsewhere: Tensor | None = None,
) -> list[KernelLaunch]:  # fmt: skip
    """The second half. elsewhere: as `expert_gemv.mixed` has it: each expert is added in its turn, wherever it was
    computed."""
    if inner.rows is None or inner.shape is None:
        return [expert_gemv.mixed(inner.codes, routes, experts, y, adds=adds, elsewhere=elsewhere)]
    parts = torch.empty((routes.experts.numel(), y.shape[1]), device=y.device)
    shape = replace(dispatch.shape(experts.down.shape, inner.shape.rows), parts=1)
    return expert_gemm.mixed(inner.codes, inner.rows, routes, experts, y, parts, shape, adds=adds, elsewhere=elsewhere)


def is_few(dispatch: Dispatch, rows: int, pairs: int, experts: int) -> bool:
    """Return whether so many tokens are for dot products of bytes: where an expert has hardly more than one, nothing
    is gained by reading its weights once for all of them."""
    return rows <= dispatch.gemv_rows or (dispatch.gemv_rows > 0 and pairs <= experts)
