"""Hunyuan, dense: norms of queries and keys behind the rotation, whose base is stretched."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families import hunyuan_v1_moe
from localllm.models.families.reading import dense_layers, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {"vocab_size": 290943, "rms_norm_eps": 1e-5}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    attentions = hunyuan_v1_moe.hunyuan_attentions(fields, has_bias=has_bias, has_output_bias=has_bias)
    layers = dense_layers(attentions, read_mlp(fields))
    return read_model(fields, layers, stored=StoredForm(hunyuan_v1_moe.RENAMES))
