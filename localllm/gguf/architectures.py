"""The keys of a config.json that one of llama.cpp's architectures needs beside those that all have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType

from localllm.gguf.metadata import MAX_LAYERS, Json, Metadata, decimal
from localllm.gguf.names import HEAD_NORMS
from localllm.gguf.rope import DEFAULT_THETA, LLAMA3_FACTORS, factors_of, rope_scaling, share_of

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SOFTMAX, _SIGMOID = 1, 2  # what expert_gating_func is
_PER_LAYER, _RECURRENT = "attention.sliding_window_pattern", "attention.recurrent_layers"


def _plain(model_type: str, **keys: object) -> Callable[[Metadata], Json]:
    """Return what reads a file that says nothing besides."""
    return lambda _: {"model_type": model_type, **keys}


def _llama(file: Metadata) -> Json:
    if file.integer("expert_count", 0):
        own = {"num_local_experts": file.integer("expert_count"), **_top_k(file)}
        return {"model_type": "mixtral", "sliding_window": None, **own}
    return {"model_type": "llama"}


def _mistral3(file: Metadata) -> Json:
    if file.integer("expert_count", 0):
        raise file.unsupported("experts")
    growth = file.number("attention.temperature_scale", 0.0)
    if not growth:
        return {"model_type": "mistral"}
    trained = file.integer("rope.scaling.original_context_length", file.integer("context_length"))
    rope = {"rope_type": "default", **(rope_scaling(file) or {}), "original_max_position_embeddings": trained}
    return {"model_type": "ministral3", "rope_scaling": {**rope, "llama_4_scaling_beta": growth}}


def _qwen3moe(file: Metadata) -> Json:
    return {"model_type": "qwen3_moe", "use_sliding_window": False, "norm_topk_prob": True, **_experts(file)}


def _qwen3vlmoe(file: Metadata) -> Json:
    return {**_qwen3moe(file), "model_type": "qwen3_vl_moe_text"}


def _qwen2moe(file: Metadata) -> Json:
    return {
        "model_type": "qwen2_moe",
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "qkv_bias": file.has_bias,
        **_all_experts(file),
    }


def _qwen3next(file: Metadata) -> Json:
    return {"model_type": "qwen3_next", "norm_topk_prob": True, **_delta_net(file), **_all_experts(file)}


def _qwen35(file: Metadata) -> Json:
    return {"model_type": "qwen3_5_text", **_delta_net(file)}


def _qwen35moe(file: Metadata) -> Json:
    return {"model_type": "qwen3_5_moe_text", **_delta_net(file), **_all_experts(file)}


def _phi3(file: Metadata) -> Json:
    return {"model_type": "phi3", **_original_context(file)}


def _phimoe(file: Metadata) -> Json:
    scaling = rope_scaling(file)
    if scaling is not None and file.get("rope.scaling.attn_factor") is not None:
        scale = file.number("rope.scaling.attn_factor")
        scaling |= {"short_mscale": scale, "long_mscale": scale}
    return {
        "model_type": "phimoe",
        "num_local_experts": file.integer("expert_count"),
        "lm_head_bias": "output.bias" in file.tensors,
        "rope_scaling": scaling,
        **_top_k(file),
        **_original_context(file),
    }


def _gemma2(file: Metadata) -> Json:
    return {
        "model_type": "gemma2",
        "sliding_window": file.window or 4096,
        "layer_types": _layer_types(file, 2),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, largest=46),
    }


def _gemma3(file: Metadata) -> Json:
    return {
        "model_type": "gemma3_text",
        "layer_types": _layer_types(file, 6 if file.window else 1),
        "rope_local_base_freq": file.number("rope.freq_base_swa", DEFAULT_THETA),
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(file, largest=62),
    }


def _gemma3n(file: Metadata) -> Json:
    deviations = file.listed("activation_sparsity_scale")
    shares = [round(NormalDist().cdf(each), 6) for each in deviations if isinstance(each, float)]
    return {
        "model_type": "gemma3n_text",
        "layer_types": _layer_types(file, 5),
        "intermediate_size": [*file.listed("feed_forward_length")],
        "activation_sparsity_pattern": shares or None,
        "rope_local_base_freq": file.number("rope.freq_base_swa", DEFAULT_THETA),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": file.integer("attention.shared_kv_layers", max(file.num_layers - 20, 0)),
        "altup_active_idx": file.integer("altup.active_idx", 0),
        "altup_num_inputs": file.integer("altup.num_inputs", 4),
        "laurel_rank": file.width("laurel_r.weight"),
        **_per_layer(file),
    }


def _gemma4(file: Metadata) -> Json:
    factors_of(file, LLAMA3_FACTORS)  # which says what turns in full layers
    head_dim, kinds = file.integer("attention.key_length_swa"), _layer_types(file, 6)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if file.integer(key, head_dim) != head_dim:
            raise file.unsupported(f"{key} other than attention.key_length_swa")
    full = {"rope_theta": file.number("rope.freq_base", DEFAULT_THETA), **(rope_scaling(file) or {})}
    sliding = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", DEFAULT_THETA)}
    return {
        "model_type": "gemma4_text",
        "layer_types": kinds,
        "head_dim": head_dim,
        "global_head_dim": file.head_dim,
        "rope_scaling": None,
        "rope_parameters": {_FULL: full, _SLIDING: sliding},
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
        **_key_heads(file, kinds),
        **_shared_keys(file),
        **_per_layer(file),
        **(_gemma4_experts(file) if file.has("ffn_gate_inp.weight") else {}),
    }


def _key_heads(file: Metadata, kinds: Sequence[str]) -> Json:
    """Return the heads of keys of sliding layers and of full ones; where these lack values, their keys are those."""
    heads: dict[str, object] = {}
    for kind, count in zip(kinds, file.listed("attention.head_count_kv"), strict=False):
        if heads.setdefault(kind, count) != count:
            raise file.unsupported(f"several numbers of heads of keys in layers of {kind}")
    own = file.num_layers - file.integer("attention.shared_kv_layers", 0)
    full = [layer for layer, kind in enumerate(kinds[: max(own, 0)]) if kind == _FULL]
    names = [{f"blk.{layer}.attn_{part}.weight" for part in ("v", "qkv")} for layer in full]
    found: Json = {"num_key_value_heads": heads.get(_SLIDING), "num_global_key_value_heads": heads.get(_FULL)}
    return found | ({"attention_k_eq_v": True} if any(map(file.tensors.keys().isdisjoint, names)) else {})


def _shared_keys(file: Metadata) -> Json:
    """Return how many layers share keys, and whether their feed-forwards are twice as wide as the others."""
    shared, widths = file.integer("attention.shared_kv_layers", 0), file.listed("feed_forward_length")
    first = max(file.num_layers - shared, 0)
    narrow, wide = {*widths[:first]}, {*widths[first:]}
    doubles = len(narrow) == 1 and wide == {2 * each for each in narrow if isinstance(each, int)}
    if len(narrow | wide) > 1 and not doubles:
        raise file.unsupported("another feed_forward_length in each layer")
    return {"num_kv_shared_layers": shared, "use_double_wide_mlp": doubles}


def _gemma4_experts(file: Metadata) -> Json:
    return {
        "enable_moe_block": True,
        "num_experts": file.integer("expert_count"),
        "top_k_experts": file.integer("expert_used_count"),
        "moe_intermediate_size": file.width("ffn_down_exps.weight"),
    }


def _per_layer(file: Metadata) -> Json:
    """Return the features of the embeddings of each layer, and of how many tokens there are any."""
    features = file.integer("embedding_length_per_layer_input", 0)
    tokens = next(iter(file.tensors.get("per_layer_token_embd.weight", ())), 0)
    return {"hidden_size_per_layer_input": features, "vocab_size_per_layer_input": tokens}


def _olmo2(file: Metadata) -> Json:
    return {"model_type": "olmo3", "layer_types": _layer_types(file, 4)} if file.window else {"model_type": "olmo2"}


def _glm4(file: Metadata) -> Json:
    if file.keys.get(f"{file.architecture}.rope.dimension_sections"):
        raise file.unsupported("positions in several directions (GLM-4V)")
    return {"model_type": "glm4"}


def _seed_oss(file: Metadata) -> Json:
    return {"model_type": "seed_oss", "attention_out_bias": file.has("attn_output.bias")}


def _exaone4(file: Metadata) -> Json:
    window = 4096 if file.num_layers == 64 else None  # of the 32B, whose first files do not say it
    return {"model_type": "exaone4", "sliding_window": file.window or window, "layer_types": _layer_types(file, 4)}


def _apertus(_: Metadata) -> Json:
    return {"model_type": "apertus", "rope_parameters": {}}  # which would be scaled where nothing is said


def _cohere2(file: Metadata) -> Json:
    return {
        "model_type": "cohere2",
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "logit_scale": file.number("logit_scale"),
        "layer_types": _layer_types(file, 4),
    }


def _muse_glimmer(file: Metadata) -> Json:
    kinds, theta = _layer_types(file, 4), file.number("rope.freq_base", DEFAULT_THETA)
    return {
        "model_type": "muse_glimmer_text",
        "layer_types": kinds,
        "layer_rope_theta": [theta if kind == _SLIDING else 0 for kind in kinds],
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
        "output_multiplier": file.number("logit_scale"),
        "qk_scale_factor": _query_scale(file),
    }


def _query_scale(file: Metadata) -> float:
    """Return the number that all weights of the norms of queries are; those of keys are 1."""
    lists = file.factors.items()
    scales, ones = ({each for name, values in lists if part in name for each in values} for part in HEAD_NORMS)
    if len(scales) != 1 or ones != {1.0}:
        raise file.unsupported("norms of queries or keys with weights that differ")
    return decimal(scales.pop())


def _stablelm(file: Metadata) -> Json:
    return {
        "model_type": "stablelm",
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "use_qkv_bias": file.has_bias,
        "qk_layernorm": file.has("attn_q_norm.weight"),
        "use_parallel_residual": not file.has("ffn_norm.weight"),  # the key of this name is true for models without it
    }


def _starcoder2(file: Metadata) -> Json:
    # All published ones have this window, which GGUF does not store.
    window, eps = file.window or 4096, file.number("attention.layer_norm_epsilon")
    return {"model_type": "starcoder2", "sliding_window": window, "norm_epsilon": eps}


def _nemotron(file: Metadata) -> Json:
    return {"model_type": "nemotron", "norm_eps": file.number("attention.layer_norm_epsilon")}


def _olmoe(file: Metadata) -> Json:
    own = {"intermediate_size": file.width("ffn_down_exps.weight"), "num_experts": file.integer("expert_count")}
    return {"model_type": "olmoe", "norm_topk_prob": False, **own, **_top_k(file)}


def _glm4moe(file: Metadata) -> Json:
    return {"model_type": "glm4_moe", "use_qk_norm": file.has("attn_q_norm.weight"), **_grouped_experts(file)}


def _dots1(file: Metadata) -> Json:
    return {"model_type": "dots1", "sliding_window": None, **_grouped_experts(file)}


def _ernie(file: Metadata) -> Json:
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": file.integer("expert_count"),
        "moe_k": file.integer("expert_used_count"),
        "moe_num_shared_experts": file.integer("expert_shared_count", 0),
        "moe_intermediate_size": file.width("ffn_down_exps.weight"),
        "moe_layer_start_index": file.integer("leading_dense_block_count", 0),
        "moe_layer_interval": file.integer("interleave_moe_layer_step", 1),
    }


def _granite(file: Metadata) -> Json:
    if file.get("rope.scaling.finetuned") is False:
        raise file.unsupported("queries and keys that do not rotate")
    return {"model_type": "granite", **_multipliers(file)}


def _granitemoe(file: Metadata) -> Json:
    if file.has("ffn_down_shexp.weight"):
        raise file.unsupported("a shared expert")
    return {
        "model_type": "granitemoe",
        "intermediate_size": file.width("ffn_down_exps.weight"),
        "num_local_experts": file.integer("expert_count"),
        **_multipliers(file),
        **_top_k(file),
    }


def _multipliers(file: Metadata) -> Json:
    return {
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "attention_multiplier": file.number("attention.scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }


def _gpt_oss(file: Metadata) -> Json:
    scaling = rope_scaling(file)
    return {
        "model_type": "gpt_oss",
        "intermediate_size": file.width("ffn_down_exps.weight"),
        "num_local_experts": file.integer("expert_count"),
        "layer_types": _layer_types(file, 2),
        # The file does not say that the makers' ramp begins and ends between two features.
        "rope_scaling": None if scaling is None else scaling | {"truncate": False},
        **_top_k(file),
    }


def _minimax_m2(file: Metadata) -> Json:
    own = {"intermediate_size": file.width("ffn_down_exps.weight"), "num_local_experts": file.integer("expert_count")}
    return {"model_type": "minimax_m2", **own, **_top_k(file)}


def _hunyuan_moe(file: Metadata) -> Json:
    return {
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": file.width("ffn_down_exps.weight"),
        "num_experts": file.integer("expert_count"),
        "moe_topk": file.integer("expert_used_count"),
    }


def _deepseek2(file: Metadata) -> Json:
    """Return the keys of DeepSeek V2, or of V3, whose experts sigmoids choose: GLM 4.7 Flash and Kimi K2 are models of
    that, too. Files of 2024 say neither of themselves."""
    gating = file.integer("expert_gating_func", _SIGMOID if file.has("exp_probs_b.bias") else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise file.unsupported(f"experts that are chosen in another way (expert_gating_func {gating})")
    experts = _grouped_experts(file)
    if gating == _SOFTMAX:
        method = "greedy" if experts["n_group"] == 1 else "group_limited_greedy"
        own: Json = {"model_type": "deepseek_v2", "topk_method": method}
    else:
        own = {"model_type": "deepseek_v3"}
    # These files have one head of keys, the latent; those from before that have the heads that are made of it.
    kind = "_mla" if file.get("attention.key_length_mla") is not None else ""
    key_dim, value_dim = (file.integer(f"attention.{each}_length{kind}") for each in ("key", "value"))
    return {**own, **experts, **_latent_attention(file, key_dim, value_dim), "rope_scaling": _latent_scaling(file)}


def _latent_attention(file: Metadata, key_dim: int, value_dim: int) -> Json:
    heads, shared_dim = file.integer("attention.head_count"), file.integer("rope.dimension_count")
    if shared_dim >= key_dim:
        raise file.refused("rope.dimension_count", shared_dim, f"less than the {key_dim} features of a key")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": file.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": shared_dim,
        "qk_nope_head_dim": key_dim - shared_dim,
        "v_head_dim": value_dim,
    }


def _latent_scaling(file: Metadata) -> Json | None:
    """Return the scaling of DeepSeek's RoPE, of which a file has a tenth of `mscale_all_dim`; `mscale` is that, too."""
    scaling, tenth = rope_scaling(file), file.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling is None or scaling["rope_type"] != "yarn" or not tenth:
        return scaling
    scale = round(10 * tenth, 6)
    return scaling | {"mscale": scale, "mscale_all_dim": scale}


