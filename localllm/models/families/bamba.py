"""Bamba: Llama of which most layers have Mamba 2 in place of attention (arXiv:2405.21060)."""

from __future__ import annotations

from localllm.layers.config import Mamba2Config
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAMBA2_DEFAULTS,
    MAX_INTERMEDIATE,
    hidden_size,
    layer_numbers,
    mamba2_split,
    num_layers,
    read_attentions,
    read_mamba2,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
RENAMES = (
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    attention = read_attentions(fields, rotates_partially=True, has_bias=has_bias, has_output_bias=has_bias)[0]
    mamba2, mlp = read_expanded(fields), read_mlp(fields, has_bias=fields.flag("mlp_bias"))
    layers = [LayerConfig(attention if attends else mamba2, mlp) for attends in _attending(fields)]
    return read_model(fields, layers, stored=StoredForm(RENAMES, splits=(mamba2_split(mamba2),)))


def read_expanded(fields: Fields) -> Mamba2Config:
    """Return the Mamba 2 of a family in which its features are a multiple of the hidden state's."""
    expand = fields.number("mamba_expand", 1e-3, MAX_INTERMEDIATE)
    return read_mamba2(fields, features=int(expand * hidden_size(fields)))


def _attending(fields: Fields) -> list[bool]:
    """Return which layers have attention."""
    named = layer_numbers(fields, "attn_layer_indices") or []
    return [layer in named for layer in range(num_layers(fields))]
