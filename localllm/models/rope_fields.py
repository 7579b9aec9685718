"""The rotary embedding in a config.json: its old spelling (rope_theta, rope_scaling) and its new (rope_parameters).

Knows which keys each scaling needs, and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from localllm.errors import UnsupportedModelError, show
from localllm.layers.config import RopeConfig, RopeKind
from localllm.models.fields import Fields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MAX_POSITIONS = 1 << 28
_LARGEST_THETA = 1e15
_LARGEST_FACTOR = 1e6
# A text's positions are alike in all directions of an mrope.
ROPE_KINDS: dict[str, RopeKind] = {kind: kind for kind in get_args(RopeKind)} | {"mrope": "default"}
# Phi-3's early configs say "su" or "yarn" and mean longrope.
PHI3_KINDS: dict[str, RopeKind] = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


@dataclass(frozen=True)
class RopeContext:
    """The numbers that a scaling's defaults depend on. `rotary_dim` features of a head rotate."""

    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int | None
    theta: float
    kinds: Mapping[str, RopeKind]


def rope_sections(fields: Fields) -> dict[str, Fields]:
    """The rope keys for full and for sliding layers: the same section twice unless the file nests one for each."""
    scaling = fields.section("rope_scaling")
    section = scaling if scaling is not None and scaling.raw else fields.section("rope_parameters")
    if section is None:
        section = Fields({}, fields.source, "rope_parameters.")
    if FULL in section.raw or SLIDING in section.raw:
        empty = Fields({}, fields.source, section.path)
        return {kind: section.section(kind) or empty for kind in (FULL, SLIDING)}
    return {FULL: section, SLIDING: section}


def gemma3_rope_sections(fields: Fields) -> dict[str, Fields]:
    """Gemma 3 scales its full layers only; `rope_scaling` adds to what `rope_parameters` says of them."""
    parameters = fields.section("rope_parameters") or Fields({}, fields.source, "rope_parameters.")
    if parameters.raw and FULL not in parameters.raw and SLIDING not in parameters.raw:
        raise fields.refuse("rope_parameters", f"one object for {FULL} and one for {SLIDING}")
    empty = Fields({}, fields.source, parameters.path)
    full, sliding = (parameters.section(kind) or empty for kind in (FULL, SLIDING))
    scaling = fields.section("rope_scaling")
    if scaling is not None:
        full = replace(scaling, raw={**full.raw, **scaling.raw})
    return {FULL: full, SLIDING: sliding}


def partial_rotary_factor(fields: Fields) -> float:
    """Return the share of a head that rotates, from the rope section or from beside it; of a proportional one all of
    it, some of it by no angle."""
    section = rope_sections(fields)[FULL]
    if section.get("rope_type") == "proportional":
        return 1.0
    where = section if "partial_rotary_factor" in section.raw else fields
    factor = where.optional_number("partial_rotary_factor", 0.0, 1.0)
    if factor == 0.0:
        raise where.refuse("partial_rotary_factor", "a number above 0, at most 1")
    return 1.0 if factor is None else factor


def parse_rope(section: Fields, context: RopeContext) -> RopeConfig:
    """Return the RoPE of one kind of layers. Raises UnsupportedModelError for an unknown scaling, CheckpointError for a
    bad value."""
    name = section.optional_text("rope_type")
    if name is None:
        name = section.optional_text("type")
    if name is None and section.get("factor") is not None:
        raise section.refuse("rope_type", "the name of the scaling that `factor` belongs to")
    if name is not None and name not in context.kinds:
        raise UnsupportedModelError(
            f"{section.source}: the RoPE scaling {show(name)} is not supported",
            why=f"known here: {', '.join(context.kinds)}",
            fix="choose another model: localllm list --all",
        )
    kind: RopeKind = "default" if name is None else context.kinds[name]
    theta = section.optional_number("rope_theta", 1e-3, _LARGEST_THETA)
    rope = RopeConfig(theta=context.theta if theta is None else theta, kind=kind)
    scaling = _SCALINGS.get(kind)
    return rope if scaling is None else scaling(section, context, rope)


def _factor(section: Fields, context: RopeContext, rope: RopeConfig) -> RopeConfig:
    if rope.kind == "dynamic" and context.rotary_dim == 2:
        raise section.refuse("rope_type", "another scaling: dynamic divides by the rotating features less 2, and")
    return replace(
        rope,
        factor=section.number("factor", 1e-6, _LARGEST_FACTOR),
        original_max_position_embeddings=context.max_position_embeddings,
    )


def _llama3(section: Fields, context: RopeContext, rope: RopeConfig) -> RopeConfig:
    low = section.number("low_freq_factor", 1e-6, _LARGEST_FACTOR)
    high = section.number("high_freq_factor", 1e-6, _LARGEST_FACTOR)
    if high <= low:
        raise section.refuse("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    return replace(
        rope,
        factor=section.number("factor", 1e-6, _LARGEST_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original(section, context),
    )


def _yarn(section: Fields, context: RopeContext, rope: RopeConfig) -> RopeConfig:
    fast = section.optional_number("beta_fast", 0.0, _LARGEST_FACTOR)
    slow = section.optional_number("beta_slow", 0.0, _LARGEST_FACTOR)
    if rope.theta <= 1.0:
        raise section.refuse("rope_theta", "a number above 1, which yarn takes the logarithm of,")
    return replace(
        _stretched(section, context, rope),
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        mscale=section.optional_number("mscale", 0.0, _LARGEST_FACTOR),
        mscale_all_dim=section.optional_number("mscale_all_dim", 0.0, _LARGEST_FACTOR),
        truncate=section.flag("truncate", if_null=True),
    )


def _longrope(section: Fields, context: RopeContext, rope: RopeConfig) -> RopeConfig:
    pairs = context.rotary_dim // 2
    return replace(
        _stretched(section, context, rope),
        short_factor=section.numbers("short_factor", pairs, 1e-6, _LARGEST_FACTOR),
        long_factor=section.numbers("long_factor", pairs, 1e-6, _LARGEST_FACTOR),
    )


def _stretched(section: Fields, context: RopeContext, rope: RopeConfig) -> RopeConfig:
    """yarn and longrope: a factor that may be left to the ratio of the two context lengths."""
    original = _original(section, context)
    factor = section.optional_number("factor", 1e-6, _LARGEST_FACTOR)
    return replace(
        rope,
        factor=context.max_position_embeddings / original if factor is None else factor,
        attention_factor=section.optional_number("attention_factor", 0.0, _LARGEST_FACTOR),
        original_max_position_embeddings=original,
    )


def _original(section: Fields, context: RopeContext) -> int:
    """Beside the section it counts before inside it, as in transformers."""
    inside = section.optional_integer("original_max_position_embeddings", 2, MAX_POSITIONS)
    return context.original_max_position_embeddings or inside or context.max_position_embeddings


def _proportional(section: Fields, _context: RopeContext, rope: RopeConfig) -> RopeConfig:
    share = section.optional_number("partial_rotary_factor", 1e-6, 1.0)
    factor = section.optional_number("factor", 1e-6, _LARGEST_FACTOR)
    return replace(rope, share=1.0 if share is None else share, factor=1.0 if factor is None else factor)


_SCALINGS = {
    "linear": _factor,
    "dynamic": _factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
