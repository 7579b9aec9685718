"""The bytes of a sequence's state in one layer as tensors: what `StateShape` gives the sizes of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from localllm.kernels.state_shapes import STEP_ROWS, StateShape

S = TypeVar("S", bound=StateShape, covariant=True)


class LayerState(Generic[S]):
    """Views of the bytes of a sequence's state in one layer, uint8 [state_bytes]. matrices: fp32 [matrix_floats]."""

    def __init__(self, shape: S, state: Tensor) -> None:
        self.shape = shape
        end = shape.matrix_bytes
        self.matrices = state[:end].view(torch.float32)
        begin, end = end, end + 4 * shape.kept_rows * shape.row_floats
        self._rows = state[begin:end].view(torch.float32).view(shape.kept_rows, shape.row_floats)
        begin = shape.positions_begin
        self._positions = state[begin : begin + 8 * shape.heads].view(torch.int64)

    @property
    def position(self) -> int:
        """Tokens that the matrices have taken in."""
        return int(self._positions[0])

    @position.setter
    def position(self, position: int) -> None:
        self._positions.fill_(position)

    def rows(self, begin: int, end: int) -> Tensor:
        """[end - begin, row_floats] of the tokens at these positions; zeros before the first one."""
        positions = torch.arange(begin, end)
        kept = self._rows[(positions % self.shape.kept_rows).to(self._rows.device)]
        return kept.masked_fill((positions < 0).to(kept.device)[:, None], 0.0)

    def keep_rows(self, begin: int, rows: Tensor) -> None:
        """Keep what stands at the positions from `begin` on, the last ones where it is more than are kept."""
        positions = torch.arange(begin, begin + len(rows))[-self.shape.kept_rows :]
        self._rows[(positions % self.shape.kept_rows).to(self._rows.device)] = rows[-self.shape.kept_rows :].float()

    def write_snapshot(self, snapshot: Tensor, matrices: Tensor, tail: Tensor) -> None:
        """Write to `snapshot`, uint8 [snapshot_bytes]. tail: the rows before the snapshot's position."""
        end = self.shape.matrix_bytes
        snapshot[:end].view(torch.float32).copy_(matrices.reshape(-1))
        tail_bytes = 4 * (self.shape.conv_width - 1) * self.shape.row_floats
        snapshot[end : end + tail_bytes].view(torch.float32).copy_(tail.reshape(-1))

    def read_snapshot(self, snapshot: Tensor, position: int) -> None:
        """Become what the snapshot is of, which was taken before the token at `position`."""
        shape, end = self.shape, self.shape.matrix_bytes
        self.matrices.copy_(snapshot[:end].view(torch.float32))
        tail_bytes = 4 * (shape.conv_width - 1) * shape.row_floats
        tail = snapshot[end : end + tail_bytes].view(torch.float32).view(-1, shape.row_floats)
        self.keep_rows(position - len(tail), tail)
        self.position = position


@dataclass(frozen=True, eq=False)
class StateRows(Generic[S]):
    """Some tokens of one sequence. raw: fp32 [T, row_floats]: what goes into the layer.

    past: the position of the first one. committed: tokens before this position change the state in place; all, or none
    that `state` has not kept.
    snapshots: uint8 [snapshot_bytes] by the positions, at most `committed`, before which they are to be taken.
    """

    state: LayerState[S]
    raw: Tensor
    past: int
    committed: int
    snapshots: Mapping[int, Tensor] = field(default_factory=dict)

    def keep(self) -> None:
        """Bring a state up to date of which only the rows count. Snapshots further back than a step were taken when
        their tokens were new."""
        state, kept, before = self.state, self.state.shape.kept_rows, self.state.shape.conv_width - 1
        rows = torch.cat((state.rows(self.past - kept, self.past), self.raw))
        for position, snapshot in self.snapshots.items():
            end = position - self.past + kept
            if kept - STEP_ROWS <= end <= len(rows):
                state.write_snapshot(snapshot, state.matrices, rows[end - before : end])
        state.keep_rows(self.past, self.raw)
