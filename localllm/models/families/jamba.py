"""Jamba: most layers have Mamba, some attention without positions, and some experts (arXiv:2403.19887)."""

from __future__ import annotations

from localllm.layers.config import MAX_EXPERTS, MLPConfig, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.mamba import mamba_split, read_mamba
from localllm.models.families.reading import (
    MAX_LAYERS,
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 65536,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
KEYS = {
    "expand": "mamba_expand",
    "state": "mamba_d_state",
    "rank": "mamba_dt_rank",
    "conv": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
RENAMES = (
    (".feed_forward.router.", ".mlp.gate."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    norm_eps = fields.number("rms_norm_eps", 0.0, 1.0)
    mamba = read_mamba(fields, KEYS, norm_eps=norm_eps, has_norm_weights=True)
    attention = without_positions(read_attentions(fields)[0])
    dense, mixture = read_mlp(fields), _mixture(fields)
    pairs = zip(_every(fields, "attn"), _every(fields, "expert"), strict=True)
    layers = [LayerConfig(attention if attends else mamba, mixture if mixes else dense) for attends, mixes in pairs]
    return read_model(fields, layers, stored=StoredForm(RENAMES, splits=(mamba_split(mamba),)))


def _mixture(fields: Fields) -> MLPConfig | MoEConfig:
    """Return what a layer with experts has: of one expert there is no choice."""
    expert = read_mlp(fields)
    if fields.integer("num_experts", 1, MAX_EXPERTS) == 1:
        return expert
    return MoEConfig(read_router(fields, "softmax"), expert)


def _every(fields: Fields, kind: str) -> list[bool]:
    """Return which layers are of a kind: one of so many, from a first one on."""
    period = fields.integer(f"{kind}_layer_period", 1, MAX_LAYERS)
    offset = fields.integer(f"{kind}_layer_offset", 0, period - 1)
    return [number % period == offset for number in range(num_layers(fields))]
