"""A decoder of a real shape with random weights: speed does not depend on their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.load import load_decoder


class RandomWeights:
    """Every tensor that is asked for, filled with small random numbers."""

    def read(self, _name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype).normal_(std=0.02)

    def read_fused(self, fused: str, parts: Mapping[str, int], features: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.read(fused, (sum(parts.values()), *features), dtype)

    def unused(self) -> tuple[str, ...]:
        return ()


def random_decoder(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    return load_decoder(RandomWeights(), config, dtype=dtype, device=torch.device("cpu"))
