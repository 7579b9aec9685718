"""The text model of Qwen 3 VL: Qwen 3's."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families import qwen3
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **qwen3.DEFAULTS,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}


def parse(fields: Fields) -> ModelConfig:
    return qwen3.parse(with_defaults(fields, DEFAULTS))
