"""A decoder of a real shape with random weights: speed does not depend on their values."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.layout import BlockLayout
from localllm.models.load import load_decoder
from localllm.quant.dense import Dense
from localllm.quant.recipe import Recipe


class RandomBlocks:
    """Every tensor of a recipe, filled with small random numbers."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        specs = layout.specs(self.recipe)
        return {name: torch.empty(spec.shape, dtype=spec.dtype).normal_(std=0.02) for name, spec in specs.items()}

    def finish(self) -> None:
        """Nothing is left over."""


def random_decoder(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    recipe = Recipe(Dense(dtype).name, Dense(dtype), Dense(dtype))
    return load_decoder(RandomBlocks(recipe), config, recipe, dtype=dtype, device=torch.device("cpu"))
