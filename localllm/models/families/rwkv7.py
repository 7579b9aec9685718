"""RWKV-7 "Goose" (arXiv:2503.14456): no attention, a state in every layer; as flash-linear-attention writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from localllm.kernels.state_shapes import Rwkv7Shape, ShiftShape
from localllm.layers.config import Rwkv7ChannelMixConfig, Rwkv7TimeMixConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    UNBOUNDED_TOKENS,
    hidden_size,
    num_layers,
    read_model,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "hidden_size": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "num_hidden_layers": 24,
    "head_dim": 64,
    "decay_low_rank_dim": 64,
    "gate_low_rank_dim": 128,
    "a_low_rank_dim": 64,
    "v_low_rank_dim": 16,
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
}
END_OF_TEXT = 0
_RENAMES = (("model.embeddings.", "model.embed_tokens."), ("model.layers.0.pre_norm.", "model.embedding_norm."))


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    # The file's number is of training: nothing in the model ends with a number of tokens.
    fields = replace(fields, raw={**fields.raw, "max_position_embeddings": UNBOUNDED_TOKENS})
    _refuse_others(fields)
    config = read_model(
        fields,
        _layers(fields),
        norm_kind="layer",
        has_norm_bias=fields.flag("norm_bias"),
        norm_eps=fields.number("norm_eps", 0.0, 1.0),
        has_embedding_norm=fields.flag("norm_first"),
        stored=StoredForm(_RENAMES),
    )
    # The end of a text, which files do not name: their numbers, 1 and 2, are bytes in the World vocabulary.
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, END_OF_TEXT))))


def _refuse_others(fields: Fields) -> None:
    """Raise UnsupportedModelError for what such a file may ask for and nobody has published."""
    if fields.optional_text("hidden_act") not in ("sqrelu", "relu2"):
        raise unsupported(fields.source, "RWKV-7 with another activation", "sqrelu")
    if fields.section("attn") is not None:
        raise unsupported(fields.source, "RWKV-7 with layers of attention", "a time mix in every layer")
    widths = fields.items("value_dim", most=MAX_LAYERS) or []
    if any(width != hidden_size(fields) for width in widths):
        raise unsupported(fields.source, "RWKV-7 with values of another width", "that of the hidden state")


def _layers(fields: Fields) -> Iterator[LayerConfig]:
    """Yield a time mix and a channel mix for each layer of the file."""
    hidden, head_dim = hidden_size(fields), _head_dim(fields)
    time_mix = Rwkv7TimeMixConfig(
        Rwkv7Shape(hidden // head_dim, head_dim),
        decay_rank=_rank(fields, "decay_low_rank_dim"),
        rate_rank=_rank(fields, "a_low_rank_dim"),
        value_rank=_rank(fields, "v_low_rank_dim"),
        gate_rank=_rank(fields, "gate_low_rank_dim"),
    )
    channel_mix = Rwkv7ChannelMixConfig(ShiftShape(hidden), _intermediate_size(fields))
    for number in range(num_layers(fields)):
        yield LayerConfig(replace(time_mix, is_first=number == 0), None)
        yield LayerConfig(channel_mix, None)


def _head_dim(fields: Fields) -> int:
    hidden = hidden_size(fields)
    head_dim = fields.optional_integer("head_dim", 1, hidden)
    if head_dim is None:
        head_dim = hidden // fields.integer("num_heads", 1, hidden)
    if hidden % head_dim:
        raise fields.refuse("head_dim", f"a divisor of hidden_size = {hidden}")
    return head_dim


def _rank(fields: Fields, key: str) -> int:
    return fields.integer(key, 1, MAX_HIDDEN)


def _intermediate_size(fields: Fields) -> int:
    """Return the width of the channel mix: where the file has none, of so many times the hidden state's, in 32s."""
    size = fields.optional_integer("intermediate_size", 1, MAX_INTERMEDIATE)
    if size is not None:
        return size
    return -(-int(hidden_size(fields) * fields.number("hidden_ratio", 1e-3, 1e3)) // 32) * 32
