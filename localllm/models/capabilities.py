"""What can be done with a model of a shape in a recipe, as far as is known before it is loaded. Needs no torch."""

from __future__ import annotations

from localllm.kernels.cpu_matmul import is_available
from localllm.kernels.sizes import INT8_GROUP, TASK_WORDS, TOKEN_WORDS
from localllm.models.config import ModelConfig
from localllm.quant.layouts import Int4Layout, Int8Layout, Sizes, can_be_cut, cut_step

_HALF_VECTOR = 32  # of head and rotary dimensions: pairs of bf16 fill whole registers


def runs_natively(config: ModelConfig, recipe: Sizes, dtype: str) -> bool:
    """Return whether a CPU computes such a decoder by native steps. dtype: of activations."""
    return isinstance(recipe.blocks, Int4Layout | Int8Layout) and fills_vectors(config, dtype)


def fills_vectors(config: ModelConfig, dtype: str) -> bool:
    is_whole = config.head_dim % _HALF_VECTOR == 0 == config.rotary_dim % _HALF_VECTOR
    return dtype == "bf16" and is_whole and is_available()


def native_row_bytes(config: ModelConfig, recipe: Sizes) -> int:
    """Bytes of the buffers of native steps for one more row."""
    H, D, KH = config.num_heads, config.head_dim, config.num_kv_heads
    widest_in = max(config.hidden_size, config.intermediate_size, H * D)
    widest_out = max(2 * config.intermediate_size, (H + 2 * KH) * D, config.hidden_size)
    group = recipe.blocks.group if isinstance(recipe.blocks, Int4Layout) else INT8_GROUP
    floats = 2 * config.hidden_size + widest_out + H * D + 3 * (widest_in // group)
    floats += 2 * config.rotary_dim * len(set(config.ropes))
    words = len(TOKEN_WORDS) + H * len(TASK_WORDS) + 1
    return 4 * floats + 8 * words + widest_in


def can_be_split(config: ModelConfig, recipe: Sizes) -> bool:
    """Return whether two devices can share an MLP block."""
    steps = config.intermediate_size / cut_step(recipe.blocks)
    return can_be_cut(recipe.blocks) and steps.is_integer() and steps > 1
