"""The rows of a segment as torch's operators take them into a layer's state."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.state_shapes import StateShape
from localllm.layers.segment import Segment

S = TypeVar("S", bound=StateShape)


def state_rows(segment: Segment, shape: S, layer: int, raw: Tensor) -> StateRows[S]:
    """Return a segment's rows with its sequence's state. layer: its number among those with states. raw: fp32
    [T, row_floats], what goes into the layer."""
    store = segment.kv.state
    assert store is not None, "its layer keeps a state"
    state, end = LayerState(shape, store.states.layer(layer)), segment.past + len(raw)
    snapshots = {position: each.layer(layer) for position, each in store.due.items()}
    return StateRows(state, raw, segment.past, min(store.committed, end), snapshots)
