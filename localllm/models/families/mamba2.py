"""Mamba 2: layers of nothing else (arXiv:2405.21060)."""

from __future__ import annotations

from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_INTERMEDIATE,
    UNBOUNDED_TOKENS,
    hidden_size,
    mamba2_split,
    num_layers,
    read_mamba2,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 32768,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "max_position_embeddings": UNBOUNDED_TOKENS,
}
KEYS = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}
RENAMES = (
    ("model.backbone.", "model."),  # as an adapter's names become
    ("backbone.", "model."),
    ("model.embedding.", "model.embed_tokens."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    (".mixer.", ".mamba."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    expand = fields.number("expand", 1e-3, MAX_INTERMEDIATE)
    mamba2 = read_mamba2(fields, KEYS, features=int(expand * hidden_size(fields)))
    layers = num_layers(fields)
    return read_model(
        fields,
        [LayerConfig(mamba2, None)] * layers,
        norm_eps=fields.number("layer_norm_epsilon", 0.0, 1.0),
        stored=StoredForm(renames(layers), splits=(mamba2_split(mamba2),)),
    )


def renames(layers: int) -> tuple[tuple[str, str], ...]:
    """Return what parts of names are called here, of a model with so many layers of nothing else."""
    norms = ((f"model.layers.{layer}.norm.", f"model.layers.{layer}.input_layernorm.") for layer in range(layers))
    return (*RENAMES, *norms)
