"""Mistral: Llama with a window in every layer, where the file has one."""

from __future__ import annotations

from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.reading import one_kind, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    mlp = read_mlp(fields)
    return read_model(fields, [LayerConfig(each, mlp) for each in read_attentions(fields, one_kind(fields))])
