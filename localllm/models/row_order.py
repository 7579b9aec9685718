"""The rows of a matrix as they are computed with: scaled, and in another order than a checkpoint stores them."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import Tensor

from localllm.models.layout import Grouped, Interleaved, Matrix


def as_computed(stored: Tensor, matrix: Matrix, names: Collection[str]) -> Tensor:
    """Return a matrix's weight or bias as it is computed with: scaled, and its rows in their order. names: of the
    tensors that store it."""
    if is_scaled(matrix):
        scales = row_scales(matrix)
        stored.mul_(scales if stored.dim() == 2 or isinstance(scales, float) else scales.flatten())
    order = row_order(matrix, names)
    return stored if order is None else stored[order]


def is_scaled(matrix: Matrix) -> bool:
    return any(scale != 1.0 for scale, _ in matrix.scaled_rows)


def row_scales(matrix: Matrix, first: int = 0, rows: int | None = None) -> float | Tensor:
    """Return what stored rows are multiplied by: one number, or fp32 [rows, 1]. first, rows: of those; by default
    all."""
    runs = matrix.scaled_rows
    if len({scale for scale, _ in runs}) == 1:
        return runs[0][0]
    scales = torch.cat([torch.full((count, 1), scale) for scale, count in runs])
    return scales[first:] if rows is None else scales[first : first + rows]


def row_order(matrix: Matrix, names: Collection[str]) -> Tensor | None:
    """Return the stored rows in the order in which they are computed with; None where that is theirs."""
    pairs, groups = matrix.interleaved, matrix.grouped
    grouped = None
    if groups is not None and groups.rows and not (groups.of_fused and len(names) > 1):
        grouped = _group_order(groups, matrix.out_features)
    if pairs is None or not pairs.rows:
        return grouped
    order = _pair_order(pairs, matrix.out_features)
    return order if grouped is None else grouped[order]


def _pair_order(pairs: Interleaved, num_rows: int) -> Tensor:
    features = torch.arange(pairs.head_dim)
    half = pairs.rotary_dim // 2
    features[:half], features[half : 2 * half] = 2 * torch.arange(half), 2 * torch.arange(half) + 1
    heads = torch.arange(pairs.rows // pairs.head_dim)
    order = (heads[:, None] * pairs.head_dim + features).flatten() + pairs.first
    before, behind = torch.arange(pairs.first), torch.arange(pairs.first + pairs.rows, num_rows)
    return torch.cat((before, order, behind))


def _group_order(groups: Grouped, num_rows: int) -> Tensor:
    begins = [0, *itertools.accumulate(groups.runs)]
    first = torch.arange(groups.rows // begins[-1])[:, None] * begins[-1]
    kinds = [(first + torch.arange(begins[kind], begins[kind + 1])).flatten() for kind in groups.order]
    return torch.cat((*kinds, torch.arange(groups.rows, num_rows)))
