"""Mamba: layers of nothing else (arXiv:2312.00752); Falcon Mamba, which norms steps, B and C (arXiv:2410.05355)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from localllm.kernels.state_shapes import MambaShape
from localllm.layers.config import MambaConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import mamba2
from localllm.models.families.reading import (
    MAX_CONV_WIDTH,
    MAX_HEAD_DIM,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    UNBOUNDED_TOKENS,
    hidden_size,
    num_layers,
    read_activation,
    read_model,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.mixer_layouts.mamba import mamba_rows

DEFAULTS: dict[str, object] = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "intermediate_size": None,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
    "mixer_rms_eps": 1e-6,
    "max_position_embeddings": UNBOUNDED_TOKENS,
}
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "expand": "expand",
        "state": "state_size",
        "rank": "time_step_rank",
        "conv": "conv_kernel",
        "conv_bias": "use_conv_bias",
        "bias": "use_bias",
    }
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    is_falcon = fields.get("model_type") == "falcon_mamba"
    mamba = read_mamba(
        fields,
        features=fields.optional_integer("intermediate_size", 1, MAX_INTERMEDIATE),
        norm_eps=fields.number("mixer_rms_eps", 0.0, 1.0) if is_falcon else None,
    )
    layers = num_layers(fields)
    return read_model(
        fields,
        [LayerConfig(mamba, None)] * layers,
        norm_eps=fields.number("layer_norm_epsilon", 0.0, 1.0),
        stored=StoredForm(mamba2.renames(layers), splits=(mamba_split(mamba),)),
    )


def read_mamba(
    fields: Fields, names: Mapping[str, str] = KEYS, *, features: int | None = None, **traits: Any
) -> MambaConfig:
    """Return the Mamba of each layer that has it. names: of the keys. features: of x; None: so many times the hidden
    state's. traits: fields of MambaConfig besides."""
    if read_activation(fields) != "silu":
        raise unsupported(fields.source, "Mamba with another activation", "silu")
    hidden, rank = hidden_size(fields), names["rank"]
    is_told = fields.get(rank) != "auto"
    shape = MambaShape(
        features=features or read_expanded(fields, names["expand"]),
        state_size=fields.integer(names["state"], 1, MAX_HEAD_DIM),
        step_rank=fields.integer(rank, 1, MAX_HIDDEN) if is_told else -(-hidden // 16),
        conv_width=fields.integer(names["conv"], 2, MAX_CONV_WIDTH),
    )
    has_bias, has_conv_bias = fields.flag(names["bias"]), fields.flag(names["conv_bias"])
    return MambaConfig(shape, has_bias=has_bias, has_conv_bias=has_conv_bias, **traits)


def read_expanded(fields: Fields, key: str) -> int:
    """Return how many features so many times the hidden state's are."""
    hidden = hidden_size(fields)
    features = int(fields.number(key, 1e-3, MAX_INTERMEDIATE) * hidden)
    if not 0 < features <= MAX_INTERMEDIATE:
        raise fields.refuse(key, f"what makes 1 to {MAX_INTERMEDIATE} features of hidden_size = {hidden}")
    return features


def mamba_split(config: MambaConfig) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return how the rows of its second projection are split: see `StoredForm.splits`."""
    return ".x_proj", mamba_rows(config.shape)
