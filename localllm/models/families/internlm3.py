"""InternLM 3: Llama with a RoPE that stretches as a text grows."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    # The makers' names, and transformers'.
    of_heads = fields.flag("qkv_bias") or fields.flag("attention_bias")
    has_bias = fields.flag("bias") or fields.flag("mlp_bias")
    attentions = read_attentions(fields, has_bias=of_heads, has_output_bias=has_bias)
    return read_model(fields, dense_layers(attentions, read_mlp(fields, has_bias=has_bias)))
