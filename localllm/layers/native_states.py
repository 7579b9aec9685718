"""The states of a batch's sequences as the CPU's compiled kernels find them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.cpu_linear import is_available
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.state_shapes import StatePlace, StateShape
from localllm.layers.segment import Segment, by_sequence

HOST = torch.device("cpu")


def is_native(shape: StateShape, x: Tensor) -> bool:
    """Return whether a CPU's kernels compute a layer that keeps such states, of x."""
    return x.device == HOST and shape.fills_vectors and is_available()


def placed_states(segments: Sequence[Segment]) -> list[PlacedStates]:
    """Return the segments as the kernels take them, one a sequence. Layers whose states are elsewhere do not count."""
    found = []
    for segment in by_sequence(segments):
        store = segment.kv.state
        assert store is not None, "layers keep states"
        end = segment.past + segment.end - segment.begin
        due = tuple((position, each.address(HOST)) for position, each in store.due.items() if position <= end)
        committed, states = min(store.committed, end), store.states.address(HOST)
        found.append(PlacedStates(segment.begin, segment.end, segment.past, committed, states, due))
    return found


def tables_of(segments: Sequence[Segment]) -> StateTables:
    """Return tables with these segments."""
    placed = placed_states(segments)
    rows, snapshots = max(each.end for each in placed), sum(len(each.snapshots) for each in placed)
    tables = StateTables(rows, len(placed), snapshots)
    tables.place(placed)
    return tables


def place_of(segments: Sequence[Segment], layer: int) -> StatePlace:
    """Return where a layer's part begins in the states of every sequence. layer: its number among those with states."""
    store = segments[0].kv.state
    assert store is not None, "its layer keeps a state"
    return store.place(layer)