def _minicpm3(file: Metadata) -> Json:
    """Return the keys of MiniCPM 3, whose multipliers llama.cpp has in its code, and whose values are what is left of a
    head's rows."""
    heads, key_dim = file.integer("attention.head_count"), file.integer("attention.key_length")
    rows, plain_dim = file.height("attn_kv_b.weight"), key_dim - file.integer("rope.dimension_count")
    value_dim = rows // max(heads, 1) - plain_dim
    return {
        "model_type": "minicpm3",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        **_latent_attention(file, key_dim, value_dim),
        **_original_context(file),
    }


def _mamba2(file: Metadata) -> Json:
    heads, features = _state_heads(file)
    return {
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": features // heads,
        "n_groups": file.integer("ssm.group_count"),
        "state_size": file.integer("ssm.state_size"),
        "conv_kernel": file.integer("ssm.conv_kernel"),
        "expand": share_of(features, file.integer("embedding_length")),
        "layer_norm_epsilon": file.norm_eps,
        "use_bias": file.has("ssm_in.bias"),
        "use_conv_bias": file.has("ssm_conv1d.bias"),
    }


def _state_heads(file: Metadata) -> tuple[int, int]:
    """Return the heads that have a state, which the key calls otherwise, and the features of all."""
    heads, features = file.integer("ssm.time_step_rank"), file.integer("ssm.inner_size")
    if not heads or features % heads:
        raise file.refused("ssm.inner_size", features, f"a multiple of the {heads} heads of ssm.time_step_rank")
    return heads, features


