"""GGUF's names of tensors in the names of Hugging Face, and what a reader must undo of how llama.cpp stores them.

A mixture of experts has one tensor for all experts of a layer, [experts, out features, in features]: it is named like
one expert's without a number, "model.layers.3.mlp.experts.gate_proj".
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_PART = re.compile(r"blk\.(\d{1,5})\.((?:shortconv\.)?\w+?)(?:\.(\d{1,5}))?(?:\.(weight|bias|scale|input_scale))?")
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
}
STACKED = ("altup_proj.weight", "altup_unembd_proj.weight")  # which are matrices of their own in Hugging Face's form
# Factors of the rotary embedding, which become part of the configuration, and frequencies that everybody computes.
_NO_WEIGHTS = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"})
HEAD_NORMS = (".attn_q_norm.", ".attn_k_norm.")
_NEXT_TOKENS = "nextn"  # layers that predict further tokens, which are not run
# What Ollama's files have beside the text model: encoders of images and sounds, some under Hugging Face's names, and
# layers for further tokens.
_BESIDE = ("v.", "a.", "mm.", "mtp.", "model.vision_tower.", "model.audio_tower.", "model.embed_")
_NO_FIRST_VALUES = "blk.0.time_mix_v"  # with a number: what RWKV-7's first layer would mix its own values with
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_sinks": "self_attn.sinks",
}
_GATED = ("ffn_gate", "ffn_up", "ffn_down")
_ROUTER = "ffn_gate_inp.weight"
# Norms behind a block, which some families have beside those in front of it, and some instead.
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORM_BETWEEN = {"post_attention_norm": "post_attention_layernorm"}
_GEMMA = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_PER_LAYER = {
    **_GEMMA,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_PER_LAYER,
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
}
# What is no factor of a matrix there, although it is called like one.
_GEMMA4_SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}
_GATE_AND_UP = {"ffn_up": "mlp.gate_up_proj"}  # the gate's rows, then those of up
# The weights of its norms of queries and keys are all alike: numbers of the configuration, which nobody asks for here.
_MUSE_GLIMMER = {
    **_GEMMA,
    "attn_gate": "self_attn.gate_proj",
    "attn_q_norm": "self_attn.q_scale",
    "attn_k_norm": "self_attn.k_scale",
}
_GATED_DELTA_NET = {
    **_NORM_BETWEEN,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of early files: queries, keys, values and gates of a key head after another
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# "attn_kv_b" is what makes the keys and the values of all heads of a latent; later files have its two parts.
_LATENT_ATTENTION = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_MAMBA = {
    **_MAMBA2,
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
_SHORT_CONV = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_KIMI_LINEAR = {
    **_LATENT_ATTENTION,
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_a": "self_attn.A_log",
    "ssm_norm": "self_attn.o_norm",
}
# In the names of flash-linear-attention's checkpoints.
_RWKV7 = {
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_lerp_fused": "attn.x_x",
    **{f"time_mix_{part}0": f"attn.{part}_lora.lora.2.bias" for part in "wav"},
    **{f"time_mix_{part}1": f"attn.{part}_lora.lora.0" for part in "wavg"},
    **{f"time_mix_{part}2": f"attn.{part}_lora.lora.2" for part in "wavg"},
    **{f"time_mix_{part}": f"attn.{part}" for part in ("k_k", "k_a", "r_k")},
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
    "channel_mix_lerp_k": "ffn.x_k",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
}
_LAST_NORM = {"token_embd_norm": "model.norm"}  # which these files call so
_FIRST_NORM = {"token_embd_norm": "model.embedding_norm"}
_OUTER_OWN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"lfm2": _LAST_NORM, "lfm2moe": _LAST_NORM, "rwkv7": _FIRST_NORM}
)
_SINGLE_BLOCKS = ("nemotron_h", "nemotron_h_moe")  # a layer of theirs is one block, and has one norm
_OWN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma2": _GEMMA,
        "gemma3": _GEMMA,
        "gemma3n": _GEMMA3N,
        "gemma4": _GEMMA4,
        "olmo2": _NORMS_BEHIND,
        "glm4moe": _NORM_BETWEEN,
        "qwen3next": _GATED_DELTA_NET,
        "qwen35": _GATED_DELTA_NET,
        "qwen35moe": _GATED_DELTA_NET,
        "gpt-oss": _NORM_BETWEEN,
        "phi3": _GATE_AND_UP,
        "chatglm": _GATE_AND_UP,
        "glm4": {**_GEMMA, **_GATE_AND_UP},
        "seed_oss": _NORM_BETWEEN,
        "exaone4": _NORMS_BEHIND,
        "muse-glimmer": _MUSE_GLIMMER,
        "deepseek2": _LATENT_ATTENTION,
        "minicpm3": _LATENT_ATTENTION,
        "mamba": _MAMBA,
        "jamba": _MAMBA,
        "mamba2": _MAMBA2,
        "granitehybrid": _MAMBA2,
        "falcon-h1": _MAMBA2,
        "nemotron_h": _MAMBA2,
        "nemotron_h_moe": _MAMBA2,
        "lfm2": _SHORT_CONV,
        "lfm2moe": _SHORT_CONV,
        "kimi-linear": _KIMI_LINEAR,
        "rwkv7": _RWKV7,
    }
)
# Parts that are called the same whatever their suffix is.
_WITHOUT_SUFFIX = frozenset(
    {"exp_probs_b", "ssm_a", "ssm_d", "attn_sinks", "layer_output_scale", "altup_correct_scale"}
    | {f"time_mix_{part}" for part in ("lerp_fused", "w0", "a0", "v0", "k_k", "k_a", "r_k")}
    | {"channel_mix_lerp_k"}
)


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How the weights of an architecture differ from those of Hugging Face.

    Of layers with states, -exp(A_log) stands in place of A_log everywhere; of Mamba 2, that and D are [heads, 1], and a
    norm's weights [groups, features]. Of Falcon H1, all multipliers are in the weights. Of latent
    attention, what makes keys of latents is turned round where it is stored apart from what makes values: [heads,
    features of a latent, features of a key], which takes queries to latents.

    pairs_heads: the rows of q and k, and their biases, are in pairs that rotate together. With those half a head apart,
        as Llama's are in Hugging Face's form, they are `rows.view(heads, head_dim // 2, 2, K).transpose(1, 2)`.
    norm_offset: what was added to the weights of all norms, but those of Gated DeltaNet's heads, and the last one of a
        family whose last one has an offset of its own.
    tiles_value_heads: value heads of Gated DeltaNet, and all that each has one of or some of, the columns of out_proj
        too, are in an order in which value head h belongs to key head h % key heads. In Hugging Face's those of one key
        head follow each other.
    scales_heads: the weights of the norms of queries and of keys are one number each, which Hugging Face's config has.
    lists_coefficients: what an activation has learnt is in the metadata, a list for all layers.
    """

    pairs_heads: bool = False
    norm_offset: float = 0.0
    tiles_value_heads: bool = False
    scales_heads: bool = False
    lists_coefficients: bool = False


