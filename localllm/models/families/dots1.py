"""dots.llm1 (arXiv:2506.05767): DeepSeek's router and shared experts over attention with a norm for each head."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families import glm4_moe
from localllm.models.families.reading import (
    declared_kinds,
    grouped_layers,
    num_layers,
    read_attentions,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, MAX_POSITIONS, SLIDING

DEFAULTS: dict[str, object] = {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    attentions = read_attentions(fields, _kinds(fields), qk_norm="head", has_bias=has_bias, has_output_bias=has_bias)
    return read_model(fields, grouped_layers(fields, attentions), stored=StoredForm(glm4_moe.RENAMES))


def _kinds(fields: Fields) -> tuple[str, ...]:
    first = fields.optional_integer("max_window_layers", 0, MAX_POSITIONS)
    first = num_layers(fields) if first is None or fields.get("sliding_window") is None else first
    return declared_kinds(fields) or tuple(SLIDING if i >= first else FULL for i in range(num_layers(fields)))
