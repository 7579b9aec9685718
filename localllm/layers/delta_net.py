"""The body of Gated DeltaNet: project, take in and read out each sequence's states, project back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.cpu_delta import DeltaRoom
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import is_available
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.delta_rule import DeltaWeights, gated_norm, mix
from localllm.layers.adapted import adapted, add_adapters
from localllm.layers.batch import Batch
from localllm.layers.config import DeltaNetConfig
from localllm.layers.linear import Linear
from localllm.layers.native_states import HOST, place_of, tables_of
from localllm.layers.segment import Segment
from localllm.layers.state_rows import state_rows


@dataclass(eq=False)
class DeltaNet:
    """layer: its number among those with states. in_proj: queries, keys, values, and the gates of what comes out.
    gates_proj: in fp32, the two gates of each state."""

    config: DeltaNetConfig
    layer: int
    in_proj: Linear
    gates_proj: Linear
    out_proj: Linear
    weights: DeltaWeights

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that are not read in fp32."""
        return self.in_proj, self.out_proj

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return (self.gates_proj,)

    @property
    def device(self) -> torch.device:
        return self.in_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape = self.config.shape
        # The gates in fp64: sums of fp32 depend in their last digits on how many rows there are.
        gates = reference.linear(x.double(), self.gates_proj.tensors["weight"]).float()
        add_adapters(self.gates_proj.name, x.float(), gates, batch)
        wide = adapted(self.in_proj, x, batch)
        if x.device == HOST and shape.fills_vectors and is_available():
            mixed = self._native(wide.float().contiguous(), gates, batch.segments)
            return adapted(self.out_proj, mixed.to(x.dtype), batch)
        z = wide[:, shape.channels :].reshape(len(x), shape.value_heads, shape.value_dim)
        raw = torch.cat((wide[:, : shape.channels].float(), gates), dim=-1)
        parts = (state_rows(each, shape, self.layer, raw[each.begin : each.end]) for each in batch.segments)
        mixed = torch.cat([mix(rows, self.weights) for rows in parts])
        mixed = gated_norm(mixed, z, self.weights).flatten(1).to(x.dtype)
        return adapted(self.out_proj, mixed, batch)

    def _native(self, wide: Tensor, gates: Tensor, segments: Sequence[Segment]) -> Tensor:
        """wide fp32 [T, in_features], gates fp32 [T, gate_features] -> fp32 [T, value features], by CPU kernels."""
        shape, place = self.config.shape, place_of(segments, self.layer)
        room, mixed = DeltaRoom(shape, tables_of(segments)), torch.empty(len(wide), shape.value_features)
        places = {"wide": wide, "gates": gates, "mixed": mixed}
        Tape(room.steps(best_isa(), self.weights, place, stride=wide.shape[1], **places)).run()
        return mixed
