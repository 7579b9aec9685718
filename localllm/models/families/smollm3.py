"""SmolLM 3: Llama with layers in which nothing rotates, every fourth unless the file lists them."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import (
    MAX_LAYERS,
    declared_kinds,
    dense_layers,
    num_layers,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, SLIDING

DEFAULTS: dict[str, object] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_theta": 2e6,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    rotates, has_bias = _rotating_layers(fields), fields.flag("attention_bias")
    kinds = declared_kinds(fields)
    if not fields.flag("use_sliding_window"):
        kinds = None
    elif kinds is None and fields.get("sliding_window") is not None:
        kinds = tuple(FULL if each else SLIDING for each in rotates)
    attentions = read_attentions(fields, kinds, has_bias=has_bias, has_output_bias=has_bias)
    mixers = [each if turns else without_positions(each) for each, turns in zip(attentions, rotates, strict=True)]
    return read_model(fields, dense_layers(mixers, read_mlp(fields, has_bias=fields.flag("mlp_bias"))))


def _rotating_layers(fields: Fields) -> list[bool]:
    """Return of each layer whether its queries and keys rotate; a file lists 0 for those that do not."""
    count = num_layers(fields)
    named = fields.items("no_rope_layers", most=MAX_LAYERS)
    if named is None:
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(named) != count or not all(each in (0, 1) for each in named):
        raise fields.refuse("no_rope_layers", f"a list of num_hidden_layers = {count} zeros and ones")
    return [bool(each) for each in named]
