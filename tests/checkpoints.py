"""Small random checkpoints of every family, written by transformers: what our decoder must agree with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.rwkv7_peer import Rwkv7Peer

SHAPE: dict[str, Any] = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
}  # fmt: skip


def rope(kind: str, factor: float, **rest: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **rest}}


TRAINED = {"original_max_position_embeddings": 64}
GEMMA = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24}
GEMMA3N = {
    "head_dim": 32, "sliding_window": 12, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260,
    "laurel_rank": 16, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 12, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 272, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 48,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
KIMI = {
    "linear_head_dim": 32, "linear_num_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40, "n_shared_experts": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "topk_group": 1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention"] * 2, "num_attention_heads": 2, "num_key_value_heads": 1}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
# The vision model of each.
_DEEPSTACK = VISION | {"deepstack_visual_indexes": [0]}
_PIXTRAL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MULTIMODAL = {
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
    "qwen3_5": VISION,
    "qwen3_5_moe": VISION,
    "qwen2_5_vl": VISION,
    "mistral3": _PIXTRAL | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
    "muse_glimmer": _PIXTRAL,
}
# By default they have 0.9 billion weights.
PHI4_TOWERS = {
    "vision_config": _PIXTRAL | {"image_size": 28, "crop_size": 28},
    "audio_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
        "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16,
    },
}  # fmt: skip
NEMOTRON_H = {
    "num_hidden_layers": 5, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32,
    "head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}  # fmt: skip


FALCON_H1 = {
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32,
    "head_dim": 24,
}  # fmt: skip


def linear(keys: int, values: int, key_dim: int, value_dim: int, **others: Any) -> dict[str, Any]:
    """The sizes of Gated DeltaNet: heads of keys and of values, and their features."""
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    return heads | {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim} | others


def mamba(heads: int, head_dim: int, groups: int, state: int, **others: Any) -> dict[str, Any]:
    """The sizes of Mamba 2. Its heads have as many features as 64 * mamba_expand."""
    sizes = {"mamba_n_heads": heads, "mamba_d_head": head_dim, "mamba_n_groups": groups, "mamba_d_state": state}
    return sizes | {"mamba_expand": heads * head_dim // 64} | others


LATENT: dict[str, Any] = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
MIXED: dict[str, Any] = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# name -> (model_type, what differs from SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-mha-wide-heads": ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama-linear-rope": ("llama", rope("linear", 4.0)),
    "llama-dynamic-rope": ("llama", rope("dynamic", 2.0) | {"max_position_embeddings": 40}),
    "llama3-rope": ("llama", rope("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED)),
    "llama-yarn": ("llama", rope("yarn", 4.0, **TRAINED)),
    "mistral-windowed": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {}),
    "qwen2-windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {"sliding_window": 17}),
    "phi3-partial-rotary": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 48}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-scaled-and-capped": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,  # which transformers reads and does not use
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "llama-one-kv-head-odd-sizes": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 10, "hidden_size": 36, "intermediate_size": 54, "vocab_size": 263},
    ),
    "llama-yarn-scaled": (
        "llama",
        rope("yarn", 4.0, mscale=0.7, mscale_all_dim=1.3, beta_fast=20.0, beta_slow=2.0, truncate=False, **TRAINED),
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mistral-declared-full": ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 4}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-windowed": ("mixtral", {"num_local_experts": 3, "sliding_window": 11}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 56, "norm_topk_prob": True}),
    "qwen2_moe-some-dense": (
        "qwen2_moe",
        EXPERTS
        | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False, "head_dim": 24}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe-some-dense": (
        "qwen3_moe",
        EXPERTS | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 13, "attention_bias": True},
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", EXPERTS | {"head_dim": 32}),
    "olmoe": ("olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "olmoe-clipped": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 0.5, "norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", ROUTED | {"use_qk_norm": True, "head_dim": 24, "num_nextn_predict_layers": 0}),
    "glm4_moe-groups": (
        "glm4_moe",
        ROUTED
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "attention_bias": True}
        | {"norm_topk_prob": False, "num_nextn_predict_layers": 0},
    ),
    "dots1": ("dots1", ROUTED | {"head_dim": 24, "norm_topk_prob": True, "n_shared_experts": 1}),
    "dots1-groups-windowed": (
        "dots1",
        ROUTED
        | {"n_group": 2, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 2, "attention_bias": True}
        | {"sliding_window": 9, "max_window_layers": 2, "routed_scaling_factor": 1.5},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
    ),
    "ernie4_5_moe-biases": (
        "ernie4_5_moe",
        {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 0, "use_bias": True}
        | {"moe_layer_interval": 2, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.2}),
    "granitemoe-multipliers": (
        "granitemoe",
        {"num_local_experts": 4, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
        | {"residual_multiplier": 0.4, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "phimoe": ("phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-jitter": ("phimoe", {"num_local_experts": 6, "router_jitter_noise": 0.4, "sliding_window": 9}),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "qwen3_next": ("qwen3_next", EXPERTS | linear(2, 4, 16, 16, head_dim=32, shared_expert_intermediate_size=56)),
    "qwen3_next-odd": (
        "qwen3_next",
        EXPERTS
        | linear(1, 3, 24, 10, head_dim=24, shared_expert_intermediate_size=40, linear_conv_kernel_dim=3)
        | {"mlp_only_layers": [1], "norm_topk_prob": False, "partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "qwen3_5": ("qwen3_5_text", linear(2, 6, 16, 32, head_dim=32)),
    "qwen3_5-odd": (
        "qwen3_5",
        linear(3, 3, 32, 16, head_dim=32, linear_conv_kernel_dim=2)
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    "qwen3_5_moe": ("qwen3_5_moe", EXPERTS | linear(2, 4, 16, 16, head_dim=32, shared_expert_intermediate_size=24)),
    "olmo_hybrid": ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo_hybrid-rotating": (
        "olmo_hybrid",
        linear(2, 4, 24, 16, linear_allow_neg_eigval=False)
        | {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v2": ("deepseek_v2", LATENT | MIXED | {"q_lora_rank": None}),
    "deepseek_v2-scaled": (
        "deepseek_v2",
        LATENT
        | MIXED
        | {"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.0, "attention_bias": True}
        | rope("yarn", 4.0, mscale=0.7, mscale_all_dim=0.7, **TRAINED),
    ),
    "deepseek_v3": ("deepseek_v3", LATENT | ROUTED | {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}),
    "deepseek_v3-odd": (
        "deepseek_v3",
        ROUTED
        | {"q_lora_rank": 20, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
        | {"n_group": 1, "topk_group": 1, "rope_interleave": False, "num_nextn_predict_layers": 0}
        | {"num_key_value_heads": 4}
        | rope("yarn", 4.0, mscale=1.0, mscale_all_dim=0.5, **TRAINED),
    ),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | ROUTED),
    "minicpm3": ("minicpm3", LATENT | {"dim_model_base": 32, "v_head_dim": None}),
    "minicpm3-plain": ("minicpm3", LATENT | {"scale_depth": None, "dim_model_base": None, "q_lora_rank": None}),
    "kimi_linear": ("kimi_linear", KIMI),
    "kimi_linear-odd": (
        "kimi_linear",
        KIMI
        | {"linear_head_dim": 10, "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "q_lora_rank": 20}
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "n_group": 2, "norm_topk_prob": False}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "lfm2": ("lfm2", LFM2 | {"block_multiple_of": 32}),
    "lfm2-odd": (
        "lfm2",
        {"full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False}
        | {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        EXPERTS | LFM2 | {"num_dense_layers": 1},
    ),
    "lfm2_moe-odd": (
        "lfm2_moe",
        EXPERTS
        | {"layer_types": ["full_attention", "conv", "conv", "conv"], "num_dense_layers": 2, "use_expert_bias": False}
        | {"conv_bias": True, "conv_L_cache": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False},
    ),
    "lfm3": ("lfm3", {"head_dim": 32, "num_hidden_layers": 5, "sliding_window": 9}),
    "lfm3-odd": (
        "lfm3",
        {"layer_types": ["sliding_attention", "conv", "full_attention", "conv"], "use_attention_gate": False}
        | {"use_sandwich_norm": False, "attention_bias": True, "conv_bias": True, "conv_L_cache": 4, "head_dim": 16}
        | {"hidden_size": 52, "num_key_value_heads": 1, "sliding_window": 13},
    ),
    "bamba": ("bamba", mamba(8, 16, 2, 32, attn_layer_indices=[2])),
    "bamba-odd": (
        "bamba",
        mamba(12, 16, 3, 24, mamba_d_conv=3, mamba_proj_bias=True, mamba_conv_bias=False)
        | {"attn_layer_indices": [0, 3], "mlp_bias": True, "attention_bias": True},
    ),
    "bamba-bounded": ("bamba", mamba(4, 32, 1, 16, attn_layer_indices=[1], time_step_limit=[0.5, 1.2])),
    "granitemoehybrid": (
        "granitemoehybrid",
        mamba(8, 16, 1, 32, layer_types=["linear_attention", "full_attention"] * 2, shared_intermediate_size=56)
        | {"num_local_experts": 5, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
        | {"residual_multiplier": 0.4, "tie_word_embeddings": True},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        mamba(6, 32, 2, 20, layer_types=["mamba", "mamba", "attention", "mamba"], shared_intermediate_size=96)
        | {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True}
        | {"attention_multiplier": 0.2},
    ),
    "nemotron_h": (
        "nemotron_h",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]},
    ),
    "nemotron_h-groups": (
        "nemotron_h",
        NEMOTRON_H
        | {"hybrid_override_pattern": "-M*EM", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": False, "use_bias": True, "mlp_bias": True, "mamba_head_dim": 12, "ssm_state_size": 10},
    ),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1-multipliers": (
        "falcon_h1",
        FALCON_H1
        | {"ssm_multipliers": [0.4, 1.7, 0.6, 1.3, 0.8], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.4}
        | {"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.7, "key_multiplier": 0.5}
        | {"mlp_multipliers": [0.6, 0.3], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.25}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True, "mlp_bias": True},
    ),
    "falcon_h1-odd": (
        "falcon_h1",
        FALCON_H1
        | {"mamba_n_heads": 9, "mamba_d_head": 10, "mamba_d_ssm": 90, "mamba_n_groups": 3, "mamba_d_state": 12}
        | {"mamba_rms_norm": True, "mamba_d_conv": 3, "mamba_conv_bias": False, "num_hidden_layers": 2}
        | {"attention_bias": True, "mamba_proj_bias": True},
    ),
    "mamba": ("mamba", {"intermediate_size": 128}),
    "mamba-odd": (
        "mamba",
        {"hidden_size": 52, "state_size": 10, "conv_kernel": 3, "use_bias": True, "intermediate_size": 78}
        | {"time_step_rank": 7, "use_conv_bias": False, "tie_word_embeddings": False},
    ),
    "falcon_mamba": (
        "falcon_mamba",
        {"intermediate_size": 128, "time_step_rank": 16, "tie_word_embeddings": False, "mixer_rms_eps": 1e-3},
    ),
    "jamba": (
        "jamba",
        {"num_experts": 5, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2}
        | {"mamba_dt_rank": 16},
    ),
    "jamba-dense": (
        "jamba",
        {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 10, "mamba_d_conv": 3}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3, "num_key_value_heads": 1},
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32}),
    "mamba2-odd": (
        "mamba2",
        {"num_heads": 32, "head_dim": 6, "n_groups": 4, "state_size": 10, "conv_kernel": 3, "use_bias": True}
        | {"expand": 3, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 5, "moe_topk": 2, "head_dim": 24}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-odd": (
        "gemma3n_text",
        GEMMA3N
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_kv_shared_layers": 2, "intermediate_size": [96, 80, 96, 64, 96, 96], "altup_num_inputs": 3}
        | {"activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.3, 0.0], "altup_correct_scale": False},
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-shared-keys": (
        "gemma4_text",
        GEMMA4
        | {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
        | {"num_kv_shared_layers": 4, "use_double_wide_mlp": True, "final_logit_softcapping": 20.0}
        | {"num_key_value_heads": 1},
    ),
    "gemma4-keys-as-values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-experts": (
        "gemma4_text",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {key: GEMMA4[key] for key in ("head_dim", "global_head_dim", "layer_types")},
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 9}),
    "gpt_oss-square": (
        "gpt_oss",
        {"num_local_experts": 5, "intermediate_size": 64, "attention_bias": False, "swiglu_limit": 0.5, "head_dim": 16}
        | {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "sliding_window": 13}
        | rope("yarn", 4.0, truncate=False, rope_theta=1e4, **TRAINED),
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.7,
            },
        },
    ),
    "mistral3": ("mistral3", {"head_dim": 32, "sliding_window": None, "model_type": "mistral"}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3-windowed": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True}
        | {"mlp_bias": True, "tie_word_embeddings": False},
    ),
    "olmo3": ("olmo3", {"sliding_window": 11, "num_hidden_layers": 5}),
    "olmo3-yarn": (
        "olmo3",
        {
            "sliding_window": 9,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, **TRAINED},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "glm": ("glm", {"head_dim": 32}),
    "glm4": ("glm4", {"head_dim": 24, "attention_bias": False}),
    "seed_oss": ("seed_oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "exaone4": ("exaone4", {"sliding_window": 9}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "apertus": ("apertus", {"attention_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": 9, "logit_scale": 0.5}),
    "cohere2-biases": ("cohere2", {"layer_types": ["full_attention", "sliding_attention"] * 2, "attention_bias": True}),
    "qwen3_vl": ("qwen3_vl", {"head_dim": 32}),
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}),
    "muse_glimmer": ("muse_glimmer", {"head_dim": 32, "sliding_window": 9, "num_hidden_layers": 6}),
    "muse_glimmer-odd": (
        "muse_glimmer",
        {"head_dim": 16, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"layer_rope_theta": [10000.0, 0, 0, 10000.0], "sliding_window": 11},
    ),
    "internlm3": ("internlm3", {"bias": True, "qkv_bias": True} | rope("dynamic", 6.0)),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 11}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "rwkv7": ("rwkv7", {"intermediate_size": 128}),
    "rwkv7-odd": (
        "rwkv7",
        {"hidden_size": 72, "head_dim": 24, "intermediate_size": 100, "norm_bias": False, "norm_first": False}
        | {"num_hidden_layers": 3, "tie_word_embeddings": True, "v_low_rank_dim": 5, "a_low_rank_dim": 9},
    ),
    "phi4_multimodal": ("phi4_multimodal", {"partial_rotary_factor": 0.5} | PHI4_TOWERS),
    "hunyuan_v1_moe-alpha": (
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 3, "head_dim": 16, "attention_bias": True}
        | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}},
    ),
}

# The others have a peer of ours, which PEFT does not know.
OF_TRANSFORMERS = [name for name, (kind, _) in FAMILIES.items() if kind != "rwkv7"]


def write_checkpoint(
    directory: Path,
    family: str,
    *,
    shard_size: str = "50GB",
    seed: int = 0,
    layers: int | None = None,
    **others: int,
) -> Any:
    """A random fp32 model of the family in `directory`, with a byte tokenizer; returns transformers' own model.

    others: sizes that differ from the family's, by their names in a config."""
    model_type, differences = FAMILIES[family]
    torch.manual_seed(seed)
    sizes = SHAPE | differences | ({"num_hidden_layers": layers} if layers else {}) | others
    if model_type == "rwkv7":  # which transformers has not
        own = Rwkv7Peer(sizes)
        own.save_pretrained(directory)
        write_byte_tokenizer(directory)
        return own
    kind = AutoModelForCausalLM
    if model_type in MULTIMODAL:
        kind, sizes = AutoModelForImageTextToText, {"text_config": sizes, "vision_config": MULTIMODAL[model_type]}
    config = AutoConfig.for_model(model_type, **sizes)
    if model_type == "gemma3n_text":  # the automatic class is one that sees, and needs more packages
        config._attn_implementation = "eager"
        model = transformers.Gemma3nForCausalLM(config).eval()
    else:
        model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, values in model.state_dict().items():
        # Initial weights are near zero and norms are one: a wrong norm or an exchanged matrix would hide in that.
        # More than this makes Gated DeltaNet's states so short-lived that fp32 has four digits of what comes out.
        scale = (
            0.3
            if "norm" in name or "correction" in name
            else 0.05
            if "linear_attn" in name or "mamba" in name or "mixer" in name
            else 0.15
        )
        values += scale * torch.randn_like(values)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size=shard_size)
    write_byte_tokenizer(directory)
    return model


def write_byte_tokenizer(directory: Path) -> None:
    """Ids 0 to 255 are the bytes, 256 is <s>, 257 </s>; a chat template that marks the roles."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet(), key=_BYTES.__getitem__)
    vocab = {character: _BYTES[character] for character in alphabet}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    configuration = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")


def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of GPT-2's byte-level alphabet stands for."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES = _bytes_by_character()
