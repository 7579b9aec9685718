"""The families of models that run here, and the way from a folder's config.json to a ModelConfig.

Each family is a file, which is imported when a model of it is read. It reads a whitelist of keys: whatever else the
config.json holds is not looked at, and nothing in the folder runs. Knows no tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from localllm.gguf.folder import DESCRIPTION, GgufModel
from localllm.layers.config import DeltaNetConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import eos_ids
from localllm.models.fields import Fields
from localllm.models.strict_json import JsonLimits, read_json_object
from localllm.registry import FAMILIES, unknown_architecture

_LIMITS = JsonLimits()
# The text model's keys are in a section, which may name a family of its own.
_MULTIMODAL = (
    "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3", "muse_glimmer",
    "gemma3n", "gemma4", "gemma4_unified",
)  # fmt: skip
_FLAT = ("qwen2_5_vl",)  # whose older files have them beside the others
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")  # may stand beside it


def load_config(directory: Path) -> ModelConfig:
    """Return the config of the model in `directory`: its config.json, with the end-of-sequence ids that
    generation_config.json adds.

    Raises CheckpointError naming file and key, UnsupportedModelError for a model that does not run here.
    """
    path = directory / "config.json"
    raw = read_json_object(path, _LIMITS)
    config = parse_config(raw, str(path))
    if (directory / DESCRIPTION).is_file():
        return _as_gguf(config, GgufModel.read(directory))
    generation = directory / "generation_config.json"
    if not generation.is_file():
        return config
    added = eos_ids(Fields(read_json_object(generation, _LIMITS), str(generation)))
    # The family's default id stands only where neither file names one.
    text = raw.get("text_config")
    sections = (raw, text if isinstance(text, dict) else {})
    named = config.eos_token_ids if any(section.get("eos_token_id") is not None for section in sections) else ()
    merged = tuple(dict.fromkeys(named + added))
    return replace(config, eos_token_ids=merged) if merged else config


def _as_gguf(config: ModelConfig, model: GgufModel) -> ModelConfig:
    found = in_gguf_form(config, model.pairs_heads, model.tiles_value_heads, model.tensors)
    stored = replace(found.stored, num_extra_layers=model.num_extra_layers)
    return replace(found, stored=stored, norm_weight_offset=config.norm_weight_offset - model.norm_offset)


def in_gguf_form(config: ModelConfig, pairs_heads: bool, tiles_value_heads: bool, names: Iterable[str]) -> ModelConfig:
    """Return the config of a model in Hugging Face's form with the way in which a GGUF file stores its matrices: by our
    names, each expert's with rows first.

    pairs_heads, tiles_value_heads: see `gguf.names.GgufForm`.
    names: Hugging Face's of the file's tensors.
    """
    rows = config.stored.delta_rows
    if rows == "by_head" and any(name.endswith(".in_proj_qkv.weight") for name in names):
        rows = "gates_by_head"
    stored = StoredForm(
        splits=config.stored.splits,
        apart_gates=config.stored.apart_gates,
        interleaves_heads=pairs_heads,
        delta_rows=rows,
        negates_rates=True,
    )
    layers = _with_value_heads(config.layers, is_tiled=True) if tiles_value_heads else config.layers
    return replace(config, layers=layers, stored=stored, published=config.stored)


def in_published_form(config: ModelConfig) -> ModelConfig:
    """Return the config of a model with the way in which Hugging Face's checkpoints store its matrices."""
    stored = config.stored if config.published is None else config.published
    return replace(config, layers=_with_value_heads(config.layers, is_tiled=False), stored=stored, published=None)


def _with_value_heads(layers: tuple[LayerConfig, ...], *, is_tiled: bool) -> tuple[LayerConfig, ...]:
    return tuple(
        replace(layer, mixer=replace(layer.mixer, shape=replace(layer.mixer.shape, is_tiled=is_tiled)))
        if isinstance(layer.mixer, DeltaNetConfig)
        else layer
        for layer in layers
    )


def parse_config(raw: Mapping[str, object], source: str) -> ModelConfig:
    """Return a ModelConfig from the object of a config.json; `source` names the file in errors.

    Raises CheckpointError for a value that is absent, of the wrong type or out of bounds, UnsupportedModelError for an
    architecture or a RoPE scaling that this version does not run.
    """
    fields = Fields(raw, source)
    model_type = fields.optional_text("model_type")
    if model_type is None:
        raise fields.refuse("model_type", "the name of the architecture")
    if model_type not in FAMILIES:
        raise unknown_architecture(source, raw, FAMILIES)
    family_name = FAMILIES[model_type]
    if model_type in _MULTIMODAL:
        family_name = FAMILIES.get(_text_type(fields), family_name)
        fields = _text_fields(fields, model_type)
    family = importlib.import_module(f"{__name__}.{family_name}")
    config: ModelConfig = family.parse(fields)
    return config


def _text_type(fields: Fields) -> str:
    text = fields.section("text_config")
    return str(text.get("model_type")) if text is not None else ""


def _text_fields(fields: Fields, model_type: str) -> Fields:
    """Return the keys of the text model in a multimodal file, with what concerns the whole and stands beside them."""
    text = fields.section("text_config")
    if text is None and model_type in _FLAT:
        return fields
    if text is None:
        raise fields.refuse("text_config", "the text model's configuration")
    beside = {key: fields.raw[key] for key in _SHARED_KEYS if fields.raw.get(key) is not None}
    return replace(text, raw={**text.raw, **beside, "model_type": model_type})
