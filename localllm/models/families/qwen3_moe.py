"""Qwen 3 with experts: Qwen 3's attention, 128 small experts."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families import qwen2
from localllm.models.families.reading import (
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    sparse_layers,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, SLIDING

DEFAULTS: dict[str, object] = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    kind = SLIDING if fields.flag("use_sliding_window") else FULL  # of all layers: max_window_layers counts for nothing
    return experts_model(fields, kind, normalizes=fields.flag("norm_topk_prob"))


def experts_model(fields: Fields, kind: str, *, normalizes: bool, stored: StoredForm | None = None) -> ModelConfig:
    """Return the model of the fields. kind: of every layer's attention."""
    moe = MoEConfig(read_router(fields, "softmax", normalizes=normalizes), read_mlp(fields, "moe_intermediate_size"))
    has_bias = fields.flag("attention_bias")
    kinds = (kind,) * num_layers(fields)
    attentions = read_attentions(fields, kinds, qk_norm="head", has_bias=has_bias, has_output_bias=has_bias)
    return read_model(fields, sparse_layers(fields, attentions, moe), stored=stored or StoredForm())
