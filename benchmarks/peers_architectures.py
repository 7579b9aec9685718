"""What llama.cpp's GGUF files hold of each architecture that it shares with localllm: keys, and tensors by their names.

Made of the config.json of a model, as `localllm.gguf` makes that of them. Imports nothing of localllm: it also runs in
the interpreter that has llama_cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]  # config.json, with what its family takes for absent keys
Shapes = dict[str, tuple[int, ...]]  # of tensors, rows first, as in torch
Keys = dict[str, Any]  # of metadata, without the architecture in front
SIGMOID = 2  # what chooses experts


@dataclass(frozen=True)
class Architecture:
    """block: the tensors of one layer, by their names behind its number. outer: those beside embedding and head."""

    name: str
    keys: Callable[[Config], Keys]
    block: Callable[[Config, int], Shapes]
    outer: Callable[[Config], Shapes]
    defaults: Config


def architecture(shape: Mapping[str, Any]) -> Architecture:
    return ARCHITECTURES[shape["model_type"]]


def completed(shape: Mapping[str, Any]) -> Config:
    """Return a config.json with its family's defaults."""
    return {"tie_word_embeddings": False, **architecture(shape).defaults, **shape}


# Parts of layers


def _weights(shapes: Shapes) -> Shapes:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _norms(config: Config, *names: str) -> Shapes:
    return _weights(dict.fromkeys(names, (config["hidden_size"],)))


