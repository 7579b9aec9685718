"""LFM2: short convolutions between two gates in place of most attention (arXiv:2511.23404)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.kernels.state_shapes import ConvShape
from localllm.layers.config import Mixer, MLPConfig, ShortConvConfig
from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_CONV_WIDTH,
    MAX_INTERMEDIATE,
    declared_kinds,
    dense_layers,
    hidden_size,
    layer_numbers,
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, SLIDING

CONV = "conv"
DEFAULTS: dict[str, object] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
RENAMES = (
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.embedding_norm.", "model.norm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_tie(with_defaults(fields, DEFAULTS))
    layers = dense_layers(read_mixers(fields, _kinds(fields)), _mlp(fields))
    return read_model(fields, layers, norm_eps=read_eps(fields), stored=StoredForm(RENAMES))


def read_mixers(fields: Fields, kinds: Sequence[str], **traits: Any) -> list[Mixer]:
    """Return each layer's mixer. traits: fields of AttentionConfig. Raises CheckpointError where no layer has keys and
    values."""
    if set(kinds) == {CONV}:
        raise fields.refuse("layer_types", f"at least one layer of {FULL}")
    attentions = read_attentions(
        fields, [kind if kind == SLIDING else FULL for kind in kinds], qk_norm="head", **traits
    )
    shape = ConvShape(hidden_size(fields), fields.integer("conv_L_cache", 2, MAX_CONV_WIDTH))
    conv = ShortConvConfig(shape, fields.flag("conv_bias"))
    return [conv if kind == CONV else attention for kind, attention in zip(kinds, attentions, strict=True)]


def read_eps(fields: Fields) -> float:
    """Return what norms add, by this family's key."""
    return fields.number("norm_eps", 0.0, 1.0)


def with_tie(fields: Fields) -> Fields:
    """Return the fields with the older key for the head, which counts before the usual one, in its place."""
    if "tie_embedding" not in fields.raw:
        return fields
    return replace(fields, raw={**fields.raw, "tie_word_embeddings": fields.flag("tie_embedding")})


def _kinds(fields: Fields) -> Sequence[str]:
    """Return the kind of each layer, by the list of those with attention where the file has no other."""
    if (kinds := declared_kinds(fields, (CONV, FULL))) is not None:
        return kinds
    layers, full = range(num_layers(fields)), layer_numbers(fields, "full_attn_idxs")
    return [FULL if full is None or number in full else CONV for number in layers]


def _mlp(fields: Fields) -> MLPConfig:
    """Return the feed-forward: of its width a file may say what it was before a gate took a third of it."""
    mlp = read_mlp(fields, "block_ff_dim" if "block_ff_dim" in fields.raw else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return mlp
    width, scale = int(2 * mlp.intermediate_size / 3), fields.optional_number("block_ffn_dim_multiplier", 1e-3, 1e3)
    if scale is not None:
        multiple = fields.integer("block_multiple_of", 1, MAX_INTERMEDIATE)
        width = -(-int(scale * width) // multiple) * multiple
    if not width:
        raise fields.refuse("intermediate_size", "a width of which a gate leaves something")
    return replace(mlp, intermediate_size=width)
