"""The families of models that run here, as a table, and the way from a folder's config.json to a ModelConfig.

Reads a whitelist of keys: whatever else the file holds is not looked at, and nothing in the folder runs.
Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from localllm.errors import UnsupportedModelError
from localllm.models.config import Activation, ModelConfig, RopeConfig, RopeKind, StoredDtype
from localllm.models.fields import Fields, is_integer, show
from localllm.models.rope_fields import (
    FULL,
    MAX_POSITIONS,
    PHI3_KINDS,
    ROPE_KINDS,
    SLIDING,
    RopeContext,
    gemma3_rope_sections,
    parse_rope,
    partial_rotary_factor,
    rope_sections,
)
from localllm.models.strict_json import JsonLimits, read_json_object

# Twice to eight times what the largest published dense models have: a larger number is a mistake or an attack.
_MAX_LAYERS = 1024
_MAX_HIDDEN = 1 << 17
_MAX_INTERMEDIATE = 1 << 20
_MAX_HEADS = 2048
_MAX_HEAD_DIM = 2048
_MAX_VOCAB = 1 << 22
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_EOS_TOKENS = 256
_LIMITS = JsonLimits()

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}
_DTYPES: dict[str, StoredDtype] = {name: name for name in get_args(StoredDtype)}


def _layer_kinds(family: Family, fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: by the family's rule, or as a file lists them whose family mixes kinds."""
    kinds = (FULL,) * layers
    match family.windows:
        case "none":
            return kinds
        case "all":  # Mistral and Phi-3 have no eye for layer_types; a mixture means another family
            kinds = (SLIDING,) * layers
            if len(set(_declared_layer_kinds(fields, layers) or kinds)) > 1:
                raise _unsupported(fields.source, "a mixture of layer_types", "one kind for all layers of this family")
            return kinds
        case "late":
            if not fields.flag("use_sliding_window"):
                return kinds
            first = fields.integer("max_window_layers", 0, MAX_POSITIONS)
            kinds = tuple(SLIDING if layer >= first else FULL for layer in range(layers))
        case "pattern":  # every `sliding_window_pattern`-th layer is full
            pattern = fields.integer("sliding_window_pattern", 1, MAX_POSITIONS)
            kinds = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(layers))
    return _declared_layer_kinds(fields, layers) or kinds


def _declared_layer_kinds(fields: Fields, layers: int) -> tuple[str, ...] | None:
    kinds = fields.items("layer_types", most=_MAX_LAYERS)
    if kinds is None:
        return None
    if len(kinds) != layers:
        raise fields.refuse("layer_types", f"a list of num_hidden_layers = {layers} entries")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise _unsupported(fields.source, f"a layer of the type {show(kind)}", f"{FULL}, {SLIDING}")
    return tuple(str(kind) for kind in kinds)


@dataclass(frozen=True)
class Family:
    """The way one model_type reads its config.json. `defaults` are what transformers takes for a key that is absent.

    traits: fields of ModelConfig that hold for the whole family. qkv_bias: fixed, or None where `attention_bias` says
    (then of the output projection too).
    """

    defaults: Mapping[str, object]
    traits: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["none", "all", "late", "pattern"] = "none"  # which layers have them
    qkv_bias: bool | None = None
    rope_sections: Callable[[Fields], dict[str, Fields]] = rope_sections
    rope_kinds: dict[str, RopeKind] = field(default_factory=lambda: ROPE_KINDS)
    rotates_partially: bool = False
    scales_embedding: bool = False
    caps_scores: bool = False


