"""A part of a packed matrix, cut out without knowing its format: from how the format's sizes grow with the matrix."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor

from localllm.quant.weight_format import WeightFormat


def rows(
    weight_format: WeightFormat, tensors: dict[str, Tensor], in_features: int, parts: list[tuple[int, int]]
) -> dict[str, Tensor]:
    """The rows [begin, end) of each part, one after the other; begins and ends are where the format's tiles do."""
    cut = [_cut(weight_format, tensors, (begin, in_features), (end, in_features)) for begin, end in parts]
    return {name: torch.cat([part[name] for part in cut]) for name in tensors}


def columns(
    weight_format: WeightFormat, tensors: dict[str, Tensor], out_features: int, begin: int, end: int
) -> dict[str, Tensor]:
    """The columns [begin, end), which are where the format's groups begin and end."""
    return _cut(weight_format, tensors, (out_features, begin), (out_features, end))


def _cut(
    weight_format: WeightFormat, tensors: dict[str, Tensor], begin: tuple[int, int], end: tuple[int, int]
) -> dict[str, Tensor]:
    """Return what a matrix of the size `end` has of each tensor and one of the size `begin` has not."""
    before, after = weight_format.specs(*begin), weight_format.specs(*end)
    cut = {}
    for name, tensor in tensors.items():
        for dimension, (first, last) in enumerate(zip_longest(before[name].shape, after[name].shape)):
            if first != last:
                tensor = tensor.narrow(dimension, first, last - first)
        cut[name] = tensor.contiguous()
    return cut
