"""LFM3: LFM2's convolutions over more tokens, a window and gates of attention's heads, norms around blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families import lfm2
from localllm.models.families.lfm2 import CONV
from localllm.models.families.reading import (
    declared_kinds,
    dense_layers,
    num_layers,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, SLIDING

DEFAULTS: dict[str, object] = {
    **lfm2.DEFAULTS,
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "bos_token_id": 124894,
    "eos_token_id": 124900,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}
# Norms behind blocks take the names that those in front of the feed-forward have elsewhere.
_SANDWICH = (
    (".post_operator_norm.", ".post_attention_layernorm."),
    (".ffn_norm.", ".pre_feedforward_layernorm."),
    (".post_ffn_norm.", ".post_feedforward_layernorm."),
)
_RENAMES = ((".self_attn.g_proj.", ".self_attn.gate_proj."),)


def parse(fields: Fields) -> ModelConfig:
    fields = lfm2.with_tie(with_defaults(fields, DEFAULTS))
    if "rms_norm_eps" in fields.raw:
        fields = replace(fields, raw={**fields.raw, "norm_eps": fields.raw["rms_norm_eps"]})
    has_bias, gates_heads = fields.flag("attention_bias"), fields.flag("use_attention_gate")
    traits = {"has_bias": has_bias, "has_output_bias": has_bias, "gates_heads": gates_heads}
    mixers, is_sandwich = lfm2.read_mixers(fields, _kinds(fields), **traits), fields.flag("use_sandwich_norm")
    layers = dense_layers(mixers, read_mlp(fields), "sandwich" if is_sandwich else "pre")
    renames = (*_RENAMES, *(_SANDWICH if is_sandwich else ()), *lfm2.RENAMES)
    stored = StoredForm(renames, apart_gates=gates_heads)
    return read_model(fields, layers, norm_eps=lfm2.read_eps(fields), stored=stored)


def _kinds(fields: Fields) -> Sequence[str]:
    """Return the kind of each layer: of every four, convolutions but for one with all keys, and one with a window."""
    usual = [FULL if n % 4 == 2 else SLIDING if n % 4 == 0 and n else CONV for n in range(num_layers(fields))]
    return declared_kinds(fields, (CONV, FULL, SLIDING)) or usual