def _mamba(file: Metadata) -> Json:
    """Return the sizes of Mamba 2 by the keys that most families have for them."""
    heads, features = _state_heads(file)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": features // heads,
        "mamba_n_groups": file.integer("ssm.group_count"),
        "mamba_d_state": file.integer("ssm.state_size"),
        "mamba_d_conv": file.integer("ssm.conv_kernel"),
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
    }


def _granitehybrid(file: Metadata) -> Json:
    """Return the keys of Granite 4. Files whose heads rotate are refused: Bamba's have pairs over all of a head,
    although half of it rotates."""
    if file.get("rope.scaling.finetuned") is not False:
        raise file.unsupported("heads that rotate (Bamba)")
    _, features = _state_heads(file)
    experts = file.integer("expert_count", 0)
    own: Json = (
        {"shared_intermediate_size": file.width("ffn_down.weight")}
        if not experts
        else {
            "shared_intermediate_size": file.width("ffn_down_shexp.weight"),
            "intermediate_size": file.width("ffn_down_exps.weight"),
            **_top_k(file),
        }
    )
    return {
        "model_type": "granitemoehybrid",
        "layer_types": _kinds_by_keys(file, _LINEAR),
        "position_embedding_type": "nope",
        "partial_rotary_factor": 1.0,
        "mamba_expand": share_of(features, file.integer("embedding_length")),
        "num_local_experts": experts,
        **_mamba(file),
        **_multipliers(file),
        **own,
    }


