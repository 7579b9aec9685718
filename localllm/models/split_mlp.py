"""An MLP block cut in two by its intermediate features, so that two devices can compute it side by side.

Matrices are cut without knowing their format: from how its sizes grow with the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from localllm.models.layout import BlockLayout, Matrix
from localllm.models.load import BlockTensors
from localllm.quant.layouts import cut_step
from localllm.quant.recipe import Recipe


def split_features(layout: BlockLayout, recipe: Recipe, share: float) -> int:
    """Return how many features come nearest to this share of a block without being more; at least some of them."""
    step, whole = cut_step(recipe.blocks), _intermediate_size(layout)
    steps = int(share * whole / step)
    return min(max(steps, 1) * step, whole - step)


def _intermediate_size(layout: BlockLayout) -> int:
    _, down = layout.matrices
    return down.in_features


def split_block(
    layout: BlockLayout,
    views: Mapping[str, Tensor],
    recipe: Recipe,
    features: int,
    device: torch.device,
) -> BlockTensors:
    """Return the first features on `device`, with the output's bias, and beside them the others on the host, each in
    memory of its own. views: the whole block's tensors."""
    rest = _part(layout, views, recipe, (features, _intermediate_size(layout)))
    here = _part(layout, views, recipe, (0, features))
    there = {name: tensor.to(device) for name, tensor in here.tensors.items()}
    host = {name: tensor.to("cpu") for name, tensor in rest.tensors.items()}
    return BlockTensors(here.layout, there, beside=BlockTensors(rest.layout, host))


def _part(layout: BlockLayout, views: Mapping[str, Tensor], recipe: Recipe, span: tuple[int, int]) -> BlockTensors:
    gate_up, down = layout.matrices
    (begin, end), whole = span, down.in_features
    gates = [(begin, end), (whole + begin, whole + end)]
    rows = [
        _cut(views, gate_up, recipe, (first, gate_up.in_features), (last, gate_up.in_features)) for first, last in gates
    ]
    tensors = {name: torch.cat([part[name] for part in rows]) for name in rows[0]}
    tensors |= _cut(views, down, recipe, (down.out_features, begin), (down.out_features, end))
    if gate_up.has_bias:
        bias = views[f"{gate_up.name}.linear_bias"]
        tensors[f"{gate_up.name}.linear_bias"] = torch.cat([bias[first:last] for first, last in gates])
    if down.has_bias:
        bias = views[f"{down.name}.linear_bias"]
        tensors[f"{down.name}.linear_bias"] = torch.zeros_like(bias) if begin else bias
    tensors |= {vector.name: views[vector.name] for vector in layout.vectors}
    narrow = replace(
        layout,
        matrices=(
            replace(gate_up, parts=dict.fromkeys(gate_up.parts, end - begin)),
            replace(down, in_features=end - begin),
        ),
    )
    return BlockTensors(narrow, tensors)


def _cut(
    views: Mapping[str, Tensor], matrix: Matrix, recipe: Recipe, begin: tuple[int, int], end: tuple[int, int]
) -> dict[str, Tensor]:
    """Return what a matrix of the size `end` has of each tensor and one of the size `begin` has not."""
    before, after = (matrix.format(recipe).specs(*size) for size in (begin, end))
    cut = {}
    for name in after:
        tensor = views[f"{matrix.name}.{name}"]
        for dimension, (first, last) in enumerate(zip_longest(before[name].shape, after[name].shape)):
            if first != last:
                tensor = tensor.narrow(dimension, first, last - first)
        cut[f"{matrix.name}.{name}"] = tensor.contiguous()
    return cut
