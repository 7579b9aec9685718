"""The text model of Qwen 3 VL with experts: Qwen 3's. A text's positions are alike in all three directions."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families import qwen3_moe
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL

DEFAULTS: dict[str, object] = {
    **qwen3_moe.DEFAULTS,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "rope_theta": 5e5,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    return qwen3_moe.experts_model(fields, FULL, normalizes=True, stored=StoredForm(transposes_experts="oblong"))
