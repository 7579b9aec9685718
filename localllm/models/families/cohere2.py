"""Command R7B and Command A: both blocks of a layer read one norm, by mean and variance; full layers do not rotate."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import (
    dense_layers,
    pattern_kinds,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias, kinds = fields.flag("attention_bias"), pattern_kinds(fields)
    attentions = read_attentions(fields, kinds, has_bias=has_bias, has_output_bias=has_bias)
    mixers = [without_positions(each) if each.window is None else each for each in attentions]
    return read_model(
        fields,
        dense_layers(mixers, read_mlp(fields), "parallel"),
        norm_kind="layer",
        has_norm_bias=False,
        norm_eps=fields.number("layer_norm_eps", 0.0, 1.0),
        logit_scale=fields.number("logit_scale", 1e-9, 1e9),
        stored=StoredForm(interleaves_heads=True),
    )
