"""GLM-4-0414, 9B and 32B: the GLM before it with norms behind each block, too."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.glm import glm
from localllm.models.fields import Fields

RENAMES = (
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_self_attn_layernorm.", ".post_attention_layernorm."),
    (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
)


def parse(fields: Fields) -> ModelConfig:
    return glm(fields, "sandwich", RENAMES)
