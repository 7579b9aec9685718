"""The text model of Muse Glimmer: gated attention under unweighted norms; every fourth layer sees all and does not
rotate."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_LAYERS,
    declared_kinds,
    dense_layers,
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    unsupported,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, SLIDING

DEFAULTS: dict[str, object] = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    # Counted from the last layer.
    usual = [FULL if (num_layers(fields) - 1 - layer) % 4 == 0 else SLIDING for layer in range(num_layers(fields))]
    if fields.flag("attention_bias"):
        raise unsupported(fields.source, "attention_bias beside an output gate", "no biases in this family")
    kinds, factor = declared_kinds(fields) or usual, fields.number("qk_scale_factor", 1e-6, 1e6)
    alike = read_attentions(fields, kinds, qk_norm="head", has_norm_weights=False, has_output_gate=True)
    attentions = [replace(each, scale=factor * each.scale) for each in alike]
    thetas = fields.items("layer_rope_theta", most=MAX_LAYERS) or [kind == SLIDING for kind in usual]
    if len(thetas) != len(attentions):
        raise fields.refuse("layer_rope_theta", f"a list of num_hidden_layers = {len(attentions)} entries")
    mixers = [each if theta else without_positions(each) for each, theta in zip(attentions, thetas, strict=True)]
    return read_model(
        fields,
        dense_layers(mixers, read_mlp(fields), "sandwich"),
        norm_out_eps=fields.number("post_norm_eps", 0.0, 1.0),
        norm_weight_offset=1.0,
        final_norm_offset=0.0,
        normalizes_embeddings=True,
        logit_scale=fields.number("output_multiplier", 1e-9, 1e9),
        final_softcap=fields.optional_number("final_logit_softcapping", 1e-6, 1e9),
        stored=StoredForm(apart_gates=True),
    )
