"""OLMoE (arXiv:2409.02060): 64 experts, one norm over all heads of queries and of keys, which may be clipped."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import read_attentions, read_mlp, read_model, read_router, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "num_experts_per_tok": 8,
    "num_experts": 64,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    router = read_router(fields, "softmax", normalizes=fields.flag("norm_topk_prob"))
    moe, has_bias = MoEConfig(router, read_mlp(fields)), fields.flag("attention_bias")
    clip = fields.optional_number("clip_qkv", 1e-6, 1e9)
    attentions = read_attentions(fields, qk_norm="full", clip=clip, has_bias=has_bias, has_output_bias=has_bias)
    return read_model(fields, [LayerConfig(attention, moe) for attention in attentions])
