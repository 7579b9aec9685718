"""gpt-oss: experts whose gates are clamped, a sink for each head, every second layer with a window."""

from __future__ import annotations

from localllm.layers.config import MLPConfig, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_INTERMEDIATE,
    pattern_kinds,
    read_attentions,
    read_model,
    read_router,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
RENAMES = ((".mlp.router.", ".mlp.gate."),)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    moe = MoEConfig(
        read_router(fields, "chosen", num_experts="num_local_experts"), _expert(fields), has_router_bias=True
    )
    has_bias, kinds = fields.flag("attention_bias"), pattern_kinds(fields)
    attentions = read_attentions(fields, kinds, has_bias=has_bias, has_output_bias=has_bias, has_sinks=True)
    stored = StoredForm(RENAMES, transposes_experts="all", alternates_gates=True)
    return read_model(fields, [LayerConfig(attention, moe) for attention in attentions], stored=stored)


def _expert(fields: Fields) -> MLPConfig:
    """Return an expert: (up + 1) * gate * sigmoid(1.702 * gate), with both clamped before."""
    alpha = fields.number("swiglu_alpha", 0.0, 1e6)
    if alpha != 1.702:
        raise unsupported(fields.source, f"swiglu_alpha {alpha:g}", "1.702 in this family")
    width, limit = fields.integer("intermediate_size", 1, MAX_INTERMEDIATE), fields.number("swiglu_limit", 0.0, 1e6)
    return MLPConfig(width, "quick_gelu", has_bias=True, limit=limit, up_offset=1.0)
