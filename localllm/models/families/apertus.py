"""Apertus: norms of queries and keys, and an MLP without a gate, whose activation learns its slopes (xIELU)."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "hidden_act": "xielu",
    "rope_theta": 1.2e7,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1.2e7,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
RENAMES = (
    (".attention_layernorm.", ".input_layernorm."),
    (".feedforward_layernorm.", ".post_attention_layernorm."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    attentions = read_attentions(fields, qk_norm="head", has_bias=has_bias, has_output_bias=has_bias)
    return read_model(fields, dense_layers(attentions, read_mlp(fields, has_gate=False)), stored=StoredForm(RENAMES))