def _last_norm(config: Config) -> Shapes:
    return _norms(config, "output_norm")


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attention(config: Config, *, is_gated: bool = False, has_norms: bool = False) -> Shapes:
    """is_gated: each head's gate is beside its query. has_norms: of the queries and keys of each head."""
    hidden, head_dim = config["hidden_size"], _head_dim(config)
    mixed, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    rows = {"attn_q": 2 * mixed if is_gated else mixed, "attn_k": kv, "attn_v": kv}
    shapes: Shapes = {**{name: (count, hidden) for name, count in rows.items()}, "attn_output": (hidden, mixed)}
    return _weights(shapes | ({"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)} if has_norms else {}))


def _mlp(config: Config, width: int, kind: str = "") -> Shapes:
    hidden = config["hidden_size"]
    inward = {f"ffn_{part}{kind}": (width, hidden) for part in ("gate", "up")}
    return _weights({**inward, f"ffn_down{kind}": (hidden, width)})


def _experts(config: Config, count: int, width: int) -> Shapes:
    stacked = {name: (count, *shape) for name, shape in _mlp(config, width, "_exps").items()}
    return {**stacked, "ffn_gate_inp.weight": (count, config["hidden_size"])}


def _mamba2(config: Config) -> Shapes:
    hidden, heads, features = config["hidden_size"], config["mamba_n_heads"], _mamba2_features(config)
    groups = config["mamba_n_groups"]
    channels = features + 2 * groups * config["mamba_d_state"]
    matrices = {"ssm_in": (features + channels + heads, hidden), "ssm_out": (hidden, features)}
    norm = {"ssm_norm": (groups, features // groups)} if config["mamba_rms_norm"] else {}
    vectors = {"ssm_conv1d.bias": (channels,), "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1)}
    return {**_weights({**matrices, "ssm_conv1d": (channels, config["mamba_d_conv"]), **norm}), **vectors}


def _mamba2_features(config: Config) -> int:
    return int(config["mamba_n_heads"] * config["mamba_d_head"])


# Keys that several architectures have


def _sizes(config: Config, width: int) -> Keys:
    """width: of the feed-forward."""
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": width,
        "vocab_size": config["vocab_size"],
    }


def _heads(config: Config, width: int) -> Keys:
    """Return the sizes, and the keys of what attends."""
    return {
        **_sizes(config, width),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": int(_head_dim(config) * config.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
    }


def _top_k(config: Config, count: int, width: int) -> Keys:
    used = config["num_experts_per_tok"]
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _ssm(config: Config) -> Keys:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": _mamba2_features(config),
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.group_count": config["mamba_n_groups"],
    }


def _kv_heads(config: Config, attends: Callable[[Config, int], bool]) -> Keys:
    """Return the heads of keys of each layer: none where it does not attend."""
    layers = range(config["num_hidden_layers"])
    return {"attention.head_count_kv": [config["num_key_value_heads"] * attends(config, layer) for layer in layers]}


# Architectures


def _llama_keys(config: Config) -> Keys:
    return _heads(config, config["intermediate_size"])


def _llama_block(config: Config, _layer: int) -> Shapes:
    norms = _norms(config, "attn_norm", "ffn_norm")
    return {**_attention(config), **_mlp(config, config["intermediate_size"]), **norms}


def _qwen3moe_keys(config: Config) -> Keys:
    experts = _top_k(config, config["num_experts"], config["moe_intermediate_size"])
    return _heads(config, config["intermediate_size"]) | experts


def _qwen3moe_block(config: Config, _layer: int) -> Shapes:
    experts = _experts(config, config["num_experts"], config["moe_intermediate_size"])
    return {**_attention(config, has_norms=True), **experts, **_norms(config, "attn_norm", "ffn_norm")}


def _qwen35_keys(config: Config) -> Keys:
    return _heads(config, config["intermediate_size"]) | {
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config["full_attention_interval"],
    }


def _qwen35_block(config: Config, layer: int) -> Shapes:
    is_full = not (layer + 1) % config["full_attention_interval"]
    mixer = _attention(config, is_gated=True, has_norms=True) if is_full else _delta_net(config)
    norms = _norms(config, "attn_norm", "post_attention_norm")
    return {**mixer, **_mlp(config, config["intermediate_size"]), **norms}


def _delta_net(config: Config) -> Shapes:
    hidden, heads, value_dim = (
        config[key] for key in ("hidden_size", "linear_num_value_heads", "linear_value_head_dim")
    )
    values = heads * value_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    matrices: Shapes = {"attn_qkv": (channels, hidden), "attn_gate": (values, hidden), "ssm_out": (hidden, values)}
    gates: Shapes = {"ssm_alpha": (heads, hidden), "ssm_beta": (heads, hidden)}
    conv: Shapes = {"ssm_conv1d": (channels, config["linear_conv_kernel_dim"]), "ssm_norm": (value_dim,)}
    return {**_weights({**matrices, **gates, **conv}), "ssm_dt.bias": (heads,), "ssm_a": (heads,)}


def _gpt_oss_keys(config: Config) -> Keys:
    scaling, width = config["rope_scaling"], config["intermediate_size"]
    return {
        **_heads(config, width),
        **_top_k(config, config["num_local_experts"], width),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gpt_oss_block(config: Config, _layer: int) -> Shapes:
    attention = _attention(config)
    matrices = {**attention, **_experts(config, config["num_local_experts"], config["intermediate_size"])}
    biases = {f"{name.removesuffix('weight')}bias": shape[:-1] for name, shape in matrices.items()}
    sinks = _weights({"attn_sinks": (config["num_attention_heads"],)})
    return {**matrices, **biases, **sinks, **_norms(config, "attn_norm", "post_attention_norm")}


def _deepseek2_keys(config: Config) -> Keys:
    """Return the keys of attention as it computes: over latents, which are the one head of keys."""
    latent, shared = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        **_heads({"num_key_value_heads": 1, **config}, config["intermediate_size"]),
        **_top_k(config, config["n_routed_experts"], config["moe_intermediate_size"]),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + shared,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": shared,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
    }


def _deepseek2_block(config: Config, layer: int) -> Shapes:
    mixer = {**_latent_attention(config), **_norms(config, "attn_norm", "ffn_norm")}
    if layer < config["first_k_dense_replace"]:
        return {**mixer, **_mlp(config, config["intermediate_size"])}
    count, width = config["n_routed_experts"], config["moe_intermediate_size"]
    shared = _mlp(config, config["n_shared_experts"] * width, "_shexp")
    return {**mixer, **_experts(config, count, width), **shared, "exp_probs_b.bias": (count,)}


def _latent_attention(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, latent, value_dim = config["q_lora_rank"], config["kv_lora_rank"], config["v_head_dim"]
    plain, shared = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return _weights(
        {
            "attn_q_a": (rank, hidden),
            "attn_q_a_norm": (rank,),
            "attn_q_b": (heads * (plain + shared), rank),
            "attn_kv_a_mqa": (latent + shared, hidden),
            "attn_kv_a_norm": (latent,),
            "attn_k_b": (heads, latent, plain),
            "attn_v_b": (heads, value_dim, latent),
            "attn_output": (hidden, heads * value_dim),
        }
    )


def _lfm2_keys(config: Config) -> Keys:
    return {
        **_heads(config, _lfm2_width(config)),
        **_kv_heads(config, _lfm2_attends),
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _lfm2_attends(config: Config, layer: int) -> bool:
    return layer in config["full_attn_idxs"]


def _lfm2_width(config: Config) -> int:
    """Return what a gate leaves of the width that the file says."""
    multiple = int(config["block_multiple_of"])
    return -(-int(2 * config["block_ff_dim"] / 3) // multiple) * multiple


def _lfm2_block(config: Config, layer: int) -> Shapes:
    hidden = config["hidden_size"]
    conv: Shapes = {"in_proj": (3 * hidden, hidden), "conv": (hidden, config["conv_L_cache"])}
    short = _weights({f"shortconv.{name}": shape for name, shape in {**conv, "out_proj": (hidden, hidden)}.items()})
    mixer = _attention(config, has_norms=True) if _lfm2_attends(config, layer) else short
    return {**mixer, **_mlp(config, _lfm2_width(config)), **_norms(config, "attn_norm", "ffn_norm")}


def _granitehybrid_keys(config: Config) -> Keys:
    return {
        **_heads(config, config["shared_intermediate_size"]),
        **_kv_heads(config, _granitehybrid_attends),
        **_ssm(config),
        "rope.scaling.finetuned": False,  # nothing rotates
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "attention.scale": float(config["attention_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
    }


def _granitehybrid_attends(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "attention")


def _granitehybrid_block(config: Config, layer: int) -> Shapes:
    mixer = _attention(config) if _granitehybrid_attends(config, layer) else _mamba2(config)
    norms = _norms(config, "attn_norm", "ffn_norm")
    return {**mixer, **_mlp(config, config["shared_intermediate_size"]), **norms}


def _falcon_h1_keys(config: Config) -> Keys:
    return _heads(config, config["intermediate_size"]) | _ssm(config)


def _falcon_h1_block(config: Config, _layer: int) -> Shapes:
    mixers = {**_attention(config), **_mamba2(config)}
    norms: Shapes = {"attn_norm.weight": (config["hidden_size"],), "ffn_norm": (config["hidden_size"],)}
    return {**mixers, **_mlp(config, config["intermediate_size"]), **norms}


def _rwkv7_keys(config: Config) -> Keys:
    return {
        **_sizes(config, config["intermediate_size"]),
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": config["norm_eps"],
        "attention.decay_lora_rank": config["decay_low_rank_dim"],
        "attention.iclr_lora_rank": config["a_low_rank_dim"],
        "attention.value_residual_mix_lora_rank": config["v_low_rank_dim"],
        "attention.gate_lora_rank": config["gate_low_rank_dim"],
        "wkv.head_size": config["head_dim"],
    }


def _rwkv7_block(config: Config, layer: int) -> Shapes:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    ranks = {part: config[f"{key}_low_rank_dim"] for part, key in zip("wavg", ("decay", "a", "v", "gate"), strict=True)}
    if not layer:
        ranks["v"] = ranks["a"]  # of the first layer, which does not use it
    pairs: Shapes = {}
    for part, rank in ranks.items():
        pairs |= {f"time_mix_{part}1": (rank, hidden), f"time_mix_{part}2": (hidden, rank)}
    square = (hidden, hidden)
    matrices: Shapes = {f"time_mix_{part}": square for part in ("receptance", "key", "value", "output")}
    matrices |= {"channel_mix_key": (width, hidden), "channel_mix_value": (hidden, width)}
    vectors = [f"time_mix_{part}" for part in ("w0", "a0", "v0", "k_k", "k_a", "r_k")]
    mixes = _weights({**pairs, **matrices, "time_mix_lerp_fused": (6, 1, 1, hidden)})
    norms = _layer_norms(config, "attn_norm", "attn_norm_2", "time_mix_ln")
    return {**mixes, **_norms(config, *vectors, "channel_mix_lerp_k"), **norms}


def _layer_norms(config: Config, *names: str) -> Shapes:
    return {f"{name}.{part}": (config["hidden_size"],) for name in names for part in ("weight", "bias")}


def _rwkv7_outer(config: Config) -> Shapes:
    return _layer_norms(config, "token_embd_norm", "output_norm")


_LLAMA = Architecture("llama", _llama_keys, _llama_block, _last_norm, {})
_MAMBA2 = {"mamba_d_conv": 4, "mamba_rms_norm": True}
_FALCON_H1 = {**_MAMBA2, "mamba_rms_norm": False, "rms_norm_eps": 1e-5}
_GRANITE = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_LFM2 = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "conv_L_cache": 3, "block_multiple_of": 256}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3_moe": Architecture("qwen3moe", _qwen3moe_keys, _qwen3moe_block, _last_norm, {}),
    "qwen3_5_text": Architecture("qwen35", _qwen35_keys, _qwen35_block, _last_norm, {}),
    "gpt_oss": Architecture("gpt-oss", _gpt_oss_keys, _gpt_oss_block, _last_norm, {}),
    "glm4_moe_lite": Architecture(
        "deepseek2",
        _deepseek2_keys,
        _deepseek2_block,
        _last_norm,
        {"norm_topk_prob": True, "routed_scaling_factor": 1.8},
    ),
    "lfm2": Architecture("lfm2", _lfm2_keys, _lfm2_block, lambda config: _norms(config, "token_embd_norm"), _LFM2),
    "granitemoehybrid": Architecture(
        "granitehybrid", _granitehybrid_keys, _granitehybrid_block, _last_norm, {**_MAMBA2, **_GRANITE}
    ),
    "falcon_h1": Architecture("falcon-h1", _falcon_h1_keys, _falcon_h1_block, _last_norm, _FALCON_H1),
    "rwkv7": Architecture("rwkv7", _rwkv7_keys, _rwkv7_block, _rwkv7_outer, {}),
}
