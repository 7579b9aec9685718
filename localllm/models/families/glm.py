"""GLM-4 9B of 2024: half of each head rotates, pairs side by side; gate and up are stored as one matrix."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, NormPlacement, StoredForm
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True,
}


def parse(fields: Fields) -> ModelConfig:
    return glm(fields)


def glm(
    fields: Fields, norm_placement: NormPlacement = "pre", renames: tuple[tuple[str, str], ...] = ()
) -> ModelConfig:
    """Return a dense GLM."""
    fields = with_defaults(fields, DEFAULTS)
    attentions = read_attentions(fields, rotates_partially=True, has_bias=fields.flag("attention_bias"))
    layers = dense_layers(attentions, read_mlp(fields), norm_placement)
    return read_model(fields, layers, stored=StoredForm(renames, interleaves_heads=True))
