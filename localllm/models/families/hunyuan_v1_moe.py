"""Hunyuan A13B: experts beside a shared one, norms of queries and keys behind the rotation, whose base is stretched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.layers.config import AttentionConfig, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_LAYERS,
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, rope_sections

DEFAULTS: dict[str, object] = {
    "vocab_size": 290943,
    "rms_norm_eps": 1e-5,
    "num_experts": 1,
    "moe_topk": 1,
}
RENAMES = (
    (".query_layernorm.", ".q_norm."),
    (".key_layernorm.", ".k_norm."),
    (".mlp.gate.wg.", ".mlp.gate."),
    (".shared_mlp.", ".shared_expert."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias, mlp = fields.flag("attention_bias"), read_mlp(fields)
    layers = []
    for layer, attention in enumerate(hunyuan_attentions(fields, has_bias=has_bias, has_output_bias=has_bias)):
        router = read_router(_of_layer(fields, layer), "softmax", top_k="moe_topk", normalizes=True)
        layers.append(LayerConfig(attention, MoEConfig(router, expert=mlp, shared=mlp)))
    return read_model(fields, layers, stored=StoredForm(RENAMES))


def hunyuan_attentions(fields: Fields, **traits: Any) -> tuple[AttentionConfig, ...]:
    """Return each layer's attention. A scaling with an `alpha`, called dynamic in files, stretches RoPE's base once and
    for all lengths."""
    traits |= {"qk_norm": "head", "rotates_first": True}
    sections = rope_sections(fields)
    alpha = sections[FULL].optional_number("alpha", 1e-6, 1e9)
    if alpha is None:
        return read_attentions(fields, **traits)
    plain = {kind: replace(section, raw=_without_scaling(section.raw)) for kind, section in sections.items()}
    first, *_ = attentions = read_attentions(fields, ropes=plain, **traits)
    if first.head_dim <= 2:
        raise fields.refuse("head_dim", "a number above 2, beside an alpha,")
    theta = first.rope.theta * alpha ** (first.head_dim / (first.head_dim - 2))
    return tuple(replace(each, rope=replace(each.rope, theta=theta)) for each in attentions)


def _without_scaling(section: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in section.items() if key not in ("rope_type", "type", "factor")}


def _of_layer(fields: Fields, layer: int) -> Fields:
    """Return the fields with this layer's numbers where the file lists one for each layer."""
    own = {}
    for key in ("num_experts", "moe_topk"):
        if isinstance(fields.get(key), list):
            values = fields.items(key, most=MAX_LAYERS) or []
            if layer >= len(values):
                raise fields.refuse(key, f"a list of num_hidden_layers = {num_layers(fields)} entries")
            own[key] = values[layer]
    return replace(fields, raw={**fields.raw, **own})