def _falcon_h1(file: Metadata) -> Json:
    """Return the keys of Falcon H1, whose multipliers are in the weights."""
    return {
        "model_type": "falcon_h1",
        "mamba_d_ssm": file.integer("ssm.inner_size"),
        "mamba_rms_norm": file.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": file.has("ssm_out.bias"),
        **_mamba(file),
    }


def _nemotron_h(file: Metadata) -> Json:
    """Return the keys of Nemotron H, of which a layer's tensors show what it is."""
    heads, features = _state_heads(file)
    config: Json = {
        "model_type": "nemotron_h",
        "partial_rotary_factor": 1.0,  # of what does not rotate
        "layers_block_type": [_single_block(file, layer) for layer in range(file.num_layers)],
        "layer_norm_epsilon": file.norm_eps,
        "mamba_num_heads": heads,
        "mamba_head_dim": features // heads,
        "n_groups": file.integer("ssm.group_count"),
        "ssm_state_size": file.integer("ssm.state_size"),
        "conv_kernel": file.integer("ssm.conv_kernel"),
        "use_conv_bias": file.has("ssm_conv1d.bias"),
        "use_bias": file.has("ssm_in.bias"),
        "mlp_bias": file.has("ffn_up.bias"),
        "moe_latent_size": file.integer("moe_latent_size", 0) or None,
    }
    if file.has("ffn_down.weight"):
        config["intermediate_size"] = file.width("ffn_down.weight")
    if not file.has("ffn_down_exps.weight"):
        return config
    shared = {"moe_shared_expert_intermediate_size": file.width("ffn_down_shexp.weight")}
    return config | shared | _grouped_experts(file)


