"""Gemma 3, alone or as the text model of a multimodal one: Gemma 2 with norms of queries and keys, and two RoPEs.

Its files cap attention too; its code never looks at that.
"""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families import gemma2
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields
from localllm.models.rope_fields import gemma3_rope_sections

DEFAULTS: dict[str, object] = {
    **gemma2.DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    attentions = gemma2.gemma_attentions(fields, ropes=gemma3_rope_sections(fields), qk_norm="head")
    return gemma2.gemma(fields, attentions)
