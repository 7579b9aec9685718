"""What the files of the families share: keys that nearly every config.json has, their bounds, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

from localllm.errors import UnsupportedModelError, show
from localllm.kernels.sizes import RouterConfig, Scores
from localllm.kernels.state_shapes import DeltaShape, Mamba2Shape
from localllm.layers.config import (
    MAX_EXPERTS,
    Activation,
    AttentionConfig,
    DeltaNetConfig,
    KeyValue,
    Mamba2Config,
    Mixer,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    RopeKind,
)
from localllm.models.architecture import LayerConfig, ModelConfig, NormPlacement, StoredDtype
from localllm.models.fields import Fields, is_integer, is_number
from localllm.models.mixer_layouts.mamba2 import mamba2_rows
from localllm.models.rope_fields import (
    FULL,
    LINEAR,
    MAX_POSITIONS,
    ROPE_KINDS,
    SLIDING,
    RopeContext,
    parse_rope,
    partial_rotary_factor,
    rope_sections,
)

# Twice to eight times what the largest published models have: a larger number is a mistake or an attack.
MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 2048
MAX_HEAD_DIM = 2048
MAX_VOCAB = 1 << 22
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_EOS_TOKENS = 256
UNBOUNDED_TOKENS = 1 << 20  # of a model in which nothing ends with a number of them
MAX_CONV_WIDTH = 8
_INFINITY = "Infinity"
_LARGEST_FP32 = 3.4028234663852886e38

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}
_DTYPES: dict[str, StoredDtype] = {name: name for name in get_args(StoredDtype)}

# What the keys of Mamba 2 are called in most families' files.
MAMBA2_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "activation": "hidden_act",
        "heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "groups": "mamba_n_groups",
        "state": "mamba_d_state",
        "conv": "mamba_d_conv",
        "conv_bias": "mamba_conv_bias",
        "bias": "mamba_proj_bias",
    }
)
MAMBA2_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
)

# What transformers takes for a key of its first decoders that is absent; most families differ in some of them.
_LLAMA_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
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
)


def with_defaults(fields: Fields, own: Mapping[str, object] = MappingProxyType({})) -> Fields:
    """Return the fields of a family whose absent keys mean these values, and Llama's where it names none. What already
    has a meaning keeps it."""
    return replace(fields, defaults={**_LLAMA_DEFAULTS, **own, **fields.defaults})


def read_model(fields: Fields, layers: Iterable[LayerConfig], **traits: Any) -> ModelConfig:
    """Return the model of these layers. traits: fields of ModelConfig that its family has besides."""
    if "norm_eps" not in traits:
        traits["norm_eps"] = fields.number("rms_norm_eps", 0.0, 1.0)
    return ModelConfig(
        model_type=str(fields.get("model_type")),
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size(fields),
        layers=tuple(layers),
        max_position_embeddings=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        tie_word_embeddings=fields.flag("tie_word_embeddings", if_null=fields.defaults["tie_word_embeddings"] is True),
        bos_token_id=fields.optional_integer("bos_token_id", 0, _MAX_TOKEN_ID),
        eos_token_ids=eos_ids(fields),
        dtype=_dtype(fields),
        **traits,
    )


def dense_layers(mixers: Iterable[Mixer], mlp: MLPConfig, norm_placement: NormPlacement = "pre") -> list[LayerConfig]:
    """Return layers with one MLP each."""
    return [LayerConfig(mixer, mlp, norm_placement) for mixer in mixers]


def with_draft_head(model: ModelConfig, layer: LayerConfig, renames: Iterable[tuple[str, str]] = ()) -> ModelConfig:
    """Return the model with the layer that drafts for it. renames: of its tensors, to Qwen's names (`mtp.`)."""
    stored = replace(model.stored, renames=(*model.stored.renames, *renames), num_extra_layers=0)
    return replace(model, draft_head=replace(model, layers=(layer,), stored=stored, reads_states=True))


def hidden_size(fields: Fields) -> int:
    return fields.integer("hidden_size", 1, MAX_HIDDEN)


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


# Attention


def read_attentions(
    fields: Fields,
    kinds: Iterable[str] | None = None,
    *,
    ropes: Mapping[str, Fields] | None = None,
    rope_kinds: Mapping[str, RopeKind] = ROPE_KINDS,
    rotates_partially: bool = False,
    **traits: Any,
) -> tuple[AttentionConfig, ...]:
    """Return each layer's attention.

    kinds: of each layer, full or sliding; None: all are full.
    ropes: the section of the rope keys of each kind, where the family has its own way to write them.
    rope_kinds: the scalings that the family knows, by their names in a file.
    traits: fields of AttentionConfig that all layers have besides.
    """
    kinds = (FULL,) * num_layers(fields) if kinds is None else tuple(kinds)
    heads, kv_heads, head_dim = _heads(fields)
    rotary_dim = _rotary_dim(fields, head_dim, rotates_partially=rotates_partially)
    rotations = read_ropes(fields, ropes or rope_sections(fields), rotary_dim, rope_kinds)
    traits = {"scale": head_dim**-0.5, **traits}
    full = AttentionConfig(heads, kv_heads, head_dim, rotations[FULL], rotary_dim, **traits)
    by_kind = {FULL: full}
    if SLIDING in kinds:
        window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
        by_kind[SLIDING] = replace(full, rope=rotations[SLIDING], window=window)
    return tuple(by_kind[kind] for kind in kinds)


