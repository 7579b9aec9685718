"""Mixers beside each other in one block: all read the same norm, and what they make is added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.layers.attention import Attention
from localllm.layers.batch import Batch
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Linear
from localllm.layers.recurrent import Recurrent

SingleMixer = Attention | LatentAttention | Recurrent


@dataclass(eq=False)
class Beside:
    """mixers: two or more."""

    mixers: tuple[SingleMixer, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices of all, one mixer's after the other's."""
        return tuple(linear for mixer in self.mixers for linear in mixer.linears)

    @property
    def device(self) -> torch.device:
        return self.mixers[0].device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        first, *others = (mixer(x, batch) for mixer in self.mixers)
        for y in others:
            first = first + y
        return first


def mixers_of(body: object) -> tuple[SingleMixer, ...]:
    """Return the mixers that a block's body consists of; none where it is a feed-forward."""
    if isinstance(body, Beside):
        return body.mixers
    return (body,) if isinstance(body, SingleMixer) else ()
