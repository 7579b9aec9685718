"""The body of Gated DeltaNet and of Kimi Delta Attention: project, take in and read out each sequence's states, project
back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.cpu_delta import DeltaRoom, Strided
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.delta_rule import DeltaWeights, gated_norm, mix
from localllm.layers.adapted import adapted, add_adapters
from localllm.layers.batch import Batch
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import DeltaNetConfig
from localllm.layers.linear import Linear
from localllm.layers.native_states import is_native, place_of, tables_of
from localllm.layers.segment import Segment
from localllm.layers.state_rows import state_rows


@dataclass(eq=False)
class DeltaNet:
    """layer: its number among those with states. in_proj: queries, keys, values, and the gates of what comes out.
    gates_proj: in fp32, the gates of each state, b and a. decay_proj, z_proj: where a and the gates of what comes out
    are made by two matrices each, the second ones, that of a in fp32."""

    config: DeltaNetConfig
    layer: int
    in_proj: Linear
    gates_proj: Linear
    out_proj: Linear
    weights: DeltaWeights
    decay_proj: Linear | None = None
    z_proj: Linear | None = None

    @classmethod
    def loaded(cls, parts: BodyParts, config: DeltaNetConfig, number: int) -> DeltaNet:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        tensors, eps = parts.tensors, config.norm_eps or parts.norm_eps
        conv = tensors["conv"].view(config.shape.conv_width, config.shape.channels)
        own = conv, tensors["a_log"], tensors["dt_bias"], tensors["norm"]
        weights = DeltaWeights(*own, config.beta_scale, eps, config.gate)
        inside, gates, outside = (parts.linear(name) for name in ("in_proj", "gates_proj", "out_proj"))
        net = cls(config, number, inside, gates, outside, weights)
        if config.rank is None:
            return net
        return replace(net, decay_proj=parts.linear("decay_proj"), z_proj=parts.linear("z_proj"))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that are not read in fp32."""
        return self.in_proj, *(() if self.z_proj is None else (self.z_proj,)), self.out_proj

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return self.gates_proj, *(() if self.decay_proj is None else (self.decay_proj,))

    @property
    def device(self) -> torch.device:
        return self.in_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape = self.config.shape
        # The gates in fp64: sums of fp32 depend in their last digits on how many rows there are.
        b, a = _exact(self.gates_proj, x, batch).tensor_split([shape.value_heads], dim=-1)
        a = a if self.decay_proj is None else _exact(self.decay_proj, a, batch)
        wide = adapted(self.in_proj, x, batch)
        z = wide[:, shape.channels :]
        z = z if self.z_proj is None else adapted(self.z_proj, z, batch)
        if is_native(shape, x):
            mixed = self._native(wide.float(), b, a, z.float(), batch.segments)
            return adapted(self.out_proj, mixed.to(x.dtype), batch)
        z = z.reshape(len(x), shape.value_heads, shape.value_dim)
        raw = torch.cat((wide[:, : shape.channels].float(), b, a), dim=-1)
        parts = (state_rows(each, shape, self.layer, raw[each.begin : each.end]) for each in batch.segments)
        mixed = torch.cat([mix(rows, self.weights) for rows in parts])
        mixed = gated_norm(mixed, z, self.weights).flatten(1).to(x.dtype)
        return adapted(self.out_proj, mixed, batch)

    def _native(self, wide: Tensor, b: Tensor, a: Tensor, z: Tensor, segments: Sequence[Segment]) -> Tensor:
        """All fp32: wide [T, in_features], b [T, value_heads], a [T, decay_features], z [T, value_features] -> [T,
        value_features], by CPU kernels."""
        shape, place = self.config.shape, place_of(segments, self.layer)
        room, mixed = DeltaRoom(shape, tables_of(segments)), torch.empty(len(wide), shape.value_features)
        wide_rows, gates, decays, opened = (Strided(each, each.stride(0)) for each in (wide, b, a, z))
        steps = room.steps(
            best_isa(), self.weights, place, wide_rows, gates=gates, decays=decays, z=opened, mixed=mixed
        )
        Tape(steps).run()
        return mixed


def _exact(linear: Linear, x: Tensor, batch: Batch) -> Tensor:
    """Return fp32 [T, out_features], computed in fp64."""
    y = reference.linear(x.double(), linear.tensors["weight"]).float()
    add_adapters(linear.name, x.float(), y, batch)
    return y