_LLAMA: dict[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PHI3 = {
    **_LLAMA,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_GEMMA2: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_OLMO2 = {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_GEMMA_TRAITS = {"norm_placement": "sandwich", "norm_weight_offset": 1.0}

_GEMMA3_FAMILY = Family(
    _GEMMA3,
    traits={**_GEMMA_TRAITS, "qk_norm": "head"},
    windows="pattern",
    rope_sections=gemma3_rope_sections,
    scales_embedding=True,
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA),
    "mistral": Family(_MISTRAL, windows="all", qkv_bias=False),
    "qwen2": Family(_QWEN2, windows="late", qkv_bias=True),
    "qwen3": Family({**_QWEN2, "head_dim": 128}, traits={"qk_norm": "head"}, windows="late"),
    "phi3": Family(_PHI3, windows="all", qkv_bias=False, rope_kinds=PHI3_KINDS, rotates_partially=True),
    "gemma2": Family(_GEMMA2, traits=_GEMMA_TRAITS, windows="pattern", scales_embedding=True, caps_scores=True),
    "gemma3_text": _GEMMA3_FAMILY,
    "gemma3": _GEMMA3_FAMILY,
    "olmo2": Family(_OLMO2, traits={"norm_placement": "post", "qk_norm": "full"}),
}


def load_config(directory: Path) -> ModelConfig:
    """Return the config of the model in `directory`: its config.json, with the end-of-sequence ids that
    generation_config.json adds.

    Raises CheckpointError naming file and key, UnsupportedModelError for a model that does not run here.
    """
    path = directory / "config.json"
    raw = read_json_object(path, _LIMITS)
    config = parse_config(raw, str(path))
    generation = directory / "generation_config.json"
    if not generation.is_file():
        return config
    added = _eos_ids(Fields(read_json_object(generation, _LIMITS), str(generation)))
    # The family's default id stands only where neither file names one.
    text = raw.get("text_config")
    sections = (raw, text if isinstance(text, dict) else {})
    named = config.eos_token_ids if any(section.get("eos_token_id") is not None for section in sections) else ()
    merged = tuple(dict.fromkeys(named + added))
    return replace(config, eos_token_ids=merged) if merged else config


def parse_config(raw: Mapping[str, object], source: str) -> ModelConfig:
    """Return a ModelConfig from the object of a config.json; `source` names the file in errors.

    Raises CheckpointError for a value that is absent, of the wrong type or out of bounds, UnsupportedModelError for an
    architecture, a RoPE scaling or a quantization that this version does not run.
    """
    top = Fields(raw, source)
    model_type = top.optional_text("model_type")
    if model_type is None:
        raise top.refuse("model_type", "the name of the architecture")
    family = FAMILIES.get(model_type)
    if family is None:
        raise _unsupported(source, f"a model of the architecture {show(model_type)}", ", ".join(FAMILIES))
    _refuse_quantized(top)
    if model_type != "gemma3":
        return _parse(family, model_type, replace(top, defaults=family.defaults))
    # A multimodal file: the text model's keys are in a section, what concerns the whole may stand beside it.
    text = top.section("text_config")
    if text is None:
        raise top.refuse("text_config", "the text model's configuration")
    _refuse_quantized(text)
    beside = {key: raw[key] for key in _SHARED_KEYS if raw.get(key) is not None}
    return _parse(family, model_type, replace(text, raw={**text.raw, **beside}, defaults=family.defaults))


_SHARED_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")


def _parse(family: Family, model_type: str, fields: Fields) -> ModelConfig:
    layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", 1, _MAX_HIDDEN)
    heads, kv_heads, head_dim = _attention_shape(fields, hidden_size)
    positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    kinds = _layer_kinds(family, fields, layers)
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS) if SLIDING in kinds else None
    rotary_dim = _rotary_dim(family, fields, head_dim)
    ropes = _ropes(family, fields, positions, rotary_dim)
    follows_config = family.qkv_bias is None and fields.flag("attention_bias")
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size", 1, _MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, _MAX_INTERMEDIATE),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        rotary_dim=rotary_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
        activation=_activation(fields),
        attention_bias=family.qkv_bias or follows_config,
        output_bias=follows_config,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias"),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        tie_word_embeddings=fields.flag("tie_word_embeddings", if_null=fields.defaults["tie_word_embeddings"] is True),
        bos_token_id=fields.optional_integer("bos_token_id", 0, _MAX_TOKEN_ID),
        eos_token_ids=_eos_ids(fields),
        dtype=_dtype(fields),
        **_gemma_attention(fields, caps_scores=family.caps_scores),
        **family.traits,
    )


