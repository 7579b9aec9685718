"""Falcon-H1: attention and Mamba 2 beside each other in every layer, and multipliers of all matrices
(arXiv:2507.22448)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.layers.config import AttentionConfig, BesideConfig, Mamba2Config
from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families import bamba
from localllm.models.families.reading import (
    MAMBA2_DEFAULTS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    dense_layers,
    hidden_size,
    mamba2_split,
    num_layers,
    read_attentions,
    read_mamba2,
    read_mlp,
    read_model,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields

_SMALLEST, _LARGEST = 1e-9, 1e9
DEFAULTS: dict[str, object] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    beside = BesideConfig((_read_mamba2(fields), _read_attention(fields)))
    mlp = read_mlp(fields, has_bias=fields.flag("mlp_bias"))
    (split,) = (mamba2_split(mixer) for mixer in beside.mixers if isinstance(mixer, Mamba2Config))
    stored = StoredForm(
        bamba.RENAMES, splits=(split,), multipliers=_multipliers(fields, [name for name, _ in split[1]])
    )
    return read_model(
        fields,
        dense_layers([beside] * num_layers(fields), mlp),
        embedding_scale=_multiplier(fields, "embedding_multiplier"),
        logit_scale=_multiplier(fields, "lm_head_multiplier"),
        stored=stored,
    )


def _read_mamba2(fields: Fields) -> Mamba2Config:
    norm = ("plain" if fields.flag("mamba_norm_before_gate") else "gated") if fields.flag("mamba_rms_norm") else None
    features = fields.optional_integer("mamba_d_ssm", 1, MAX_HIDDEN)
    if features is None:
        features = int(fields.number("mamba_expand", 1e-3, MAX_INTERMEDIATE) * hidden_size(fields))
    has_bias, has_output_bias = fields.flag("mamba_proj_bias"), fields.flag("projectors_bias")
    _require_no_bias(fields, "mamba_proj_bias", "ssm_in_multiplier")
    return read_mamba2(fields, features=features, norm=norm, has_bias=has_bias, has_output_bias=has_output_bias)


def _read_attention(fields: Fields) -> AttentionConfig:
    """Return the attention: what multiplies queries and keys multiplies its scale."""
    has_bias = fields.flag("attention_bias")
    _require_no_bias(fields, "attention_bias", "attention_in_multiplier")
    (attention, *_) = read_attentions(fields, has_bias=has_bias, has_output_bias=has_bias)
    by = _multiplier(fields, "key_multiplier") * _multiplier(fields, "attention_in_multiplier") ** 2
    return replace(attention, scale=attention.scale * by)


def _multipliers(fields: Fields, projected: list[str]) -> tuple[tuple[str, float], ...]:
    """Return what the matrices are multiplied by. projected: the ends of the names of what Mamba 2 projects."""
    inside = _multiplier(fields, "ssm_in_multiplier")
    own = _multiplier_list(fields, "ssm_multipliers", len(projected))
    gate, down = _multiplier_list(fields, "mlp_multipliers", 2)
    values = _multiplier(fields, "attention_in_multiplier") * _multiplier(fields, "attention_out_multiplier")
    found = {
        **{f"{name}.": inside * each for name, each in zip(projected, own, strict=True)},
        ".mamba.out_proj.": _multiplier(fields, "ssm_out_multiplier"),
        ".self_attn.o_proj.": values,
        ".mlp.gate_proj.": gate,
        ".mlp.down_proj.": down,
    }
    return tuple((name, by) for name, by in found.items() if by != 1.0)


def _multiplier_list(fields: Fields, key: str, count: int) -> Sequence[float]:
    """Return so many multipliers, of which null is all ones."""
    return [1.0] * count if fields.get(key) is None else fields.numbers(key, count, _SMALLEST, _LARGEST)


def _multiplier(fields: Fields, key: str) -> float:
    return fields.number(key, _SMALLEST, _LARGEST)


def _require_no_bias(fields: Fields, bias: str, multiplier: str) -> None:
    """Raise UnsupportedModelError where what goes into a matrix with a bias is multiplied: the bias would not be."""
    if fields.flag(bias) and _multiplier(fields, multiplier) != 1.0:
        raise unsupported(
            fields.source, f"{bias} with the {multiplier} {_multiplier(fields, multiplier):g}", "one of them"
        )
