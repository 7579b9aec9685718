"""OLMo 2: norms behind each block, and one over all heads of queries and of keys (arXiv:2501.00656)."""

from __future__ import annotations

from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    mlp = read_mlp(fields)
    attentions = read_attentions(fields, qk_norm="full", has_bias=has_bias, has_output_bias=has_bias)
    return read_model(fields, [LayerConfig(attention, mlp, "post") for attention in attentions])
