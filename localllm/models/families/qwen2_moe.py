"""Qwen 1.5 and 2 with experts: Qwen 2's attention; beside the experts a shared one with a gate of its own."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import ModelConfig
from localllm.models.families import qwen2
from localllm.models.families.reading import (
    declared_kinds,
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    sparse_layers,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, MAX_POSITIONS, SLIDING

DEFAULTS: dict[str, object] = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    moe = MoEConfig(
        read_router(fields, "softmax", normalizes=fields.flag("norm_topk_prob")),
        expert=read_mlp(fields, "moe_intermediate_size"),
        shared=read_mlp(fields, "shared_expert_intermediate_size"),
        gates_shared=True,
    )
    attentions = read_attentions(fields, _kinds(fields), has_bias=fields.flag("qkv_bias"))
    return read_model(fields, sparse_layers(fields, attentions, moe))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers: where there are windows, every other one of the first has one."""
    layers = num_layers(fields)
    if not fields.flag("use_sliding_window"):
        return (FULL,) * layers
    most = fields.integer("max_window_layers", 0, MAX_POSITIONS)
    kinds = tuple(SLIDING if layer % 2 == 0 and layer < most else FULL for layer in range(layers))
    return declared_kinds(fields) or kinds
