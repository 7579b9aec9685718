"""Phi 3 to 4: a part of each head may rotate, by LongRoPE; queries, keys and values are stored as one matrix."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import (
    dense_layers,
    one_kind,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import PHI3_KINDS

DEFAULTS: dict[str, object] = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
# In the multimodal model, matrices beside which there are adapters for what is seen and heard.
RENAMES = ((".base_layer.", "."),)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    mlp = read_mlp(fields)
    attentions = read_attentions(fields, one_kind(fields), rope_kinds=PHI3_KINDS, rotates_partially=True)
    return read_model(fields, dense_layers(attentions, mlp), stored=StoredForm(RENAMES))