def _single_block(file: Metadata, layer: int) -> str:
    """Return the kind of a layer that is one block."""
    kinds = {"ssm_in": _LINEAR, "attn_q": _FULL, "ffn_down_exps": "moe", "ffn_down": "mlp"}
    return next((kind for part, kind in kinds.items() if f"blk.{layer}.{part}.weight" in file.tensors), "")


def _kinds_by_keys(file: Metadata, other: str) -> list[str]:
    """Return the kind of each layer, of which those without heads of keys are of the other one."""
    return [_FULL if heads else other for heads in file.listed("attention.head_count_kv")]


def _lfm2(file: Metadata) -> Json:
    return {
        "model_type": "lfm2",
        "layer_types": _kinds_by_keys(file, "conv"),
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "conv_bias": file.has("shortconv.conv.bias"),
        "norm_eps": file.norm_eps,
        "block_auto_adjust_ff_dim": False,  # the width is what is left of it
    }


def _lfm2moe(file: Metadata) -> Json:
    return {
        **_lfm2(file),
        "model_type": "lfm2_moe",
        "num_dense_layers": file.integer("leading_dense_block_count", 0),
        "num_experts": file.integer("expert_count"),
        "moe_intermediate_size": file.width("ffn_down_exps.weight"),
        "use_expert_bias": file.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        **_top_k(file),
    }


