"""Granite 4: Granite 3 of which most layers have Mamba 2 in place of attention, dense or with experts beside an MLP."""

from __future__ import annotations

from localllm.layers.config import MAX_EXPERTS, MLPConfig, MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import granite, granitemoe
from localllm.models.families.bamba import read_expanded
from localllm.models.families.reading import (
    MAMBA2_DEFAULTS,
    declared_kinds,
    mamba2_split,
    num_layers,
    read_mlp,
    read_router,
    unsupported,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, LINEAR

DEFAULTS: dict[str, object] = {
    **granitemoe.DEFAULTS,
    **MAMBA2_DEFAULTS,
    "shared_intermediate_size": 1024,
}
_KINDS = {"mamba": LINEAR, "attention": FULL}  # as older files have it


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    body, kinds = _feed_forward(fields), _kinds(fields)
    mamba2 = read_expanded(fields) if LINEAR in kinds else None  # else the file's sizes of it mean nothing
    position = fields.optional_text("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise unsupported(fields.source, f"position_embedding_type {position}", "rope, nope")
    attention = granite.read_attention(fields)
    attention = attention if position == "rope" else without_positions(attention)
    layers = [LayerConfig(attention if kind == FULL else mamba2, body) for kind in kinds]
    shared = ".mlp.shared_expert" if isinstance(body, MoEConfig) else ".mlp"
    renames = (
        *granitemoe.RENAMES,
        (".shared_mlp.input_linear.", f"{shared}.gate_up_proj."),
        (".shared_mlp.output_linear.", f"{shared}.down_proj."),
    )
    splits = () if mamba2 is None else (mamba2_split(mamba2),)
    return granite.granite(fields, layers, stored=StoredForm(renames, splits=splits))


def _feed_forward(fields: Fields) -> MLPConfig | MoEConfig:
    shared = read_mlp(fields, "shared_intermediate_size")
    if not fields.optional_integer("num_local_experts", 0, MAX_EXPERTS):
        return shared
    return MoEConfig(read_router(fields, "chosen", num_experts="num_local_experts"), read_mlp(fields), shared)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers; where the file lists none, all are recurrent."""
    kinds = declared_kinds(fields, (LINEAR, FULL, *_KINDS)) or (LINEAR,) * num_layers(fields)
    return tuple(_KINDS.get(kind, kind) for kind in kinds)
