"""The body of Mamba 2: project, take in and read out each sequence's states, project back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_mamba2 import Mamba2Room
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.mamba2_rule import Mamba2Weights, gated_norm, mix
from localllm.layers.adapted import adapted, add_adapters
from localllm.layers.batch import Batch
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import Mamba2Config
from localllm.layers.linear import Linear
from localllm.layers.native_states import is_native, place_of, tables_of
from localllm.layers.segment import Segment
from localllm.layers.state_rows import state_rows


@dataclass(eq=False)
class Mamba2:
    """layer: its number among those with states. in_proj: gates of what comes out, and what the convolution sees.
    steps_proj: in fp32, the length of each head's step."""

    config: Mamba2Config
    layer: int
    in_proj: Linear
    steps_proj: Linear
    out_proj: Linear
    weights: Mamba2Weights

    @classmethod
    def loaded(cls, parts: BodyParts, config: Mamba2Config, number: int) -> Mamba2:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        tensors, shape = parts.tensors, config.shape
        bias = tensors.get("conv_bias")
        weights = Mamba2Weights(
            conv=tensors["conv"].view(shape.conv_width, shape.channels),
            conv_bias=tensors["conv"].new_zeros(shape.channels) if bias is None else bias,
            a_log=tensors["a_log"],
            dt_bias=tensors["dt_bias"],
            d=tensors["d"],
            norm=tensors.get("norm"),
            least_step=config.least_step,
            most_step=math.inf if config.most_step is None else config.most_step,
            norm_is_gated=config.norm == "gated",
            eps=parts.norm_eps,
        )
        inside, steps, outside = (parts.linear(name) for name in ("in_proj", "steps_proj", "out_proj"))
        return cls(config, number, inside, steps, outside, weights)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that are not read in fp32."""
        return self.in_proj, self.out_proj

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return (self.steps_proj,)

    @property
    def device(self) -> torch.device:
        return self.in_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape = self.config.shape
        # Steps in fp64: sums of fp32 depend in their last digits on how many rows there are.
        steps = reference.linear(x.double(), self.steps_proj.tensors["weight"], self.steps_proj.bias).float()
        add_adapters(self.steps_proj.name, x.float(), steps, batch)
        wide = adapted(self.in_proj, x, batch)
        if is_native(shape, x):
            mixed = self._native(wide.float().contiguous(), steps, batch.segments)
            return adapted(self.out_proj, mixed.to(x.dtype), batch)
        raw = torch.cat((wide[:, shape.features :].float(), steps), dim=-1)
        parts = (state_rows(each, shape, self.layer, raw[each.begin : each.end]) for each in batch.segments)
        mixed = torch.cat([mix(rows, self.weights) for rows in parts])
        mixed = gated_norm(mixed.flatten(1), wide[:, : shape.features], self.weights, shape.num_groups)
        return adapted(self.out_proj, mixed.to(x.dtype), batch)

    def _native(self, wide: Tensor, steps: Tensor, segments: Sequence[Segment]) -> Tensor:
        """wide fp32 [T, in_features], steps fp32 [T, num_heads] -> fp32 [T, features], by CPU kernels."""
        shape, place = self.config.shape, place_of(segments, self.layer)
        room, mixed = Mamba2Room(shape, tables_of(segments)), torch.empty(len(wide), shape.features)
        places = {"wide": wide, "steps": steps, "mixed": mixed, "num_rows": torch.tensor([len(wide)])}
        Tape(room.steps(best_isa(), self.weights, place, stride=wide.shape[1], **places)).run()
        return mixed
