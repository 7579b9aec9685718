"""Gemma 4, the text model: heads of two sizes, norms of values, keys and values that later layers share, embeddings of
each token for each layer, and in one model experts beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.layers.config import AttentionConfig, MLPConfig, MoEConfig, PerLayerConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    hidden_size,
    pattern_kinds,
    read_activation,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    unsupported,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL

DEFAULTS: dict[str, object] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "global_head_dim": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
UNIFIED_DEFAULTS = {"max_position_embeddings": 262144, "sliding_window": 1024}
_MIXTURE_RENAMES = (
    *((f".mlp.{name}_proj.", f".mlp.shared_expert.{name}_proj.") for name in ("gate", "up", "down")),
    (".router.proj.", ".mlp.gate."),
    (".experts.", ".mlp.experts."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS | (UNIFIED_DEFAULTS if _is_unified(fields) else {}))
    if fields.optional_text("use_bidirectional_attention") == "all":
        raise unsupported(fields.source, "an encoder (use_bidirectional_attention)", "models that write text")
    kinds = pattern_kinds(fields)
    kinds = (*kinds[:-1], FULL)  # whatever the file says of the last layer
    attentions = _attentions(fields, kinds)
    mlp, doubles = read_mlp(fields), fields.flag("use_double_wide_mlp")
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if doubles else mlp
    bodies = [mlp if each.kv_of_layer is None else wide for each in attentions]
    moe = _mixture(fields, mlp) if fields.flag("enable_moe_block") else None
    return read_model(
        fields,
        [LayerConfig(each, moe or body, "sandwich", True) for each, body in zip(attentions, bodies, strict=True)],
        embedding_scale=hidden_size(fields) ** 0.5,
        per_layer=read_per_layer(fields),
        final_softcap=fields.optional_number("final_logit_softcapping", 1e-6, 1e9),
        stored=StoredForm(_MIXTURE_RENAMES if moe else ()),
    )


def _attentions(fields: Fields, kinds: Sequence[str]) -> list[AttentionConfig]:
    """Return each layer's attention."""
    has_bias = fields.flag("attention_bias")
    own, wide = (
        read_attentions(
            each, kinds, scale=1.0, qk_norm="head", norms_values=True, has_bias=has_bias, has_output_bias=has_bias
        )
        for each in (fields, _of_full_layers(fields, kinds))
    )
    takes_keys = fields.flag("attention_k_eq_v")
    layers = [
        replace(wide[layer], value_from_key=takes_keys) if kind == FULL else own[layer]
        for layer, kind in enumerate(kinds)
    ]
    return sharing_keys(fields, layers, kinds)


def sharing_keys(fields: Fields, attentions: Sequence[AttentionConfig], kinds: Sequence[str]) -> list[AttentionConfig]:
    """Return the layers' attention, of which the last ones read keys and values of the last own layer of their kind."""
    layers, first = [*attentions], len(kinds) - fields.integer("num_kv_shared_layers", 0, MAX_LAYERS)
    for layer in range(max(first, 0), len(kinds)):
        source = max((other for other in range(first) if kinds[other] == kinds[layer]), default=None)
        if source is None:
            raise fields.refuse("num_kv_shared_layers", f"a layer of {kinds[layer]} before those that share its keys")
        layers[layer] = replace(layers[layer], kv_of_layer=source, value_from_key=False, norms_values=False)
    return layers


def _of_full_layers(fields: Fields, kinds: Sequence[str]) -> Fields:
    """Return the fields with the heads of full layers, which a file names beside the others, or layer by layer."""
    layer = kinds.index(FULL)
    listed = fields.section("per_layer_config")
    number = str(layer).rjust(len(str(len(kinds) - 1)), "0")
    own = None if listed is None else listed.section(number) or listed.section(str(layer))
    if own is not None:
        return replace(fields, raw={**fields.raw, **own.raw})
    raw = {**fields.raw, "head_dim": fields.get("global_head_dim")}
    heads = fields.optional_integer("num_global_key_value_heads", 1, MAX_HEADS)
    is_meant = fields.flag("attention_k_eq_v") or _is_unified(fields)  # whose files have no other key for it
    return replace(fields, raw=raw | ({"num_key_value_heads": heads} if heads and is_meant else {}))


def _is_unified(fields: Fields) -> bool:
    return str(fields.get("model_type")).startswith("gemma4_unified")


def read_per_layer(fields: Fields) -> PerLayerConfig | None:
    if _is_unified(fields):
        return None
    features = fields.optional_integer("hidden_size_per_layer_input", 0, 1 << 16)
    if not features:
        return None
    if not fields.flag("tie_word_embeddings", if_null=True):
        raise unsupported(fields.source, "per-layer embeddings beside a head of its own", "tie_word_embeddings true")
    vocab_size = fields.integer("vocab_size_per_layer_input", 1, MAX_VOCAB)
    return PerLayerConfig(vocab_size, features, read_activation(fields))


def _mixture(fields: Fields, mlp: MLPConfig) -> MoEConfig:
    """Return the experts beside the MLP: each part has norms of its own around it."""
    router = read_router(fields, "softmax", top_k="top_k_experts", normalizes=True, has_expert_scales=True)
    return MoEConfig(router, read_mlp(fields, "moe_intermediate_size"), mlp, has_own_norms=True)