def without_positions(attention: AttentionConfig) -> AttentionConfig:
    """Return the attention as a layer has it in which nothing rotates (NoPE, arXiv:2305.19466)."""
    return replace(attention, rotary_dim=0)


def late_kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers of which the later ones may have a window, as Qwen's files say it."""
    layers = num_layers(fields)
    if not fields.flag("use_sliding_window"):
        return (FULL,) * layers
    first = fields.integer("max_window_layers", 0, MAX_POSITIONS)
    return declared_kinds(fields) or tuple(SLIDING if layer >= first else FULL for layer in range(layers))


def pattern_kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers of which every `sliding_window_pattern`-th is full, unless the file lists them."""
    pattern = fields.integer("sliding_window_pattern", 1, MAX_POSITIONS)
    kinds = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers(fields)))
    return declared_kinds(fields) or kinds


def one_kind(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers that all have a window, where there is one. A file that lists several kinds means
    another family."""
    kinds = (SLIDING,) * num_layers(fields)
    if len(set(declared_kinds(fields) or kinds)) > 1:
        raise unsupported(fields.source, "a mixture of layer_types", "one kind for all layers of this family")
    return kinds


def declared_kinds(fields: Fields, known: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...] | None:
    """Return the kinds of layers that the file lists; None where it does not. known: those that the family has."""
    kinds, layers = fields.items("layer_types", most=MAX_LAYERS), num_layers(fields)
    if kinds is None:
        return None
    if len(kinds) != layers:
        raise fields.refuse("layer_types", f"a list of num_hidden_layers = {layers} entries")
    for kind in kinds:
        if kind not in known:
            raise unsupported(fields.source, f"a layer of the type {show(kind)}", ", ".join(known))
    return tuple(str(kind) for kind in kinds)


# Gated DeltaNet


def hybrid_mixers(
    fields: Fields, attention: AttentionConfig, delta_net: DeltaNetConfig, kinds: Sequence[str]
) -> list[Mixer]:
    """Return each layer's mixer. kinds: of layers, where the file lists none. Raises CheckpointError where no layer has
    keys and values."""
    kinds = declared_kinds(fields, (LINEAR, FULL)) or kinds
    if FULL not in kinds:
        raise fields.refuse("layer_types", f"at least one layer of {FULL}")
    return [attention if kind == FULL else delta_net for kind in kinds]


