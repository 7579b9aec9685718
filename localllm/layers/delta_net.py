"""The body of Gated DeltaNet: project, take in and read out each sequence's states, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.delta_rule import DeltaRows, DeltaState, DeltaWeights, gated_norm, mix
from localllm.layers.adapted import adapted, add_adapters
from localllm.layers.batch import Batch
from localllm.layers.config import DeltaNetConfig
from localllm.layers.linear import Linear
from localllm.layers.native_delta import is_native, native_delta
from localllm.layers.segment import Segment


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
    def device(self) -> torch.device:
        return self.in_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape = self.config.shape
        # The gates in fp64: sums of fp32 depend in their last digits on how many rows there are.
        gates = reference.linear(x.double(), self.gates_proj.tensors["weight"]).float()
        add_adapters(self.gates_proj.name, x.float(), gates, batch)
        wide = adapted(self.in_proj, x, batch)
        if is_native(shape, x):
            mixed = native_delta(batch.segments, self.layer, self.weights, wide.float().contiguous(), gates)
            return adapted(self.out_proj, mixed.to(x.dtype), batch)
        z = wide[:, shape.channels :].reshape(len(x), shape.value_heads, shape.value_dim)
        raw = torch.cat((wide[:, : shape.channels].float(), gates), dim=-1)
        mixed = torch.cat([self._mixed(segment, raw[segment.begin : segment.end]) for segment in batch.segments])
        mixed = gated_norm(mixed, z, self.weights).flatten(1).to(x.dtype)
        return adapted(self.out_proj, mixed, batch)

    def _mixed(self, segment: Segment, raw: Tensor) -> Tensor:
        store = segment.kv.state
        assert store is not None, "its layer keeps a state"
        end = segment.past + len(raw)
        state = DeltaState(store.shape, store.states.layer(self.layer))
        snapshots = {position: each.layer(self.layer) for position, each in store.due.items()}
        return mix(DeltaRows(state, raw, segment.past, min(store.committed, end), snapshots), self.weights)
