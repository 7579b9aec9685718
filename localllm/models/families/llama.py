"""Llama 1 to 3, and what is built alike: TinyLlama, CodeLlama, SmolLM2, Vicuna."""

from __future__ import annotations

from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields)
    has_bias = fields.flag("attention_bias")
    attentions = read_attentions(fields, has_bias=has_bias, has_output_bias=has_bias)
    mlp = read_mlp(fields, has_bias=fields.flag("mlp_bias"))
    return read_model(fields, [LayerConfig(attention, mlp) for attention in attentions])
