"""What the torch rules of layers share that keep a matrix a head: the convolution in front, and the walk over the
tokens.

A sequence's state is changed in place only by tokens that count for certain. Of those behind them it keeps what goes
into the layer: they are computed again by the next step, so that rejected drafts are taken back by being left out.
Every token is computed alike, one after the other, however many rows are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.state_shapes import MatrixShape

M = TypeVar("M", bound=MatrixShape)


def raw_rows(rows: StateRows[M]) -> Tensor:
    """Return what goes into the layer of the tokens that its matrices lack, those of `rows` last, and of the
    conv_width - 1 before them: fp32 [conv_width - 1 + T, row_floats]."""
    begin = min(rows.state.position, rows.past) - rows.state.shape.conv_width + 1
    return torch.cat((rows.state.rows(begin, rows.past), rows.raw.float()))


def convolution(raw: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution of the first features of `raw`, fp64 [T, channels]. taps: fp32 [conv_width, channels]."""
    count, channels = len(raw) - len(taps) + 1, taps.shape[1]
    # In fp64: torch's vectors round functions otherwise than what is left over behind them.
    total = torch.zeros(count, channels, dtype=torch.float64, device=raw.device)
    if bias is not None:
        total[:] = bias
    for n, tap in enumerate(taps):
        total += raw[n : n + count, :channels].double() * tap
    return total


def walk(
    rows: StateRows[M], raw: Tensor, take_in: Callable[[Tensor, int], Tensor], read: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return what is read of the matrices behind each token of `rows`, fp32 [T, heads, columns], and bring the state up
    to date.

    raw: as `raw_rows` returns it. take_in: matrices S [heads, rows, columns] and the number of a token among those that
    they lack -> S with that token. read: the same -> [heads, columns].
    """
    state, shape = rows.state, rows.state.shape
    before = shape.conv_width - 1
    count = len(raw) - before
    begin = rows.past + len(rows.raw) - count
    out = torch.empty(len(rows.raw), shape.heads, shape.matrix_dims[1], device=raw.device)
    S = _matrices(state)
    for i in range(count):
        S, position = take_in(S, i), begin + i
        if position >= rows.past:
            out[position - rows.past] = read(S, i)
        if position + 1 in rows.snapshots:
            state.write_snapshot(rows.snapshots[position + 1], _in_lanes(S, shape), raw[i + 1 : i + 1 + before])
        if position + 1 == rows.committed:
            state.matrices.copy_(_in_lanes(S, shape).flatten())
            state.position = rows.committed
    state.keep_rows(rows.past, rows.raw)
    return out


def _matrices(state: LayerState[M]) -> Tensor:
    """[heads, columns / lanes, rows, lanes] -> [heads, rows, columns]"""
    shape = state.shape
    return state.matrices.view(shape.heads, -1, shape.matrix_dims[0], shape.lanes).transpose(1, 2).flatten(2)


def _in_lanes(S: Tensor, shape: MatrixShape) -> Tensor:
    return S.reshape(*S.shape[:2], -1, shape.lanes).transpose(1, 2)
