"""Qwen 3: the norms of queries and keys take the place of Qwen 2's biases."""

from __future__ import annotations

from localllm.layers.config import AttentionConfig
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families import qwen2
from localllm.models.families.reading import late_kinds, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {**qwen2.DEFAULTS, "head_dim": 128}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    mlp = read_mlp(fields)
    return read_model(fields, [LayerConfig(attention, mlp) for attention in normed_attentions(fields)])


def normed_attentions(fields: Fields) -> tuple[AttentionConfig, ...]:
    """Return Qwen 3's attention of each layer: biases where the file has them, and a norm over each head."""
    has_bias = fields.flag("attention_bias")
    return read_attentions(fields, late_kinds(fields), qk_norm="head", has_bias=has_bias, has_output_bias=has_bias)
