"""ERNIE 4.5 with experts: a softmax with a correction, shared experts, heads whose rotating pairs lie side by side."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import glm4_moe
from localllm.models.families.reading import (
    MAX_LAYERS,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    read_shared,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
RENAMES = (*glm4_moe.RENAMES, (".moe_statics.e_score_correction_bias", ".gate.e_score_correction_bias"))


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("use_bias")
    attentions = read_attentions(fields, has_bias=has_bias, has_output_bias=has_bias)
    floor = fields.number("moe_norm_min", 0.0, 1.0)
    router = read_router(
        *(fields, "softmax"),
        num_experts="moe_num_experts",
        top_k="num_experts_per_tok" if "num_experts_per_tok" in fields.raw else "moe_k",
        has_correction=True,
        normalizes=True,
        sum_floor=floor,
    )
    shared = read_shared(fields, "moe_num_shared_experts", has_bias=has_bias)
    moe, dense = (
        MoEConfig(router, read_mlp(fields, "moe_intermediate_size"), shared),
        read_mlp(fields, has_bias=has_bias),
    )
    sparse = _sparse_layers(fields, len(attentions))
    layers = [LayerConfig(each, moe if layer in sparse else dense) for layer, each in enumerate(attentions)]
    return read_model(fields, layers, has_head_bias=has_bias, stored=StoredForm(RENAMES, interleaves_heads=True))


def _sparse_layers(fields: Fields, num_layers: int) -> set[int]:
    first = fields.integer("moe_layer_start_index", 0, MAX_LAYERS)
    last = fields.integer("moe_layer_end_index", -1, MAX_LAYERS)
    interval = fields.integer("moe_layer_interval", 1, MAX_LAYERS)
    last = num_layers - 1 if last == -1 else last
    return {layer for layer in range(first, last + 1) if (layer + 1) % interval == 0}
