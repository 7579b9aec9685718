"""What the files of the families with multi-head latent attention share."""

from __future__ import annotations

import math

from localllm.errors import show
from localllm.layers.config import LatentAttentionConfig, RopeConfig
from localllm.models.families.reading import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, read_ropes, unsupported
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, ROPE_KINDS, rope_sections


def require_usual(fields: Fields, **usual: object) -> None:
    """Raise UnsupportedModelError where a key of the file has another value than this one, which is as good as none."""
    for key, value in usual.items():
        if (found := fields.get(key)) is not None and found != value:
            raise unsupported(fields.source, f"{key} = {show(found)} in this family", f"{key} = {show(value)}")


def read_latent_attention(fields: Fields, *, rotates: bool = True) -> LatentAttentionConfig:
    """Return the attention of every layer. rotates: False where nothing tells positions."""
    plain_dim = fields.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM)
    shared_dim = fields.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM)
    if shared_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "an even number")
    rope = read_ropes(fields, rope_sections(fields), shared_dim, ROPE_KINDS)[FULL] if rotates else RopeConfig()
    has_bias = fields.flag("attention_bias")
    return LatentAttentionConfig(
        num_heads=fields.integer("num_attention_heads", 1, MAX_HEADS),
        query_rank=fields.optional_integer("q_lora_rank", 1, MAX_HIDDEN),
        latent_dim=fields.integer("kv_lora_rank", 1, MAX_HIDDEN),
        plain_dim=plain_dim,
        shared_dim=shared_dim,
        value_dim=fields.integer("v_head_dim", 1, MAX_HEAD_DIM),
        rope=rope,
        rotary_dim=shared_dim if rotates else 0,
        scale=(plain_dim + shared_dim) ** -0.5 * _temperature(rope),
        has_bias=has_bias,
        has_output_bias=has_bias,
    )


def _temperature(rope: RopeConfig) -> float:
    """Return what multiplies scores over a stretched context, beside what cosines and sines have of it."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1.0:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
