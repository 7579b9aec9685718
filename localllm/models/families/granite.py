"""Granite 3, dense: Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.layers.config import AttentionConfig
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import num_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    mlp = read_mlp(fields, has_bias=fields.flag("mlp_bias"))
    return granite(fields, [LayerConfig(read_attention(fields), mlp)] * num_layers(fields))


def read_attention(fields: Fields) -> AttentionConfig:
    """Return the attention of every layer that has it."""
    has_bias, scale = fields.flag("attention_bias"), fields.number("attention_multiplier", 1e-9, 1e9)
    return read_attentions(fields, scale=scale, has_bias=has_bias, has_output_bias=has_bias)[0]


def granite(fields: Fields, layers: Sequence[LayerConfig], **traits: Any) -> ModelConfig:
    """Return a model with the multipliers of all of Granite's. traits: fields of ModelConfig."""
    return read_model(
        fields,
        layers,
        embedding_scale=fields.number("embedding_multiplier", 1e-9, 1e9),
        residual_scale=fields.number("residual_multiplier", 1e-9, 1e9),
        logit_scale=1.0 / fields.number("logits_scaling", 1e-9, 1e9),
        **traits,
    )
