"""An MLP block cut in two by its intermediate features, so that two devices can compute it side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from localllm.models.config import ModelConfig
from localllm.models.layout import BlockLayout, Matrix, block_layouts
from localllm.models.load import BlockTensors
from localllm.quant import part
from localllm.quant.layouts import cut_step
from localllm.quant.recipe import Recipe


def split_features(config: ModelConfig, recipe: Recipe, share: float) -> int:
    """Return how many features come nearest to this share of a block without being more; at least some of them."""
    step = cut_step(recipe.blocks)
    steps = int(share * config.intermediate_size / step)
    return min(max(steps, 1) * step, config.intermediate_size - step)


@dataclasses.dataclass(frozen=True)
class MlpCut:
    """views: the whole block's tensors."""

    layout: BlockLayout
    views: Mapping[str, Tensor]
    config: ModelConfig
    recipe: Recipe

    def at(self, features: int, device: torch.device) -> BlockTensors:
        """The first features on `device`, with the output's bias, the others on the host, each in memory of its own."""
        rest = self._part(features, self.config.intermediate_size, torch.device("cpu"))
        return dataclasses.replace(self._part(0, features, device), beside=rest)

    def _part(self, begin: int, end: int, device: torch.device) -> BlockTensors:
        gate_up, down = self.layout.matrices
        whole, blocks = self.config.intermediate_size, self.recipe.blocks
        gates = [(begin, end), (whole + begin, whole + end)]
        packed = part.rows(blocks, self._packed(gate_up), gate_up.in_features, gates)
        tensors = {f"{gate_up.name}.{name}": tensor for name, tensor in packed.items()}
        packed = part.columns(blocks, self._packed(down), down.out_features, begin, end)
        tensors |= {f"{down.name}.{name}": tensor for name, tensor in packed.items()}
        if gate_up.has_bias:
            bias = self.views[f"{gate_up.name}.linear_bias"]
            tensors[f"{gate_up.name}.linear_bias"] = torch.cat([bias[first:last] for first, last in gates])
        if down.has_bias:
            bias = self.views[f"{down.name}.linear_bias"]
            tensors[f"{down.name}.linear_bias"] = torch.zeros_like(bias) if begin else bias
        tensors |= {norm.name: self.views[norm.name] for norm in self.layout.norms}
        narrow = block_layouts(dataclasses.replace(self.config, intermediate_size=end - begin))
        layout = next(layout for layout in narrow if layout.name == self.layout.name)
        return BlockTensors(layout, {name: tensor.to(device) for name, tensor in tensors.items()})

    def _packed(self, matrix: Matrix) -> dict[str, Tensor]:
        names = matrix.format(self.recipe).specs(matrix.out_features, matrix.in_features)
        return {name: self.views[f"{matrix.name}.{name}"] for name in names}
