"""Where the tensors of a block come from: a checkpoint, a packed model, or nothing but random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.models.checkpoint import Checkpoint
from localllm.models.config import ModelConfig
from localllm.models.layout import BlockLayout, Matrix
from localllm.quant.recipe import Recipe


class BlockSource(Protocol):
    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        """The block's tensors by the names, shapes and dtypes of `layout.specs(recipe)`, on the CPU.

        Raises CheckpointError naming what is missing, misshapen or damaged.
        """
        ...

    def finish(self) -> None:
        """Called after the last block. Raises CheckpointError where the model holds what nobody asked for."""
        ...


class CheckpointBlocks:
    """A checkpoint read block by block and brought into a recipe's formats; unquantized weights are read in place."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.recipe = recipe

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for matrix in layout.matrices:
            packed = matrix.format(self.recipe).quantize(self._weight(matrix))
            tensors |= {f"{matrix.name}.{name}": tensor for name, tensor in packed.items()}
            if matrix.has_bias:
                rows = _named(matrix.parts, "bias")
                bias = self.checkpoint.read_fused(f"{matrix.stored}.bias", rows, (), torch.float32)
                tensors[f"{matrix.name}.linear_bias"] = bias
        for norm in layout.norms:
            weight = self.checkpoint.read(f"{norm.stored}.weight", (norm.features,), torch.float32)
            tensors[norm.name] = weight + self.config.norm_weight_offset
        return tensors

    def finish(self) -> None:
        unused = self.checkpoint.unused()
        if unused:
            raise CheckpointError(
                f"the checkpoint holds tensors that a {self.config.model_type} model has no use for",
                why=f"{len(unused)} of them, the first: {unused[0]}; config.json and weights do not belong together",
                fix="download the model anew: localllm pull MODEL",
            )

    def _weight(self, matrix: Matrix) -> Tensor:
        """[N, K] in the format's own dtype where it has one `weight`, else fp32 for the format to quantize."""
        specs = matrix.format(self.recipe).specs(matrix.out_features, matrix.in_features)
        dtype = specs["weight"].dtype if "weight" in specs else torch.float32
        rows = _named(matrix.parts, "weight")
        return self.checkpoint.read_fused(f"{matrix.stored}.weight", rows, (matrix.in_features,), dtype)


def _named(parts: Mapping[str, int], kind: str) -> dict[str, int]:
    return {f"{name}.{kind}": rows for name, rows in parts.items()}
