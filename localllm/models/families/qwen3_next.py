"""Qwen 3 Next: three layers of Gated DeltaNet for each of gated attention, experts everywhere (arXiv:2412.06464)."""

from __future__ import annotations

from localllm.layers.config import AttentionConfig, Mixer, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import qwen2
from localllm.models.families.reading import (
    MAX_INTERMEDIATE,
    every_so_many_full,
    hybrid_mixers,
    read_attentions,
    read_delta_net,
    read_mlp,
    read_model,
    read_router,
    sparse_layers,
    with_defaults,
    with_draft_head,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    moe = read_moe(fields, normalizes=fields.flag("norm_topk_prob"))
    layers = sparse_layers(fields, read_mixers(fields), moe)
    model = read_model(fields, layers, norm_weight_offset=1.0, stored=StoredForm(delta_rows="by_head"))
    return with_draft_head(model, LayerConfig(read_attention(fields), moe))


def read_mixers(fields: Fields) -> list[Mixer]:
    """Return each layer's mixer."""
    return hybrid_mixers(fields, read_attention(fields), read_delta_net(fields), every_so_many_full(fields))


def read_attention(fields: Fields) -> AttentionConfig:
    """Return the attention of full layers, with a gate behind it."""
    has_bias = fields.flag("attention_bias")
    return read_attentions(
        fields,
        rotates_partially=True,
        qk_norm="head",
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_output_gate=True,
    )[0]


def read_moe(fields: Fields, *, normalizes: bool) -> MoEConfig:
    """Return the mixture of every layer; a shared expert of no width is none."""
    router = read_router(fields, "softmax", normalizes=normalizes)
    expert = read_mlp(fields, "moe_intermediate_size")
    width = "shared_expert_intermediate_size"
    if not fields.integer(width, 0, MAX_INTERMEDIATE):
        return MoEConfig(router, expert)
    return MoEConfig(router, expert, read_mlp(fields, width), gates_shared=True)
