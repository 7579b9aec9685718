"""Qwen 3.5 to 3.8: Qwen 3 Next's mixers before one MLP; the text model of what also sees. A text's positions are alike
in all three directions."""

from __future__ import annotations

from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families import qwen3_next
from localllm.models.families.reading import read_mlp, read_model, with_defaults, with_draft_head
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **qwen3_next.DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    mlp = read_mlp(fields)
    layers = [LayerConfig(mixer, mlp) for mixer in qwen3_next.read_mixers(fields)]
    model = read_model(fields, layers, norm_weight_offset=1.0)
    return with_draft_head(model, LayerConfig(qwen3_next.read_attention(fields), mlp))
