"""Gated DeltaNet of a batch by the CPU's compiled kernels: which tokens belong to which sequence's states.

`native_delta` serves layers of which torch's operators compute the rest; a native step uses the segments alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.cpu_delta import DeltaRoom, DeltaSegment
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import is_available
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.delta_rule import DeltaWeights
from localllm.kernels.sizes import DeltaShape
from localllm.layers.segment import Segment, by_sequence

_HOST = torch.device("cpu")


def is_native(shape: DeltaShape, x: Tensor) -> bool:
    """Return whether the kernels compute it: the layer is on the host, and heads fill whole vectors."""
    return x.device == _HOST and shape.fills_vectors and is_available()


def delta_segments(segments: Sequence[Segment]) -> list[DeltaSegment]:
    """Return the segments as the kernels take them, one a sequence; all states are on the host."""
    found = []
    for segment in by_sequence(segments):
        store = segment.kv.state
        assert store is not None, "layers keep states"
        end = segment.past + segment.end - segment.begin
        due = tuple((position, each.address(_HOST)) for position, each in store.due.items() if position <= end)
        committed, states = min(store.committed, end), store.states.address(_HOST)
        found.append(DeltaSegment(segment.begin, segment.end, segment.past, committed, states, due))
    return found


def native_delta(segments: Sequence[Segment], layer: int, weights: DeltaWeights, wide: Tensor, gates: Tensor) -> Tensor:
    """wide fp32 [T, channels + value features], gates fp32 [T, 2 value heads] -> fp32 [T, value features]. Brings the
    states of a layer up to date."""
    store = segments[0].kv.state
    assert store is not None, "its layer keeps a state"
    placed = delta_segments(segments)
    room = DeltaRoom(store.shape, len(wide), len(placed), sum(len(each.snapshots) for each in placed))
    room.place(placed)
    mixed = torch.empty(len(wide), store.shape.value_features)
    Tape(room.steps(best_isa(), weights, layer, wide=wide, stride=wide.shape[1], gates=gates, mixed=mixed)).run()
    return mixed
