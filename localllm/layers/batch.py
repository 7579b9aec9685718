"""The work of one forward: the new tokens of several sequences, and the places of each one's keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from localllm.kernels.sizes import KVShape
from localllm.layers.config import KeyValue
from localllm.layers.native_attention import NativeAttention
from localllm.layers.rotary import Rotary
from localllm.layers.segment import Segment


@dataclass(frozen=True)
class Draw:
    """The parameters by which a token is sampled from a row of logits: the key of the noise, and the least score,
    logarithm of min_p."""

    key: int
    temperature: float
    threshold: float


def moved(x: Tensor, device: torch.device) -> Tensor:
    """x there; towards the host the values are waited for, who would else be read too early. The other way nothing is:
    the driver has taken what is in pageable memory when the call returns."""
    return x.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    logit_rows: Tensor  # [R] int64, ascending, none twice: the rows whose logits are wanted
    rotaries: tuple[Rotary, ...]  # the model's
    # What a stage leaves to later ones: the input of a layer whose second block reads it, embeddings of all layers.
    carried: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    _native: dict[tuple[int, KVShape, bool], NativeAttention] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @cached_property
    def adapted_segments(self) -> tuple[Segment, ...]:
        """The segments that are computed with adapters."""
        return tuple(segment for segment in self.segments if segment.kv.adapters)

    @cached_property
    def chooses(self) -> bool:
        """Whether a token of it chooses the pages that it attends to, in layers without a window."""
        return any(segment.chooses for segment in self.segments)

    @cached_property
    def rotations(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """cos, sin [T, 1, rotary_dim] of each of the RoPEs, for all layers: a kernel of a GPU makes its own."""
        return tuple(rotary(self.positions, self.segments) for rotary in self.rotaries)

    def native_attention(self, config: KeyValue, layer: int) -> NativeAttention:
        """Return the compiled attention; its tables are made once for all layers with such heads."""
        chooses = config.window is None and self.chooses
        key = config.num_heads, config.kv_shape, chooses
        if key not in self._native:
            self._native[key] = NativeAttention(self.segments, config.num_heads, layer, chooses=chooses)
        return self._native[key]

    def on(self, device: torch.device) -> Batch:
        """The same batch with its tensors there; the keys and values stay where they are."""
        if self.token_ids.device == device:
            return self
        return replace(
            self,
            token_ids=moved(self.token_ids, device),
            positions=moved(self.positions, device),
            logit_rows=moved(self.logit_rows, device),
        )
