"""MiniCPM 3: latent attention in a dense model, with multipliers of embeddings, blocks and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.models.architecture import ModelConfig
from localllm.models.families.latent import read_latent_attention
from localllm.models.families.reading import (
    MAX_HIDDEN,
    dense_layers,
    hidden_size,
    num_layers,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    hidden, count = hidden_size(fields), num_layers(fields)
    if fields.get("v_head_dim") is None:
        value_dim = hidden // fields.integer("num_attention_heads", 1, hidden)
        fields = replace(fields, raw={**fields.raw, "v_head_dim": value_dim})
    depth = fields.optional_number("scale_depth", 1e-9, 1e9)
    base = fields.optional_integer("dim_model_base", 1, MAX_HIDDEN)
    return read_model(
        fields,
        dense_layers([read_latent_attention(fields)] * count, read_mlp(fields, has_bias=fields.flag("mlp_bias"))),
        embedding_scale=fields.number("scale_emb", 1e-9, 1e9),
        residual_scale=1.0 if depth is None else depth / math.sqrt(count),
        logit_scale=1.0 if base is None else base / hidden,
    )