def _top_k(file: Metadata) -> Json:
    return {"num_experts_per_tok": file.integer("expert_used_count")}


def _experts(file: Metadata) -> Json:
    own = {"num_experts": file.integer("expert_count"), "moe_intermediate_size": file.width("ffn_down_exps.weight")}
    return {**own, "decoder_sparse_step": 1, "mlp_only_layers": [], **_top_k(file)}


def _all_experts(file: Metadata) -> Json:
    return {"shared_expert_intermediate_size": file.width("ffn_down_shexp.weight"), **_experts(file)}


def _grouped_experts(file: Metadata) -> Json:
    return {
        "n_routed_experts": file.integer("expert_count"),
        "n_shared_experts": file.integer("expert_shared_count", 0),
        "moe_intermediate_size": file.width("ffn_down_exps.weight"),
        "first_k_dense_replace": file.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "norm_topk_prob": file.get("expert_weights_norm") is True,
        "n_group": file.integer("expert_group_count", 1) or 1,
        "topk_group": file.integer("expert_group_used_count", 1) or 1,
        **_top_k(file),
    }


def _delta_net(file: Metadata) -> Json:
    heads, features = _state_heads(file)
    return {
        "linear_num_key_heads": file.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.integer("ssm.state_size"),
        "linear_value_head_dim": features // heads,
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        "layer_types": _mixer_types(file),
    }


def _mixer_types(file: Metadata) -> list[str]:
    """Return the kind of each layer: as the file lists them, those that predict further tokens included, or every so
    many full."""
    listed = file.keys.get(f"{file.architecture}.{_RECURRENT}")
    if listed is None:
        every = file.integer("full_attention_interval", 4)
        if not every:
            raise file.refused("full_attention_interval", every, "a positive number")
        return [_LINEAR if (layer + 1) % every else _FULL for layer in range(file.num_layers)]
    count = file.integer("block_count")
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(each, bool) for each in listed):
        raise file.refused(_RECURRENT, listed, f"true or false for each of the {count} layers of block_count")
    return [_LINEAR if is_recurrent else _FULL for is_recurrent in listed[: file.num_layers]]


def _original_context(file: Metadata) -> Json:
    own = file.integer("rope.scaling.original_context_length", 0)
    return {"original_max_position_embeddings": own or file.integer("context_length")}


def _query_scalar(file: Metadata, *, largest: int) -> int:
    """Return what Gemma's scores are divided by the root of, which GGUF does not store: the size of a head, and in the
    largest model of a generation, known by its number of layers, a head's share of the hidden size."""
    is_largest = file.num_layers == largest
    return file.integer("embedding_length") // file.integer("attention.head_count") if is_largest else file.head_dim


def _layer_types(file: Metadata, default: int) -> list[str]:
    """Return the kind of each layer. default: every so many is full where the file does not say."""
    pattern = file.keys.get(f"{file.architecture}.{_PER_LAYER}")
    if isinstance(pattern, list):
        return [_SLIDING if slides else _FULL for slides in pattern[: MAX_LAYERS + 1]]
    every = file.integer(_PER_LAYER, default) or default
    return [_SLIDING if (layer + 1) % every else _FULL for layer in range(file.num_layers)]


