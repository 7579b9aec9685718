"""Mistral: Llama with a window in every layer, where the file has one."""

from __future__ import annotations

from localllm.layers.config import QueryGrowth
from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import (
    dense_layers,
    one_kind,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, MAX_POSITIONS, rope_sections

DEFAULTS: dict[str, object] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    attentions = read_attentions(fields, one_kind(fields), growth=_growth(fields))
    return read_model(fields, dense_layers(attentions, read_mlp(fields)))


def _growth(fields: Fields) -> QueryGrowth | None:
    """Return how the queries of Ministral 3 grow, which stands among the keys of its RoPE."""
    section = rope_sections(fields)[FULL]
    beta = section.optional_number("llama_4_scaling_beta", 0.0, 1e6)
    if not beta:
        return None
    return QueryGrowth(beta, section.integer("original_max_position_embeddings", 1, MAX_POSITIONS))
