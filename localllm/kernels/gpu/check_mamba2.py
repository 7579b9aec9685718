"""Mamba 2 beside its reference on random inputs, as `check_cases` tries it, with each form of its norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from localllm.kernels import mamba2_rule
from localllm.kernels.gpu import mamba2
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.check_case import Case, error_of
from localllm.kernels.gpu.check_recurrence import RECURRENCE, CheckedLayer, SequenceTokens, TokenRun, recurrence_cases
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.layer_state import StateRows
from localllm.kernels.mamba2_rule import Mamba2Weights
from localllm.kernels.state_shapes import Mamba2Shape, StatePlace


def mamba_cases(device: torch.device, shape: Mamba2Shape) -> Iterator[Case]:
    named, weights = f"Mamba 2, heads {shape.num_heads} of {shape.head_dim} and {shape.state_size}", _weights(shape)
    yield from recurrence_cases(_layer(shape, weights, device), named, device)
    for norm, other in (("gated behind its norm", {"norm_is_gated": False}), ("without a norm", {"norm": None})):
        layer, part = (
            _layer(shape, replace(weights, **other), device),
            TokenRun(SequenceTokens.random(shape, device), 0, 5, 5),
        )
        yield Case(f"{named}, {norm}", error_of(layer.found([part]), layer.right(part, {})), RECURRENCE)


def _layer(shape: Mamba2Shape, weights: Mamba2Weights, device: torch.device) -> CheckedLayer[Mamba2Shape]:
    vectors: dict[str, Any] = {name: x.to(device) for name, x in vars(weights).items() if isinstance(x, Tensor)}
    there = replace(weights, **vectors)

    def launches(
        wide: Tensor, steps: Tensor, out: Tensor | Codes, tables: SegmentTables, place: StatePlace
    ) -> list[KernelLaunch]:
        assert isinstance(out, Tensor)
        return mamba2.mix(wide, steps, out, tables, there, shape, place)

    def expected(rows: StateRows[Mamba2Shape], wide: Tensor) -> Tensor:
        mixed = mamba2_rule.mix(rows, weights).flatten(1)
        return mamba2_rule.gated_norm(mixed, wide[:, : shape.features], weights, shape.num_groups)

    return CheckedLayer(shape, launches, expected, shape.features)


def _weights(shape: Mamba2Shape) -> Mamba2Weights:
    heads = shape.num_heads
    return Mamba2Weights(
        conv=torch.randn(shape.conv_width, shape.channels) * 0.5,
        conv_bias=torch.randn(shape.channels) * 0.3,
        a_log=torch.rand(heads).mul(16).log(),
        dt_bias=torch.randn(heads),
        d=torch.randn(heads),
        norm=torch.rand(shape.features),
    )
