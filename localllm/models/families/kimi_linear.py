"""Kimi Linear: Kimi Delta Attention, every fourth layer latent attention without positions (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.kernels.state_shapes import DeltaShape
from localllm.layers.config import DeltaNetConfig, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.latent import read_latent_attention, require_usual
from localllm.models.families.reading import (
    MAX_CONV_WIDTH,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    declared_kinds,
    grouped_router,
    num_layers,
    read_mlp,
    read_model,
    read_shared,
    sparse_flags,
    with_defaults,
)
from localllm.models.fields import Fields, is_integer
from localllm.models.rope_fields import FULL, LINEAR

DEFAULTS: dict[str, object] = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
# What DeepSeek's files call otherwise.
_KEYS = {
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
RENAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".shared_experts.", ".shared_expert."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
    (".forget_gate.", "."),  # of adapters, which are made for transformers' modules
)


def parse(fields: Fields) -> ModelConfig:
    fields, linear = with_defaults(fields, DEFAULTS), fields.section("linear_attn_config")
    fields = replace(fields, raw={**fields.raw, **_renamed(fields, _KEYS), **_renamed(linear, _LINEAR_KEYS)})
    require_usual(fields, moe_router_activation_func="sigmoid", moe_layer_freq=1, mla_use_nope=True)
    delta, attention = _delta_attention(fields), read_latent_attention(fields, rotates=False)
    dense, moe = read_mlp(fields), _moe(fields)
    kinds = zip(_kinds(fields, linear), sparse_flags(fields), strict=True)
    layers = [
        LayerConfig(attention if kind == FULL else delta, moe if is_sparse else dense) for kind, is_sparse in kinds
    ]
    return read_model(fields, layers, stored=StoredForm(RENAMES))


def _renamed(fields: Fields | None, names: dict[str, str]) -> dict[str, object]:
    return {} if fields is None else {names[key]: value for key, value in fields.raw.items() if key in names}


def _delta_attention(fields: Fields) -> DeltaNetConfig:
    heads = fields.integer("linear_num_heads", 1, MAX_HEADS)
    head_dim = fields.integer("linear_head_dim", 1, MAX_HEAD_DIM)
    conv_width = fields.integer("linear_conv_kernel_dim", 2, MAX_CONV_WIDTH)
    shape = DeltaShape(heads, heads, head_dim, head_dim, conv_width, decays="key")
    return DeltaNetConfig(shape, gate="sigmoid", rank=head_dim)


def _moe(fields: Fields) -> MoEConfig:
    expert = read_mlp(fields, "moe_intermediate_size")
    return MoEConfig(grouped_router(fields), expert, read_shared(fields, "n_shared_experts"))


def _kinds(fields: Fields, linear: Fields | None) -> Sequence[str]:
    """Return the kind of each layer. A section of the linear ones may list the others by numbers that begin at one."""
    layers, kinds = range(num_layers(fields)), declared_kinds(fields, (LINEAR, FULL))
    listed = None if linear is None else linear.items("full_attn_layers", most=MAX_LAYERS)
    if kinds is None and linear is not None and listed is not None:
        if not all(is_integer(number) and number - 1 in layers for number in listed):
            raise linear.refuse("full_attn_layers", f"numbers of layers from 1 to num_hidden_layers = {len(layers)}")
        kinds = tuple(FULL if number + 1 in listed else LINEAR for number in layers)
    kinds = kinds or tuple(FULL if number and number % 4 == 0 else LINEAR for number in layers)
    if FULL not in kinds:
        raise fields.refuse("layer_types", f"at least one layer of {FULL}")
    return kinds