OF_OTHER_HEADS = ("deepseek2", "minicpm3", "mamba2")  # which say of heads what others do not
HYBRIDS = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")  # whose layers lack what others have
VARYING = ("gemma3n", "gemma4")  # whose layers may differ in what all layers of others have alike
ARCHITECTURES: Mapping[str, Callable[[Metadata], Json]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral3": _mistral3,
        "qwen2": _plain("qwen2", use_sliding_window=False),
        "qwen3": _plain("qwen3", use_sliding_window=False),
        "qwen2vl": _plain("qwen2_5_vl_text", use_sliding_window=False),
        "qwen3vl": _plain("qwen3_vl_text", use_sliding_window=False),
        "phi3": _phi3,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gemma3n": _gemma3n,
        "gemma4": _gemma4,
        "olmo2": _olmo2,
        "qwen2moe": _qwen2moe,
        "qwen3moe": _qwen3moe,
        "qwen3next": _qwen3next,
        "qwen35": _qwen35,
        "qwen35moe": _qwen35moe,
        "olmoe": _olmoe,
        "glm4moe": _glm4moe,
        "dots1": _dots1,
        "ernie4_5-moe": _ernie,
        "granitemoe": _granitemoe,
        "gpt-oss": _gpt_oss,
        "phimoe": _phimoe,
        "minimax-m2": _minimax_m2,
        "hunyuan-moe": _hunyuan_moe,
        "qwen3vlmoe": _qwen3vlmoe,
        "hunyuan-dense": _plain("hunyuan_v1_dense"),
        "ernie4_5": _plain("ernie4_5"),
        "smollm3": _plain("smollm3"),
        "granite": _granite,
        "chatglm": _plain("glm"),
        "glm4": _glm4,
        "seed_oss": _seed_oss,
        "exaone4": _exaone4,
        "apertus": _apertus,
        "arcee": _plain("arcee"),
        "cohere2": _cohere2,
        "muse-glimmer": _muse_glimmer,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
        "nemotron": _nemotron,
        "deepseek2": _deepseek2,
        "minicpm3": _minicpm3,
        "mamba2": _mamba2,
        "granitehybrid": _granitehybrid,
        "falcon-h1": _falcon_h1,
        "nemotron_h": _nemotron_h,
        "nemotron_h_moe": _nemotron_h,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2moe,
    }
)

# Architectures whose files are of other types of models than the one that is called like them.
_MODEL_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "llama": ("llama", "mistral", "mixtral", "mistral3", "internlm3"),
        "mistral3": ("mistral3", "ministral3"),
        "qwen2vl": ("qwen2_5_vl",),
        "qwen3vl": ("qwen3_vl",),
        "gemma4": ("gemma4", "gemma4_unified"),
        "olmo2": ("olmo2", "olmo3"),
        "qwen2moe": ("qwen2_moe",),
        "qwen3moe": ("qwen3_moe",),
        "qwen3vlmoe": ("qwen3_vl_moe",),
        "qwen3next": ("qwen3_next",),
        "qwen35": ("qwen3_5",),
        "qwen35moe": ("qwen3_5_moe",),
        "glm4moe": ("glm4_moe",),
        "ernie4_5-moe": ("ernie4_5_moe",),
        "gpt-oss": ("gpt_oss",),
        "minimax-m2": ("minimax_m2",),
        "hunyuan-moe": ("hunyuan_v1_moe",),
        "hunyuan-dense": ("hunyuan_v1_dense",),
        "chatglm": ("glm",),
        "muse-glimmer": ("muse_glimmer",),
        "granite": ("granite", "granitemoehybrid"),
        "granitemoe": ("granitemoe", "granitemoehybrid"),
        "granitehybrid": ("granitemoehybrid",),
        "falcon-h1": ("falcon_h1",),
        "nemotron_h_moe": ("nemotron_h",),
        "lfm2moe": ("lfm2_moe",),
        "deepseek2": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    }
)


def holds_type(architecture: str, model_type: str) -> bool:
    """Return whether files of an architecture may hold a model of this type of Hugging Face's."""
    known = architecture in ARCHITECTURES
    return known and model_type.removesuffix("_text") in _MODEL_TYPES.get(architecture, (architecture,))
