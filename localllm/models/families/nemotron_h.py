"""Nemotron-H and Nemotron 3: each layer is one of Mamba 2, attention without positions, an MLP and a mixture of experts
(arXiv:2504.03624)."""

from __future__ import annotations

from dataclasses import replace

from localllm.errors import show
from localllm.layers.config import MLPConfig, MoEConfig
from localllm.models.architecture import Body, LayerConfig, ModelConfig, StoredForm
from localllm.models.families import mamba2
from localllm.models.families.reading import (
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    grouped_router,
    mamba2_split,
    read_activation,
    read_attentions,
    read_mamba2,
    read_model,
    unsupported,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, LINEAR

DEFAULTS: dict[str, object] = {
    "vocab_size": 131072,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "layers_block_type": [LINEAR, "moe", FULL, "mlp"],
}
KEYS = {
    **mamba2.KEYS,
    "activation": "mamba_hidden_act",
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state": "ssm_state_size",
}
_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_KINDS = {kind: kind for kind in _LETTERS.values()} | {
    "mamba": LINEAR,
    "attention": FULL,
}  # the last two in older files
_MIXERS = {LINEAR: "mamba", FULL: "self_attn", "mlp": "mlp", "moe": "mlp"}  # what we call a layer's mixer


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    kinds = _kinds(fields)
    fields = replace(fields, raw={**fields.raw, "num_hidden_layers": len(kinds)})
    if fields.get("moe_latent_size") is not None:
        raise unsupported(fields.source, "experts of a latent size (moe_latent_size)", "experts of the hidden size")
    state_space = read_mamba2(fields, KEYS)
    dense = MLPConfig(
        fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        read_activation(fields, "mlp_hidden_act"),
        has_bias=fields.flag("mlp_bias"),
        has_gate=False,
    )
    bodies: dict[str, Body] = {LINEAR: state_space, FULL: without_positions(read_attentions(fields)[0]), "mlp": dense}
    if "moe" in kinds:
        bodies["moe"] = _mixture(fields, dense)
    return read_model(
        fields,
        [_layer(bodies[kind]) for kind in kinds],
        norm_eps=fields.number("layer_norm_epsilon", 0.0, 1.0),
        stored=StoredForm(_renames(kinds), splits=(mamba2_split(state_space),)),
    )


def _layer(body: Body) -> LayerConfig:
    return LayerConfig(None, body) if isinstance(body, MLPConfig | MoEConfig) else LayerConfig(body, None)


def _mixture(fields: Fields, dense: MLPConfig) -> MoEConfig:
    width = fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE)
    shared = fields.integer("moe_shared_expert_intermediate_size", 1, MAX_INTERMEDIATE)
    expert = replace(dense, intermediate_size=width, has_bias=False)
    return MoEConfig(grouped_router(fields), expert, replace(dense, intermediate_size=shared))


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer, which older files have as a letter."""
    pattern = fields.optional_text("hybrid_override_pattern")
    if pattern is not None and "layers_block_type" not in fields.raw:
        found: list[object] = [_LETTERS.get(letter, letter) for letter in pattern[: MAX_LAYERS + 1]]
    else:
        found = fields.items("layers_block_type", most=MAX_LAYERS) or []
    if not 1 <= len(found) <= MAX_LAYERS:
        raise fields.refuse("layers_block_type", f"a list of 1 to {MAX_LAYERS} kinds of layers")
    for kind in found:
        if kind not in _KINDS:
            raise unsupported(fields.source, f"a layer of the type {show(kind)}", ", ".join(_KINDS))
    return [_KINDS[str(kind)] for kind in found]


def _renames(kinds: list[str]) -> tuple[tuple[str, str], ...]:
    names = [pair for pair in mamba2.RENAMES if pair[0] != ".mixer."]
    for layer, kind in enumerate(kinds):
        norm = "input_layernorm" if kind in (LINEAR, FULL) else "post_attention_layernorm"
        names.append((f"model.layers.{layer}.norm.", f"model.layers.{layer}.{norm}."))
        names.append((f"model.layers.{layer}.mixer.", f"model.layers.{layer}.{_MIXERS[kind]}."))
    return (*names, (".shared_experts.", ".shared_expert."))
