"""EXAONE 4: norms behind each block and of queries and keys; the full layers among those with a window do not
rotate."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.reading import (
    declared_kinds,
    dense_layers,
    pattern_kinds,
    read_attentions,
    read_mlp,
    read_model,
    with_defaults,
    without_positions,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_windows = fields.get("sliding_window") is not None
    # Beside layer_types, the pattern may be a word ("LLLG").
    kinds = (declared_kinds(fields) or pattern_kinds(fields)) if has_windows else None
    attentions = read_attentions(fields, kinds, qk_norm="head")
    if has_windows:
        attentions = tuple(without_positions(each) if each.window is None else each for each in attentions)
    return read_model(fields, dense_layers(attentions, read_mlp(fields), "post"))
