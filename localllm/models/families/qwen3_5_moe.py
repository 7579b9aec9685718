"""Qwen 3.5 and 3.6 with experts: Qwen 3 Next's mixers and mixtures, stored as Qwen 3.5 stores them."""

from __future__ import annotations

from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families import qwen3_next
from localllm.models.families.reading import read_model, with_defaults, with_draft_head
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **qwen3_next.DEFAULTS,
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    moe = qwen3_next.read_moe(fields, normalizes=True)
    layers = [LayerConfig(mixer, moe) for mixer in qwen3_next.read_mixers(fields)]
    model = read_model(fields, layers, norm_weight_offset=1.0)
    return with_draft_head(model, LayerConfig(qwen3_next.read_attention(fields), moe))
