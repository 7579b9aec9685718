"""Nemotron 3 and 4, and Minitron: norms by mean and variance, an MLP without a gate, half of each head rotates."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "partial_rotary_factor": 0.5,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    attentions = read_attentions(fields, rotates_partially=True, has_bias=has_bias, has_output_bias=has_bias)
    mlp = read_mlp(fields, has_bias=fields.flag("mlp_bias"), has_gate=False)
    return read_model(
        fields,
        dense_layers(attentions, mlp),
        norm_kind="layer",
        norm_eps=fields.number("norm_eps", 0.0, 1.0),
        norm_weight_offset=1.0,
    )
