"""DeepSeek V3 and R1: latent attention, experts chosen by groups, first layers without any (arXiv:2412.19437)."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.glm4_moe import RENAMES, draft_renames
from localllm.models.families.latent import read_latent_attention, require_usual
from localllm.models.families.reading import (
    MAX_LAYERS,
    grouped_layers,
    num_layers,
    read_model,
    with_defaults,
    with_draft_head,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    return read_grouped(fields)


def read_grouped(fields: Fields) -> ModelConfig:
    """Return a model of latent attention and experts that are chosen by groups."""
    require_usual(fields, scoring_func="sigmoid", moe_layer_freq=1)
    count, extra = num_layers(fields), fields.optional_integer("num_nextn_predict_layers", 0, MAX_LAYERS)
    layers = grouped_layers(fields, [read_latent_attention(fields)] * count)
    interleaves = fields.flag("rope_interleave", if_null=True)
    stored = StoredForm(RENAMES, interleaves_heads=interleaves, num_extra_layers=extra or 0)
    model = read_model(fields, layers, stored=stored)
    return with_draft_head(model, layers[-1], draft_renames(count)) if extra else model
