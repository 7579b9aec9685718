"""The text model of Qwen 2.5 VL: Qwen 2's."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families import qwen2
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **qwen2.DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def parse(fields: Fields) -> ModelConfig:
    return qwen2.parse(with_defaults(fields, DEFAULTS))
