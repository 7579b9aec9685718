"""StarCoder 2: norms by mean and variance, biases everywhere, an MLP without a gate, a window in every layer."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import (
    dense_layers,
    one_kind,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "use_bias": True,
    "tie_word_embeddings": True,
}
RENAMES = ((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj."))


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("use_bias")
    attentions = read_attentions(fields, one_kind(fields), has_bias=has_bias, has_output_bias=has_bias)
    return read_model(
        fields,
        dense_layers(attentions, read_mlp(fields, has_bias=has_bias, has_gate=False)),
        norm_kind="layer",
        norm_eps=fields.number("norm_epsilon", 0.0, 1.0),
        stored=StoredForm(RENAMES),
    )
