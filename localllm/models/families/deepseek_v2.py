"""DeepSeek V2 Lite: latent attention, experts by a softmax, first layers without any (arXiv:2405.04434)."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.glm4_moe import RENAMES
from localllm.models.families.latent import read_latent_attention, require_usual
from localllm.models.families.reading import (
    MAX_LAYERS,
    num_layers,
    read_mlp,
    read_model,
    read_router,
    read_shared,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 102400,
    "num_attention_heads": 32,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    require_usual(fields, scoring_func="softmax", moe_layer_freq=1)
    attention, has_bias = read_latent_attention(fields), fields.flag("mlp_bias")
    experts, shared = read_mlp(fields, "moe_intermediate_size"), read_shared(fields, "n_shared_experts")
    method = fields.optional_text("topk_method")
    if method != "greedy" or fields.flag("norm_topk_prob"):
        raise unsupported(fields.source, f"topk_method {method} in this family", "greedy, with norm_topk_prob false")
    scale = fields.number("routed_scaling_factor", 1e-6, 1e6)
    moe = MoEConfig(read_router(fields, "softmax", num_experts="n_routed_experts", scale=scale), experts, shared)
    num_dense, dense = fields.integer("first_k_dense_replace", 0, MAX_LAYERS), read_mlp(fields, has_bias=has_bias)
    layers = [LayerConfig(attention, dense if layer < num_dense else moe) for layer in range(num_layers(fields))]
    return read_model(fields, layers, stored=StoredForm(RENAMES, interleaves_heads=True))
