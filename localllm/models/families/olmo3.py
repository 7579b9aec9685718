"""OLMo 3: OLMo 2 with a window in three of four layers, and a RoPE that is stretched in the others alone."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families import olmo2
from localllm.models.families.reading import (
    dense_layers,
    pattern_kinds,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import gemma3_rope_sections

DEFAULTS: dict[str, object] = {
    **olmo2.DEFAULTS,
    "rope_theta": 5e5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias, ropes = fields.flag("attention_bias"), gemma3_rope_sections(fields)
    attentions = read_attentions(
        fields, pattern_kinds(fields), ropes=ropes, qk_norm="full", has_bias=has_bias, has_output_bias=has_bias
    )
    return read_model(fields, dense_layers(attentions, read_mlp(fields), "post"))
