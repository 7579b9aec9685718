"""The text model of Phi 4 multimodal: Phi 3's."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families import phi3
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **phi3.DEFAULTS,
    "vocab_size": 200064,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 199999,
    "eos_token_id": [199999, 200020],
}


def parse(fields: Fields) -> ModelConfig:
    return phi3.parse(with_defaults(fields, DEFAULTS))
