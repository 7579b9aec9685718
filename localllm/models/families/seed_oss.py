"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "bos_token_id": 0,
    "attention_bias": True,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias, has_output_bias = fields.flag("attention_bias"), fields.flag("attention_out_bias")
    attentions = read_attentions(fields, has_bias=has_bias, has_output_bias=has_output_bias)
    return read_model(fields, dense_layers(attentions, read_mlp(fields, has_bias=fields.flag("mlp_bias"))))