def every_so_many_full(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers of which every `full_attention_interval`-th is full."""
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS)
    return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers(fields)))


def read_delta_net(fields: Fields, **traits: Any) -> DeltaNetConfig:
    """Return the Gated DeltaNet of each linear layer. traits: fields of DeltaNetConfig besides its heads."""
    if read_activation(fields) != "silu":
        raise unsupported(fields.source, "Gated DeltaNet with another activation", "silu")
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_HEADS)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS)
    if value_heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    shape = DeltaShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv_width=fields.integer("linear_conv_kernel_dim", 2, MAX_CONV_WIDTH),
    )
    return DeltaNetConfig(shape, **traits)


# Mamba 2


def read_mamba2(
    fields: Fields, names: Mapping[str, str] = MAMBA2_KEYS, *, features: int | None = None, **traits: Any
) -> Mamba2Config:
    """Return the Mamba 2 of each layer that has it. names: of the keys, where the family has others.

    features: of all heads; by default the file's heads and their size tell. traits: fields of Mamba2Config besides.
    """
    names = {**MAMBA2_KEYS, **names}
    if read_activation(fields, names["activation"]) != "silu":
        raise unsupported(fields.source, "Mamba 2 with another activation", "silu")
    heads = fields.integer(names["heads"], 1, MAX_HEADS)
    if fields.get(names["head_dim"]) == "auto" and features is not None and features % heads == 0:
        head_dim = features // heads
    else:
        head_dim = fields.integer(names["head_dim"], 1, MAX_HEAD_DIM)
    if features is not None and heads * head_dim != features:
        raise fields.refuse(names["heads"], f"a number of heads of {head_dim} features that has {features} of them")
    shape = Mamba2Shape(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=fields.integer(names["groups"], 1, MAX_HEADS),
        state_size=fields.integer(names["state"], 1, MAX_HEAD_DIM),
        conv_width=fields.integer(names["conv"], 2, MAX_CONV_WIDTH),
    )
    if heads % shape.num_groups:
        raise fields.refuse(names["groups"], f"a divisor of {names['heads']} = {heads}")
    has_conv_bias, has_bias = fields.flag(names["conv_bias"]), fields.flag(names["bias"])
    traits = {"has_bias": has_bias, "has_output_bias": has_bias, **_step_bounds(fields), **traits}
    return Mamba2Config(shape, has_conv_bias=has_conv_bias, **traits)


def _step_bounds(fields: Fields) -> dict[str, float | None]:
    """Return the bounds of a token's step, of which the upper one may be infinite, or beyond fp32: as JSON has no word
    for that, transformers writes an object."""
    bounds = fields.items("time_step_limit", most=2)
    if bounds is None:
        return {}
    found = [math.inf if each in (_INFINITY, {"__float__": _INFINITY}) else each for each in bounds]
    numbers = [each for each in found if is_number(each) and each >= 0]
    if len(numbers) != 2 or numbers[0] > _LARGEST_FP32:
        raise fields.refuse("time_step_limit", "two numbers from 0 on")
    least, most = numbers
    return {"least_step": float(least), "most_step": None if most > _LARGEST_FP32 else float(most)}


def mamba2_split(config: Mamba2Config) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return how the rows of its projection are split: see `StoredForm.splits`."""
    return ".in_proj", mamba2_rows(config.shape)


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Return the numbers of query heads, of key-value heads, and of the features of a head."""
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.optional_integer("num_key_value_heads", 1, MAX_HEADS) or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim, hidden = fields.optional_integer("head_dim", 1, MAX_HEAD_DIM), hidden_size(fields)
    if head_dim is None and hidden % heads:
        raise fields.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    return heads, kv_heads, head_dim or hidden // heads


def _rotary_dim(fields: Fields, head_dim: int, *, rotates_partially: bool) -> int:
    factor = partial_rotary_factor(fields)
    if factor != 1.0 and not rotates_partially:
        raise unsupported(fields.source, f"partial_rotary_factor {factor:g}", "1 in this family")
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.refuse("head_dim", f"an even number of rotating features, not {rotary_dim},")
    return rotary_dim


def read_ropes(
    fields: Fields, sections: Mapping[str, Fields], rotary_dim: int, kinds: Mapping[str, RopeKind]
) -> dict[str, RopeConfig]:
    """Return the rotation of full layers, and of those with a window."""
    theta = fields.optional_number("rope_theta", 1e-3, 1e15)
    context = RopeContext(
        rotary_dim=rotary_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        original_max_position_embeddings=fields.optional_integer("original_max_position_embeddings", 2, MAX_POSITIONS),
        theta=10000.0 if theta is None else theta,
        kinds=kinds,
    )
    local_theta = fields.optional_number("rope_local_base_freq", 1e-3, 1e15)
    local = context if local_theta is None else replace(context, theta=local_theta)
    return {FULL: parse_rope(sections[FULL], context), SLIDING: parse_rope(sections[SLIDING], local)}


# Feed-forward


def read_mlp(fields: Fields, key: str = "intermediate_size", **traits: Any) -> MLPConfig:
    """Return a gated feed-forward whose width stands under `key`."""
    return MLPConfig(fields.integer(key, 1, MAX_INTERMEDIATE), read_activation(fields), **traits)


def read_router(
    fields: Fields,
    scores: Scores,
    *,
    num_experts: str = "num_experts",
    top_k: str = "num_experts_per_tok",
    **traits: Any,
) -> RouterConfig:
    """Return the router. num_experts, top_k: their keys; transformers may say `num_local_experts` for the first."""
    key = num_experts if num_experts in fields.raw or "num_local_experts" not in fields.raw else "num_local_experts"
    count = fields.integer(key, 1, MAX_EXPERTS)
    chosen = fields.integer(top_k, 1, MAX_EXPERTS)
    if chosen > count:
        raise fields.refuse(top_k, f"at most {count}, the number of experts,")
    return RouterConfig(scores, count, chosen, **traits)


def grouped_router(fields: Fields) -> RouterConfig:
    """Return a router as DeepSeek-V3 has it (arXiv:2412.19437): sigmoids, a correction, and groups of experts."""
    groups = fields.optional_integer("n_group", 1, MAX_EXPERTS) or 1
    router = read_router(
        fields,
        "sigmoid",
        num_experts="n_routed_experts",
        has_correction=True,
        groups=groups,
        top_groups=fields.optional_integer("topk_group", 1, groups) or 1,
        normalizes=fields.flag("norm_topk_prob"),
        sum_epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6),
    )
    size = router.num_experts // groups
    if router.num_experts % groups or (groups > 1 and size < 2):
        raise fields.refuse("n_group", f"a divisor of the {router.num_experts} experts with two of them in a group")
    if router.top_k > router.top_groups * size:
        raise fields.refuse("topk_group", f"room for {router.top_k} experts in groups of {size}")
    return router


def read_shared(fields: Fields, count: str, **traits: Any) -> MLPConfig | None:
    """Return the shared experts as one that is as wide as all of them. count: the key of their number."""
    one = read_mlp(fields, "moe_intermediate_size", **traits)
    shared = fields.optional_integer(count, 0, 64) or 0
    return replace(one, intermediate_size=shared * one.intermediate_size) if shared else None


def grouped_layers(fields: Fields, attentions: Sequence[KeyValue]) -> list[LayerConfig]:
    """Return layers as DeepSeek's files describe them: dense ones, and those whose experts are chosen by groups."""
    experts = read_mlp(fields, "moe_intermediate_size")
    moe = MoEConfig(grouped_router(fields), experts, read_shared(fields, "n_shared_experts"))
    dense = read_mlp(fields)
    pairs = zip(attentions, sparse_flags(fields), strict=True)
    return [LayerConfig(attention, moe if sparse else dense) for attention, sparse in pairs]


def sparse_flags(fields: Fields) -> Sequence[bool]:
    """Return which layers have experts: those that the file lists, or all but the first ones."""
    count, kinds = num_layers(fields), fields.items("mlp_layer_types", most=MAX_LAYERS)
    if kinds is None:
        first = fields.optional_integer("first_k_dense_replace", 0, MAX_LAYERS) or 0
        return [number >= first for number in range(count)]
    if len(kinds) != count:
        raise fields.refuse("mlp_layer_types", f"a list of num_hidden_layers = {count} entries")
    if not set(kinds) <= {"dense", "sparse"}:
        raise unsupported(fields.source, "mlp_layer_types of another kind", "dense, sparse")
    return [kind == "sparse" for kind in kinds]


def sparse_layers(fields: Fields, mixers: Sequence[Mixer], moe: MoEConfig) -> list[LayerConfig]:
    """Return layers as Qwen's files describe them: every so many has experts, but those that are named."""
    step, count = fields.integer("decoder_sparse_step", 1, MAX_LAYERS), num_layers(fields)
    named = layer_numbers(fields, "mlp_only_layers") or []
    dense = read_mlp(fields)
    is_sparse = [(layer + 1) % step == 0 and layer not in named for layer in range(count)]
    pairs = zip(mixers, is_sparse, strict=True)
    return [LayerConfig(mixer, moe if sparse else dense) for mixer, sparse in pairs]


def layer_numbers(fields: Fields, key: str) -> Sequence[object] | None:
    """Return the numbers of layers, from 0 on, that a file lists under a key; None where it has no such list."""
    count, listed = num_layers(fields), fields.items(key, most=MAX_LAYERS)
    if listed is not None and not all(is_integer(layer) and 0 <= layer < count for layer in listed):
        raise fields.refuse(key, f"numbers of layers below num_hidden_layers = {count}")
    return listed


def read_activation(fields: Fields, key: str = "") -> Activation:
    """Return the activation of feed-forwards, or the one under this key."""
    key = key or ("hidden_activation" if "hidden_activation" in fields.defaults else "hidden_act")
    name = fields.optional_text(key) or str(fields.defaults[key])
    if name not in _ACTIVATIONS:
        raise unsupported(fields.source, f"the {key} {show(name)}", ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


# The rest of a file


def eos_ids(fields: Fields) -> tuple[int, ...]:
    """Return the ids that end a sequence, each once."""
    value = fields.get("eos_token_id")
    if not isinstance(value, list):
        single = fields.optional_integer("eos_token_id", 0, _MAX_TOKEN_ID)
        return () if single is None else (single,)
    ids = fields.items("eos_token_id", most=_MAX_EOS_TOKENS) or []
    found = [token for token in ids if is_integer(token) and 0 <= token <= _MAX_TOKEN_ID]
    if len(found) < len(ids):
        raise fields.refuse("eos_token_id", f"token ids from 0 to {_MAX_TOKEN_ID}")
    return tuple(dict.fromkeys(found))


def _dtype(fields: Fields) -> StoredDtype | None:
    name = fields.optional_text("dtype") or fields.optional_text("torch_dtype") or "auto"
    if name == "auto":  # as the tensors are
        return None
    if name.removeprefix("torch.") not in _DTYPES:
        raise unsupported(fields.source, f"the dtype {show(name)}", ", ".join(_DTYPES))
    return _DTYPES[name.removeprefix("torch.")]


def unsupported(source: str, what: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source}: {what} cannot run here", why=f"supported: {known}", fix="choose another model: localllm list --all"
    )
