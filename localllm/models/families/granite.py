"""Granite 3, dense: Llama with four multipliers."""

from __future__ import annotations

from typing import Any

from localllm.layers.config import MLPConfig, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    return granite(fields, read_mlp(fields, has_bias=fields.flag("mlp_bias")))


def granite(fields: Fields, feed_forward: MLPConfig | MoEConfig, **traits: Any) -> ModelConfig:
    """Return a model of what Granite's dense models and mixtures share. traits: fields of ModelConfig."""
    has_bias, scale = fields.flag("attention_bias"), fields.number("attention_multiplier", 1e-9, 1e9)
    attentions = read_attentions(fields, scale=scale, has_bias=has_bias, has_output_bias=has_bias)
    return read_model(
        fields,
        [LayerConfig(attention, feed_forward) for attention in attentions],
        embedding_scale=fields.number("embedding_multiplier", 1e-9, 1e9),
        residual_scale=fields.number("residual_multiplier", 1e-9, 1e9),
        logit_scale=1.0 / fields.number("logits_scaling", 1e-9, 1e9),
        **traits,
    )
