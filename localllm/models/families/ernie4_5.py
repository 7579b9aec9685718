"""ERNIE 4.5, dense: Llama with heads whose rotating pairs lie side by side."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("use_bias")
    attentions = read_attentions(fields, has_bias=has_bias, has_output_bias=has_bias)
    layers = dense_layers(attentions, read_mlp(fields, has_bias=has_bias))
    return read_model(fields, layers, stored=StoredForm(interleaves_heads=True))
