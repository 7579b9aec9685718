"""A part of a packed matrix, cut out without knowing its format: from how the format's sizes grow with the matrix."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor

from localllm.kernels.tile16 import TILE
from localllm.quant.weight_format import WeightFormat


def can_be_cut(weight_format: WeightFormat) -> bool:
    """Return whether its tensors have a dimension for rows and one for columns: nf4's run over the ends of rows."""
    return any(len(spec.shape) > 1 for spec in weight_format.specs(256, 256).values())


def step(weight_format: WeightFormat) -> int:
    """Rows and columns that a cut may fall between: where the tiles and groups of the format end."""
    sizes = (TILE << power for power in range(8))
    return next(
        size for size in sizes if 4 * _weight_bytes(weight_format, size) == _weight_bytes(weight_format, 2 * size)
    )


def _weight_bytes(weight_format: WeightFormat, size: int) -> int:
    """Bytes of the largest tensor of a square matrix, padding included."""
    return max(spec.nbytes for spec in weight_format.specs(size, size).values())


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
