"""OLMo Hybrid: OLMo's attention, mostly without rotation, and Gated DeltaNet whose states may change their sign."""

from __future__ import annotations

from dataclasses import replace

from localllm.layers.config import AttentionConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_HIDDEN,
    hybrid_mixers,
    num_layers,
    read_attentions,
    read_delta_net,
    read_mlp,
    read_model,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, LINEAR

DEFAULTS: dict[str, object] = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": 100257,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_NORM_EPS = 1e-5  # of the norm behind the heads, whatever the file says of the others
_RENAMES = (
    ("attention_layer_norm", "input_layernorm"),
    ("feedforward_layer_norm", "post_attention_layernorm"),
    ("linear_attn.q_proj", "linear_attn.in_proj_q"),
    ("linear_attn.k_proj", "linear_attn.in_proj_k"),
    ("linear_attn.v_proj", "linear_attn.in_proj_v"),
    ("linear_attn.g_proj", "linear_attn.in_proj_z"),
    ("linear_attn.b_proj", "linear_attn.in_proj_b"),
    ("linear_attn.a_proj", "linear_attn.in_proj_a"),
    ("linear_attn.o_proj", "linear_attn.out_proj"),
    ("linear_attn.o_norm", "linear_attn.norm"),
)


def parse(fields: Fields) -> ModelConfig:
    fields = _with_linear_defaults(with_defaults(fields, DEFAULTS))
    beta_scale = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
    delta_net = read_delta_net(fields, beta_scale=beta_scale, norm_eps=_NORM_EPS)
    mixers, mlp = hybrid_mixers(fields, _attention(fields), delta_net, _usual_kinds(fields)), read_mlp(fields)
    layers = [LayerConfig(mixer, mlp, "post" if isinstance(mixer, AttentionConfig) else "pre") for mixer in mixers]
    return read_model(fields, layers, stored=StoredForm(_RENAMES, delta_rows="apart"))


def _attention(fields: Fields) -> AttentionConfig:
    """Return the attention of a full layer: where the file says that RoPE has no base, nothing rotates."""
    has_bias, parameters = fields.flag("attention_bias"), fields.section("rope_parameters")
    rotates = parameters is None or "rope_theta" not in parameters.raw or parameters.raw["rope_theta"] is not None
    attention = read_attentions(fields, qk_norm="full", has_bias=has_bias, has_output_bias=has_bias)[0]
    return attention if rotates else replace(attention, rotary_dim=0)


def _usual_kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of layers of which every fourth is full, or the last one of fewer."""
    layers = num_layers(fields)
    kinds = [LINEAR if layer % 4 != 3 else FULL for layer in range(layers)]
    return (*kinds[:-1], FULL) if FULL not in kinds else tuple(kinds)


def _with_linear_defaults(fields: Fields) -> Fields:
    """Return the fields with the heads of linear layers, which follow from the others where they are not named."""
    heads, hidden = fields.get("num_attention_heads"), fields.integer("hidden_size", 1, MAX_HIDDEN)
    defaults = {**fields.defaults, "linear_num_key_heads": heads, "linear_num_value_heads": heads}
    raw = {key: value for key, value in fields.raw.items() if value is not None or not key.startswith("linear_")}
    fields = replace(fields, raw=raw, defaults=defaults)
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_HIDDEN)
    defaults["linear_key_head_dim"] = int(0.75 * hidden / key_heads)
    key_dim = fields.get("linear_key_head_dim")
    defaults["linear_value_head_dim"] = 2 * key_dim if isinstance(key_dim, int) else None
    return fields
