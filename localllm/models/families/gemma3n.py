"""Gemma 3n, the text model: four hidden states a token, a small matrix beside attention, sparse gates, embeddings of
each token for each layer, keys and values that later layers share."""

from __future__ import annotations

from localllm.layers.config import AltUpConfig, MLPConfig
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families.gemma4 import read_per_layer, sharing_keys
from localllm.models.families.reading import (
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    hidden_size,
    num_layers,
    pattern_kinds,
    read_activation,
    read_attentions,
    read_model,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import gemma3_rope_sections

DEFAULTS: dict[str, object] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # where a file says nothing


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    active = fields.integer("altup_active_idx", 0, 64)
    if active:
        raise unsupported(fields.source, f"altup_active_idx {active}", "0")
    kinds, has_bias = pattern_kinds(fields), fields.flag("attention_bias")
    alike = read_attentions(
        fields,
        kinds,
        ropes=gemma3_rope_sections(fields),
        scale=1.0,
        qk_norm="head",
        norms_values=True,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    pairs = zip(sharing_keys(fields, alike, kinds), _mlps(fields), strict=True)
    return read_model(
        fields,
        [LayerConfig(attention, mlp, "sandwich") for attention, mlp in pairs],
        embedding_scale=hidden_size(fields) ** 0.5,
        per_layer=read_per_layer(fields),
        altup=AltUpConfig(
            num_states=fields.integer("altup_num_inputs", 2, 64),
            laurel_rank=fields.integer("laurel_rank", 1, MAX_HIDDEN),
            scales_output=fields.flag("altup_correct_scale"),
        ),
        final_softcap=fields.optional_number("final_logit_softcapping", 1e-6, 1e9),
    )


def _mlps(fields: Fields) -> list[MLPConfig]:
    """Return each layer's feed-forward: a file may list their widths and how sparse their gates are."""
    count = num_layers(fields)
    widths, sparsities = fields.get("intermediate_size"), fields.get("activation_sparsity_pattern")
    if isinstance(widths, list):
        widths = [int(each) for each in fields.numbers("intermediate_size", count, 1, MAX_INTERMEDIATE)]
    else:
        widths = [fields.integer("intermediate_size", 1, MAX_INTERMEDIATE)] * count
    if isinstance(sparsities, list):
        sparsities = [*fields.numbers("activation_sparsity_pattern", count, 0.0, 0.999)]
    elif sparsities is not None:
        sparsities = [fields.number("activation_sparsity_pattern", 0.0, 0.999)] * count
    else:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        sparsities = [_SPARSITY] * sparse + [0.0] * (count - sparse)
    activation = read_activation(fields)
    pairs = zip(widths, sparsities, strict=True)
    return [MLPConfig(width, activation, sparsity=sparsity) for width, sparsity in pairs]
