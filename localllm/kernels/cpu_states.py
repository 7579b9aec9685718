"""The tables by which the CPU's kernels find the states of a batch's sequences, and how a kernel reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from localllm.kernels.cpu_ir import I64, PTR, Kernel, Value
from localllm.kernels.state_shapes import REPLAYED_ROWS, STATE_WORDS, STEP_ROWS, StateShape

_SEGMENT_BYTES = 8 * len(STATE_WORDS)
S = TypeVar("S", bound=StateShape)


class StateSegment(Generic[S]):
    """A segment's words, see STATE_WORDS, and where its sequence's state of the kernel's layer has what. The kernel has
    the arguments `segments`, `state` and `snapshot`: see `StateTables.words` and `StatePlace`."""

    def __init__(self, k: Kernel, shape: S, number: Value) -> None:
        self.k, self.shape, a = k, shape, k.arg
        at = a.segments.at(number * _SEGMENT_BYTES)
        kinds = [PTR if word in ("states", "snapshots") else I64 for word in STATE_WORDS]
        words: list[Value] = [at.at(8 * n).load(kind, 8) for n, kind in enumerate(kinds)]
        self.begin, end, self.past, self.committed, states, self.row, self._snapshots, self._num_snapshots = words
        self.matrices: Value = states.at(a.state)
        self.positions = self.matrices.at(shape.positions_begin)
        self.end = self.past + (end - self.begin)

    def first(self, head: Value) -> Value:
        """The position of the first token that this head's state lacks."""
        position = self.positions.at(head * 8).load(I64, 8)
        return self.past - self.k.smaller(self.past - self.k.smaller(position, self.past), self.k.i64(REPLAYED_ROWS))

    def batch_row(self, position: Value) -> Value:
        return self.begin + (position - self.past)

    def kept(self, position: Value) -> Value:
        """A pointer to the kept row of a position, which may be less than zero."""
        slot = (position + self.shape.kept_rows) % self.shape.kept_rows
        return self.matrices.at(self.shape.matrix_bytes).at(slot * (4 * self.shape.row_floats))

    def keep_rows(self, copy: Callable[[Value, Value], None], taken: Value | None = None) -> None:
        """Write what a thread has of rows to the snapshots and into the kept rows.

        copy: writes its part of the row at a position to a row. taken: the position up to which snapshots were taken
        before; without it, those further back than a step were when their tokens were new.
        """
        k, shape, before = self.k, self.shape, self.shape.conv_width - 1
        taken = self.past - (STEP_ROWS + 1) if taken is None else taken
        with self.snapshots() as (position, part):
            is_due = position.compare("sgt", taken) & position.compare("sle", self.end)
            with k.when(is_due), k.range(k.i64(0), k.i64(before), rolled=True) as n:
                copy(position - before + n, part.at(shape.matrix_bytes).at(n * (4 * shape.row_floats)))
        rows = k.smaller(self.end - self.past, k.i64(shape.kept_rows))
        with k.range(self.end - rows, self.end, rolled=True) as position:
            copy(position, self.kept(position))

    @contextmanager
    def snapshots(self) -> Iterator[tuple[Value, Value]]:
        """For each snapshot: its position, and where its part of this layer is."""
        with self.k.range(self.k.i64(0), self._num_snapshots, rolled=True) as n:
            pair = self._snapshots.at(n * 16)
            yield pair.load(I64, 8), pair.at(8).load(PTR, 8).at(self.k.arg.snapshot)


@dataclass(frozen=True)
class PlacedStates:
    """Tokens of one sequence in a batch.

    begin, end: its rows of the batch. past: the position of the first row's token. committed: tokens before this
    position change the state in place. states: the address of the sequence's states on the host. snapshots: positions,
    and addresses.
    """

    begin: int
    end: int
    past: int
    committed: int
    states: int
    snapshots: tuple[tuple[int, int], ...] = ()


class StateTables:
    """The tables of a batch for all layers with states, at fixed places that a tape can point at.

    rows, segments, snapshots: of a batch, at most; snapshots: of all its segments together.
    """

    def __init__(self, rows: int, segments: int, snapshots: int = 64) -> None:
        self._rows = rows
        self.prepared_rows = rows + REPLAYED_ROWS * segments  # with those that are computed again
        self._segments = torch.zeros(segments, len(STATE_WORDS), dtype=torch.int64)
        self._snapshots = torch.zeros(snapshots, 2, dtype=torch.int64)
        self._count = torch.zeros(1, dtype=torch.int64)

    @property
    def words(self) -> dict[str, Tensor]:
        """The arguments of a kernel that reads them: int64 [segments, words], and a pointer to their number."""
        return {"segments": self._segments, "count": self._count}

    def holds(self, segments: Sequence[PlacedStates]) -> bool:
        """Return whether the segments, their rows and their snapshots fit."""
        return (
            len(segments) <= len(self._segments)
            and max((segment.end for segment in segments), default=0) <= self._rows
            and sum(len(segment.snapshots) for segment in segments) <= len(self._snapshots)
        )

    def place(self, segments: Sequence[PlacedStates]) -> None:
        """Fill the tables: what was recorded computes these from now on. Their sequences are different ones."""
        words: list[tuple[int, ...]] = []
        snapshots: list[tuple[int, int]] = []
        row = 0
        for one in segments:
            row += REPLAYED_ROWS
            at = self._snapshots.data_ptr() + 16 * len(snapshots)
            words.append((one.begin, one.end, one.past, one.committed, one.states, row, at, len(one.snapshots)))
            snapshots += one.snapshots
            row += one.end - one.begin
        for table, rows in ((self._segments, words), (self._snapshots, snapshots)):
            table[: len(rows)] = torch.tensor(rows, dtype=torch.int64).view(-1, table.shape[1])
        self._count[0] = len(words)
