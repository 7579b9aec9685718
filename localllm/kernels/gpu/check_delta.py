"""Gated DeltaNet and Kimi Delta Attention beside their reference on random inputs, as `check_cases` tries them, and the
codes of what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from localllm.kernels import delta_rule
from localllm.kernels.delta_rule import DeltaWeights
from localllm.kernels.gpu import activations, delta
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import can_code
from localllm.kernels.gpu.check_case import Case, codes_for, differing
from localllm.kernels.gpu.check_recurrence import CheckedLayer, SequenceTokens, TokenRun, recurrence_cases
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.layer_state import StateRows
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import DeltaShape, StatePlace


def delta_cases(device: torch.device, shape: DeltaShape, matrices: Iterable[Weights] = ()) -> Iterator[Case]:
    """matrices: for which codes are made."""
    named = f"a delta rule, {shape.decays} decays, heads {shape.value_heads} of {shape.key_dim} and {shape.value_dim}"
    layer = _layer(shape, _weights(shape), device)
    yield from recurrence_cases(layer, named, device)
    yield from _coded(layer, named, device, matrices)


def _coded(
    layer: CheckedLayer[DeltaShape], named: str, device: torch.device, matrices: Iterable[Weights]
) -> Iterator[Case]:
    """Codes for such matrices: those of a launch of their own."""
    shape, rows = layer.shape, 5
    part = TokenRun(SequenceTokens.random(shape, device), 0, rows, 0)
    floats = layer.found([part])
    for each in {(each.columns, each.bits): each for each in matrices}.values():
        if not can_code(shape.value_dim, each.columns):
            continue
        right, found = (codes_for(each, rows, shape.value_features, device) for _ in range(2))
        activations.to_codes(floats, right, shape.value_features).run()
        layer.found([part], found)
        yield Case(f"{named}: codes for {each.name}", differing(found, right), 0)


def _layer(shape: DeltaShape, weights: DeltaWeights, device: torch.device) -> CheckedLayer[DeltaShape]:
    vectors: dict[str, Any] = {name: x.to(device) for name, x in vars(weights).items() if isinstance(x, Tensor)}
    there = replace(weights, **vectors)

    def launches(
        wide: Tensor, gates: Tensor, out: Tensor | Codes, tables: SegmentTables, place: StatePlace
    ) -> list[KernelLaunch]:
        z = wide[:, shape.channels :]
        if shape.decays == "key":  # what decays are made of lies between the gates, as in a model
            b, a = gates.tensor_split([shape.value_heads], dim=1)
            gates = torch.cat((b, torch.full_like(a[:, : shape.key_dim], torch.nan), a), dim=1)
        return delta.mix(wide, gates, z, out, tables, there, shape, place)

    def expected(rows: StateRows[DeltaShape], wide: Tensor) -> Tensor:
        mixed = delta_rule.mix(rows, weights)
        return delta_rule.gated_norm(mixed, wide[:, shape.channels :].view(mixed.shape), weights).flatten(1)

    return CheckedLayer(shape, launches, expected)


def _weights(shape: DeltaShape) -> DeltaWeights:
    a_log = torch.rand(shape.value_heads).mul(16).log()
    conv = torch.randn(shape.conv_width, shape.channels) * 0.5
    vectors = torch.randn(shape.decay_features), torch.rand(shape.value_dim)
    return DeltaWeights(conv, a_log, *vectors, gate="silu" if shape.decays == "head" else "sigmoid")