_PAIRED = GgufForm(pairs_heads=True)
_OFFSET = GgufForm(norm_offset=1.0)
_OFFSET_TILED = GgufForm(norm_offset=1.0, tiles_value_heads=True)
_FORMS: Mapping[str, GgufForm] = MappingProxyType(
    {
        "llama": _PAIRED,
        "mistral3": _PAIRED,
        "granitemoe": _PAIRED,
        "ernie4_5-moe": _PAIRED,
        "ernie4_5": _PAIRED,
        "smollm3": _PAIRED,
        "granite": _PAIRED,
        "granitehybrid": _PAIRED,
        "chatglm": _PAIRED,
        "glm4": _PAIRED,
        "arcee": _PAIRED,
        "cohere2": _PAIRED,
        "deepseek2": _PAIRED,
        "muse-glimmer": GgufForm(pairs_heads=True, norm_offset=1.0, scales_heads=True),
        "apertus": GgufForm(lists_coefficients=True),
        "gemma2": _OFFSET,
        "gemma3": _OFFSET,
        "nemotron": _OFFSET,
        "qwen3next": _OFFSET,
        "qwen35": _OFFSET_TILED,
        "qwen35moe": _OFFSET_TILED,
    }
)


def stored_form(architecture: str) -> GgufForm:
    """Return what a reader of this architecture's tensors must undo."""
    return _FORMS.get(architecture, GgufForm())


def hf_name(name: str, architecture: str, stored: Container[str] = ()) -> str | None:
    """Return Hugging Face's name of a tensor; None where `holds_weights` is false, and for one that is not known.

    stored: the names of all tensors: an MLP that is beside a router is a shared expert, and the norm of a layer that is
        only an MLP the one in front of that.
    A fused "attn_qkv" has the rows of q, of k and of v one below the other. "ssm_a" is not A_log: see `GgufForm`.
    """
    stem, _, suffix = name.rpartition(".")
    outer = _OUTER_OWN.get(architecture, {}).get(stem) or _OUTER.get(stem)
    if outer is not None:
        return f"{outer}.{suffix}"
    found = _PART.fullmatch(name)
    if found is None:
        return None
    layer, part, expert, suffix = found.groups()
    inner = _OWN.get(architecture, {}).get(part) or _COMMON.get(part)
    if inner is None or (expert is not None and part not in _GATED):
        return None
    if part == "ffn_norm" and suffix is None:  # as Falcon H1's files have it
        suffix = "weight"
    downs = (f"blk.{layer}.ffn_down{kind}.weight" for kind in ("", "_exps"))
    if part == "attn_norm" and architecture in _SINGLE_BLOCKS and any(each in stored for each in downs):
        inner = _COMMON["ffn_norm"]
    if architecture == "gemma4" and suffix == "scale" and part in _GEMMA4_SCALES:
        return f"model.layers.{int(layer)}.{_GEMMA4_SCALES[part]}"
    if expert is not None:  # files of early 2024 have a tensor for each expert
        inner = inner.replace("mlp.", f"mlp.experts.{expert}.")
    elif part in _GATED and f"blk.{layer}.{_ROUTER}" in stored:
        inner = inner.replace("mlp.", "mlp.shared_expert.")
    is_whole = part in _WITHOUT_SUFFIX or inner.endswith(".dt_bias") or (part.endswith("_exps") and suffix == "weight")
    return f"model.layers.{int(layer)}.{inner}" + ("" if is_whole or suffix is None else f".{suffix}")


def holds_weights(name: str) -> bool:
    """Return whether a tensor is part of the model. Factors of the rotary embedding are not, nor is what only layers
    that predict further tokens have, nor an encoder of images or sounds, nor what fills a place."""
    parts = name.split(".")
    is_other = _NEXT_TOKENS in parts or name.startswith(_BESIDE) or parts[-1] == "input_scale"
    is_other |= name.startswith(tuple(f"{_NO_FIRST_VALUES}{number}." for number in range(3)))
    return not is_other and _NO_WEIGHTS.isdisjoint(parts)
