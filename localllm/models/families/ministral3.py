"""Ministral 3 and Devstral 2: Mistral with queries that grow with their positions, as Llama 4's do."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families import mistral
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **mistral.DEFAULTS,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def parse(fields: Fields) -> ModelConfig:
    return mistral.parse(with_defaults(fields, DEFAULTS))
