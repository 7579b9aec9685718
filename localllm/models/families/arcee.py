"""AFM: Llama with an MLP without a gate."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias, mlp = fields.flag("attention_bias"), read_mlp(fields, has_bias=fields.flag("mlp_bias"), has_gate=False)
    return read_model(fields, dense_layers(read_attentions(fields, has_bias=has_bias, has_output_bias=has_bias), mlp))
