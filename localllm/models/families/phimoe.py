"""Phi 3.5 MoE: two of 16 experts chosen by SparseMixer, norms by mean and variance, biases everywhere."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import mixtral
from localllm.models.families.reading import (
    one_kind,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import PHI3_KINDS, rope_sections

DEFAULTS: dict[str, object] = {
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "router_jitter_noise": 0.01,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias, jitter = fields.flag("attention_bias"), fields.number("router_jitter_noise", 0.0, 1.0)
    router = read_router(fields, "sparsemixer", num_experts="num_local_experts", jitter=jitter)
    if router.top_k != 2:
        raise unsupported(fields.source, f"SparseMixer with {router.top_k} experts a token", "2")
    attentions = read_attentions(
        fields,
        one_kind(fields),
        ropes={kind: _with_factor(section) for kind, section in rope_sections(fields).items()},
        rope_kinds=PHI3_KINDS,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    moe = MoEConfig(router, read_mlp(fields))
    return read_model(
        fields,
        [LayerConfig(attention, moe) for attention in attentions],
        norm_kind="layer",
        has_head_bias=fields.flag("lm_head_bias"),
        stored=StoredForm(mixtral.RENAMES),
    )


def _with_factor(section: Fields) -> Fields:
    """Return a section of rope keys with the attention factor under its usual name; here there is one for short and one
    for long contexts, which published models have alike."""
    short, long = (section.optional_number(f"{kind}_mscale", 0.0, 1e6) for kind in ("short", "long"))
    if short != long:
        raise unsupported(section.source, f"a short_mscale {short} beside a long_mscale {long}", "two that are equal")
    return (
        section if short is None else Fields({**section.raw, "attention_factor": short}, section.source, section.path)
    )
