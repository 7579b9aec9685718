"""How many numbers a model has."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts


def num_parameters(config: ModelConfig) -> int:
    """Numbers that a checkpoint of the model stores; what both blocks of a layer read is stored once."""
    counts: dict[str, int] = {}
    for block in block_layouts(config):
        for matrix in block.matrices:
            counts[matrix.stored] = matrix.num_weights + matrix.out_features * matrix.has_bias
        for matrix in () if block.experts is None else block.experts.matrices(0):
            one = matrix.num_weights + matrix.out_features * matrix.has_bias
            counts[matrix.stored] = block.experts.num_experts * one  # type: ignore[union-attr]
        counts |= {vector.stored: vector.features for vector in block.vectors}
    return sum(counts.values())