def _attention_shape(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    """Return the numbers of query heads, of key-value heads, and of the features of a head."""
    heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
    kv_heads = fields.optional_integer("num_key_value_heads", 1, _MAX_HEADS) or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = fields.optional_integer("head_dim", 1, _MAX_HEAD_DIM)
    if head_dim is None and hidden_size % heads:
        raise fields.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden_size}")
    return heads, kv_heads, head_dim or hidden_size // heads


def _rotary_dim(family: Family, fields: Fields, head_dim: int) -> int:
    factor = partial_rotary_factor(fields)
    if factor != 1.0 and not family.rotates_partially:
        raise _unsupported(fields.source, f"partial_rotary_factor {factor:g}", "1 in this family")
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.refuse("head_dim", f"an even number of rotating features, not {rotary_dim},")
    return rotary_dim


def _ropes(family: Family, fields: Fields, positions: int, rotary_dim: int) -> dict[str, RopeConfig]:
    theta = fields.optional_number("rope_theta", 1e-3, 1e15)
    context = RopeContext(
        rotary_dim=rotary_dim,
        max_position_embeddings=positions,
        original_max_position_embeddings=fields.optional_integer("original_max_position_embeddings", 2, MAX_POSITIONS),
        theta=10000.0 if theta is None else theta,
        kinds=family.rope_kinds,
    )
    local_theta = fields.optional_number("rope_local_base_freq", 1e-3, 1e15)
    local = context if local_theta is None else replace(context, theta=local_theta)
    sections = family.rope_sections(fields)
    return {FULL: parse_rope(sections[FULL], context), SLIDING: parse_rope(sections[SLIDING], local)}


def _gemma_attention(fields: Fields, *, caps_scores: bool) -> dict[str, Any]:
    """Keys that only Gemma's families define. Gemma 3's files cap attention too; its code never looks at that."""
    if "query_pre_attn_scalar" not in fields.defaults:
        return {}
    if fields.flag("use_bidirectional_attention"):
        raise _unsupported(fields.source, "an encoder (use_bidirectional_attention)", "models that write text")
    return {
        "attention_scale": fields.number("query_pre_attn_scalar", 1e-6, 1e9) ** -0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping", 1e-6, 1e9) if caps_scores else None,
        "final_softcap": fields.optional_number("final_logit_softcapping", 1e-6, 1e9),
    }


def _activation(fields: Fields) -> Activation:
    key = "hidden_activation" if "hidden_activation" in fields.defaults else "hidden_act"
    name = fields.optional_text(key) or str(fields.defaults[key])
    if name not in _ACTIVATIONS:
        raise _unsupported(fields.source, f"the {key} {show(name)}", ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _dtype(fields: Fields) -> StoredDtype | None:
    name = fields.optional_text("dtype") or fields.optional_text("torch_dtype") or "auto"
    if name == "auto":  # as the tensors are
        return None
    if name.removeprefix("torch.") not in _DTYPES:
        raise _unsupported(fields.source, f"the dtype {show(name)}", ", ".join(_DTYPES))
    return _DTYPES[name.removeprefix("torch.")]


def _eos_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    if not isinstance(value, list):
        single = fields.optional_integer("eos_token_id", 0, _MAX_TOKEN_ID)
        return () if single is None else (single,)
    ids = fields.items("eos_token_id", most=_MAX_EOS_TOKENS) or []
    found = [token for token in ids if is_integer(token) and 0 <= token <= _MAX_TOKEN_ID]
    if len(found) < len(ids):
        raise fields.refuse("eos_token_id", f"token ids from 0 to {_MAX_TOKEN_ID}")
    return tuple(dict.fromkeys(found))


def _refuse_quantized(fields: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        section = fields.section(key)
        if section is not None:
            method = show(section.get("quant_method") or section.get("quant_algo") or "unknown")
            raise UnsupportedModelError(
                f"{fields.source}: the checkpoint is already quantized",
                why=f"{fields.path}{key} names the method {method}; bf16, fp16, fp32 and fp64 weights are read",
                fix="choose the original repository, without GPTQ, AWQ, FP8, MXFP4 or bnb in its name",
            )


def _unsupported(source: str, what: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source}: {what} cannot run here", why=f"supported: {known}", fix="choose another model: localllm list"
    )
