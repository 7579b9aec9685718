"""MiniMax M2: 256 experts by corrected sigmoids, one norm over all heads, a part of which rotates."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import mixtral
from localllm.models.families.reading import (
    MAX_LAYERS,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
    "rope_theta": 5e6,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
}
RENAMES = (*mixtral.RENAMES, (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"))


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS | _rotating_share(fields))
    router = read_router(fields, "sigmoid", num_experts="num_local_experts", has_correction=True, normalizes=True)
    moe = MoEConfig(router, read_mlp(fields))
    attentions = read_attentions(fields, rotates_partially=True, qk_norm="full")
    extra = fields.optional_integer("num_mtp_modules", 0, MAX_LAYERS) or 0
    stored = StoredForm(RENAMES, num_extra_layers=extra)
    return read_model(fields, [LayerConfig(attention, moe) for attention in attentions], stored=stored)


def _rotating_share(fields: Fields) -> dict[str, object]:
    """Return the share of a head that rotates where the file tells it by the number of its features."""
    rotary_dim = fields.optional_integer("rotary_dim", 2, 2048)
    head_dim = fields.optional_integer("head_dim", 1, 2048) or 128
    return {} if rotary_dim is None else {"partial_rotary_factor": min(rotary_dim / head_dim, 1.0)}
