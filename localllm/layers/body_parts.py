"""What a block's tensors make, as layers take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from localllm.layers.config import RopeConfig
from localllm.layers.linear import Linear


class BodyParts(Protocol):
    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The block's tensors by their names in it."""

    @property
    def norm_eps(self) -> float:
        """Of the model's norms."""

    def linear(self, name: str) -> Linear:
        """Return a matrix by its name in the block."""

    def rotation(self, rope: RopeConfig, rotary_dim: int) -> int:
        """Return the number of a rotation among the model's."""
