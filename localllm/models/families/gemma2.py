"""Gemma 2: norms before and behind each block, scaled embeddings, bounded scores and logits (arXiv:2408.00118)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localllm.layers.config import AttentionConfig
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import (
    hidden_size,
    pattern_kinds,
    read_attentions,
    read_mlp,
    read_model,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    softcap = fields.optional_number("attn_logit_softcapping", 1e-6, 1e9)
    return gemma(fields, gemma_attentions(fields, softcap=softcap))


def gemma_attentions(fields: Fields, **traits: Any) -> tuple[AttentionConfig, ...]:
    """Return each layer's attention. traits: see `read_attentions`."""
    has_bias, scalar = fields.flag("attention_bias"), fields.number("query_pre_attn_scalar", 1e-6, 1e9)
    traits |= {"scale": scalar**-0.5, "has_bias": has_bias, "has_output_bias": has_bias}
    return read_attentions(fields, pattern_kinds(fields), **traits)


def gemma(fields: Fields, attentions: Iterable[AttentionConfig]) -> ModelConfig:
    """Return a model of what Gemma 2 and 3 share around their attention."""
    if fields.flag("use_bidirectional_attention"):
        raise unsupported(fields.source, "an encoder (use_bidirectional_attention)", "models that write text")
    mlp = read_mlp(fields)
    return read_model(
        fields,
        [LayerConfig(attention, mlp, "sandwich") for attention in attentions],
        norm_weight_offset=1.0,
        embedding_scale=hidden_size(fields) ** 0.5,
        final_softcap=fields.optional_number("final_logit_softcapping", 1e-6, 1e9),
    )
