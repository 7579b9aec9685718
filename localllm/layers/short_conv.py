"""The body of a short convolution: project, convolve between two gates, project back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_short_conv import ConvRoom
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.short_conv import ConvWeights, convolve
from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import ShortConvConfig
from localllm.layers.linear import Linear
from localllm.layers.native_states import is_native, place_of, tables_of
from localllm.layers.segment import Segment
from localllm.layers.state_rows import state_rows


@dataclass(eq=False)
class ShortConv:
    """layer: its number among those with states. in_proj: the gate in front, the one behind, what they are gates of."""

    config: ShortConvConfig
    layer: int
    in_proj: Linear
    out_proj: Linear
    weights: ConvWeights

    @classmethod
    def loaded(cls, parts: BodyParts, config: ShortConvConfig, number: int) -> ShortConv:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        tensors, shape = parts.tensors, config.shape
        weights = ConvWeights(tensors["conv"].view(shape.conv_width, shape.channels), tensors.get("conv_bias"))
        return cls(config, number, parts.linear("in_proj"), parts.linear("out_proj"), weights)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that are not read in fp32."""
        return self.in_proj, self.out_proj

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def device(self) -> torch.device:
        return self.in_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape, wide = self.config.shape, adapted(self.in_proj, x, batch).float()
        if is_native(shape, x):
            return adapted(self.out_proj, self._native(wide.contiguous(), batch.segments).to(x.dtype), batch)
        front, behind, value = wide.chunk(3, dim=-1)
        raw = front * value
        parts = (state_rows(each, shape, self.layer, raw[each.begin : each.end]) for each in batch.segments)
        mixed = behind * torch.cat([convolve(rows, self.weights) for rows in parts])
        return adapted(self.out_proj, mixed.to(x.dtype), batch)

    def _native(self, wide: Tensor, segments: Sequence[Segment]) -> Tensor:
        """wide fp32 [T, in_features] -> fp32 [T, channels], by the CPU's kernel, which writes to both."""
        shape, place = self.config.shape, place_of(segments, self.layer)
        room, mixed = ConvRoom(shape, tables_of(segments)), torch.empty(len(wide), shape.channels)
        Tape(room.steps(best_isa(), self.weights, place, wide=wide, stride=wide.shape[1], mixed=mixed)).run()
        return mixed
