"""Models of the newest families as their makers publish them: what their config.json say, odd keys among it, and what
is known of the models.

Keys that only training, tokens and transformers' own modules have are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.layers.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    Mamba2Config,
    Rwkv7ChannelMixConfig,
    Rwkv7TimeMixConfig,
    ShortConvConfig,
    SingleMixer,
)

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class Published:
    """text: of the config.json. parameters: of all tensors that are not stored twice; a float is a number that a card
    rounds. mixers: how many layers have each, and bytes: of a token's keys and values in bf16, or of a state."""

    text: str
    parameters: float
    mixers: Mapping[type[SingleMixer], tuple[int, int]]
    context: int

    @property
    def raw(self) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads(self.text)
        return raw


_GLM = """{
  "model_type": "glm4_moe_lite", "attention_bias": false, "pad_token_id": 154820,
  "eos_token_id": [154820, 154827, 154829], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
  "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "topk_method": "noaux_tc",
  "norm_topk_prob": true, "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
  "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
  "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
  "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "tie_word_embeddings": false,
  "dtype": "bfloat16", "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
  "v_head_dim": 256, "vocab_size": 154880
}"""
_V2_LITE = """{
  "model_type": "deepseek_v2", "attention_bias": false, "bos_token_id": 100000, "eos_token_id": 100001,
  "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
  "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
  "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
  "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
  "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
  "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
  "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
  "v_head_dim": 128, "vocab_size": 102400
}"""
_MOONLIGHT = """{
  "model_type": "deepseek_v3", "attention_bias": false, "bos_token_id": 163584, "eos_token_id": 163586,
  "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11264,
  "kv_lora_rank": 512, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
  "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true, "num_attention_heads": 16,
  "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
  "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
  "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": true,
  "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
  "v_head_dim": 128, "vocab_size": 163840
}"""
_MINICPM3 = """{
  "model_type": "minicpm3", "bos_token_id": 1, "eos_token_id": [2, 73440], "hidden_size": 2560,
  "num_hidden_layers": 62, "intermediate_size": 6400, "max_position_embeddings": 32768, "num_attention_heads": 40,
  "num_key_value_heads": 40, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 768,
  "kv_lora_rank": 256, "rms_norm_eps": 1e-05, "rope_scaling": {"type": "longrope",
  "long_factor": [1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734,
  3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353,
  14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132907, 16.87581087164081,
  16.940876586213285], "short_factor": [1.0591234137867171, 1.1241891283591912, 1.2596935748670968,
  1.5380380402321725, 2.093982484148734, 3.1446935121267696, 4.937952647693647, 7.524541999994549,
  10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266, 16.461961959767827,
  16.740306425132907, 16.87581087164081, 16.940876586213285], "original_max_position_embeddings": 32768},
  "vocab_size": 73448, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4
}"""
_NANO_9B = """{
  "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4480, "intermediate_size": 15680,
  "num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
  "max_position_embeddings": 131072,
  "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "mamba_num_heads": 128,
  "mamba_head_dim": 80, "mamba_num_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "bos_token_id": 1,
  "eos_token_id": 2, "pad_token_id": 12
}"""
_NANO_30B = """{
  "model_type": "nemotron_h", "attention_bias": false, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4,
  "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_size": 2688,
  "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
  "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
  "mamba_proj_bias": false, "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2",
  "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
  "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
  "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": null,
  "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_max": 0.1,
  "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": false, "use_conv_bias": true,
  "vocab_size": 131072
}"""
_GRANITE_MICRO = """{
  "model_type": "granitemoehybrid", "attention_multiplier": 0.015625, "embedding_multiplier": 12,
  "hidden_size": 2048, "intermediate_size": 8192, "layer_types": ["mamba", "mamba", "mamba", "mamba", "mamba",
  "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention",
  "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba",
  "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba"],
  "logits_scaling": 8, "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
  "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64, "max_position_embeddings": 131072,
  "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 0,
  "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
  "shared_intermediate_size": 8192, "tie_word_embeddings": true, "vocab_size": 100352
}"""
_GRANITE_TINY = """{
  "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "layer_types": ["mamba", "mamba",
  "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
  "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
  "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention",
  "mamba", "mamba", "mamba", "mamba"], "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_d_head": 64,
  "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
  "max_position_embeddings": 131072, "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40,
  "num_key_value_heads": 4, "num_local_experts": 64, "position_embedding_type": "nope",
  "shared_intermediate_size": 1024, "tie_word_embeddings": true, "vocab_size": 100352
}"""
_FALCON_H1 = """{
  "model_type": "falcon_h1", "attention_bias": false, "attention_in_multiplier": 1.0,
  "attention_out_multiplier": 0.9375, "attn_layer_indices": null, "embedding_multiplier": 5.656854249492381,
  "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
  "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
  "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
  "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": false,
  "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 16384,
  "mlp_bias": false, "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8,
  "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": false, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
  "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
  "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "vocab_size": 32784
}"""
_LFM2 = """{
  "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
  "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_use_swiglu": true,
  "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048,
  "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
  "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32,
  "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
  "use_pos_enc": true, "vocab_size": 65536
}"""
_LFM2_350M = """{
  "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0,
  "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": false, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
  "hidden_size": 1024, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 16,
  "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536
}"""
_LFM2_5 = """{
  "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ffn_dim_multiplier": 1.0,
  "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_use_swiglu": true, "bos_token_id": 1, "conv_L_cache": 3,
  "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048, "eos_token_id": 7, "full_attn_idxs": null,
  "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
  "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "use_pos_enc": true,
  "vocab_size": 65536, "dtype": "float32", "intermediate_size": 12288, "layer_types": ["conv", "conv",
  "full_attention", "conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "full_attention",
  "conv", "full_attention", "conv", "full_attention", "conv"], "tie_embedding": true
}"""
_LFM2_8B = """{
  "model_type": "lfm2_moe", "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false, "eos_token_id": 7,
  "hidden_size": 2048, "intermediate_size": 7168, "layer_types": ["conv", "conv", "full_attention", "conv", "conv",
  "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention",
  "conv", "conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"],
  "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
  "num_hidden_layers": 24, "num_key_value_heads": 8, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
  "use_expert_bias": true, "vocab_size": 65536
}"""
_KIMI = """{
  "model_type": "kimi_linear", "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
  "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216,
  "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
  "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32,
  "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576, "moe_intermediate_size": 1024,
  "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
  "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
  "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1,
  "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840
}"""
_RWKV7_WORLD = """{
  "model_type": "rwkv7", "a_low_rank_dim": 96, "attn": null, "attn_mode": "chunk", "bos_token_id": 0,
  "decay_low_rank_dim": 96, "eos_token_id": 0, "fuse_norm": false, "gate_low_rank_dim": 256, "head_dim": 64,
  "hidden_act": "sqrelu", "hidden_ratio": 4.0, "hidden_size": 2048, "intermediate_size": 8192,
  "max_position_embeddings": 2048, "norm_bias": true, "norm_eps": 1e-05, "norm_first": true, "num_heads": 32,
  "num_hidden_layers": 24, "tie_word_embeddings": false, "v_low_rank_dim": 64, "vocab_size": 65536
}"""
_BAMBA = """{
  "model_type": "bamba", "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_d_conv": 4,
  "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
  "max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 128256
}"""
_CODESTRAL = """{
  "model_type": "mamba2", "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_size": 4096, "n_groups": 8,
  "num_heads": 128, "num_hidden_layers": 64, "state_size": 128, "tie_word_embeddings": false,
  "time_step_limit": [0.0, Infinity], "vocab_size": 32768
}"""
_MAMBA2_780M = """{
  "model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 1536, "layer_norm_epsilon": 1e-05, "n_groups": 1, "num_heads": 48, "num_hidden_layers": 48,
  "residual_in_fp32": true, "rms_norm": true, "state_size": 128, "tie_word_embeddings": true,
  "time_step_limit": [0.0, Infinity], "use_bias": false, "use_conv_bias": true, "vocab_size": 50288
}"""


def _heads(key_heads: int, head_dim: int) -> int:
    return BF16 * 2 * key_heads * head_dim


def _mamba2(heads: int, head_dim: int, groups: int, state: int) -> int:
    """Matrices, and what the convolution and the steps saw of three tokens, in whole lines of a cache."""
    size = FP32 * (heads * head_dim * state + 3 * (heads * head_dim + 2 * groups * state + heads))
    return -(-size // 64) * 64


# Of GLM's file, without the embedding and the head that it has once more for the layer that drafts.
_GLM_PARAMETERS = 31_221_488_576 - 2 * 154880 * 2048
_LATENT = BF16 * (512 + 64)
_KIMI_DELTA = FP32 * (32 * 128 * 128 + 3 * (3 * 32 * 128 + 32 + 32 * 128))  # a decay a feature of a key
_RWKV7 = {Rwkv7TimeMixConfig: (24, FP32 * (32 * 64 * 64 + 5 * 2048)), Rwkv7ChannelMixConfig: (24, FP32 * 2048)}
_LFM2_MIXERS = {ShortConvConfig: (10, FP32 * 2 * 2048), AttentionConfig: (6, _heads(8, 64))}
_UNBOUNDED = 1 << 20

PUBLISHED = {
    "GLM-4.7-Flash": Published(_GLM, _GLM_PARAMETERS, {LatentAttentionConfig: (47, _LATENT)}, 202752),
    "DeepSeek-V2-Lite": Published(_V2_LITE, 15_706_484_224, {LatentAttentionConfig: (27, _LATENT)}, 163840),
    "Moonlight-16B-A3B": Published(_MOONLIGHT, 15.96e9, {LatentAttentionConfig: (27, _LATENT)}, 8192),
    "MiniCPM3-4B": Published(_MINICPM3, 4.07e9, {LatentAttentionConfig: (62, BF16 * (256 + 32))}, 32768),
    "Nemotron-Nano-9B-v2": Published(
        _NANO_9B,
        8_888_227_328,
        {Mamba2Config: (27, _mamba2(128, 80, 8, 128)), AttentionConfig: (4, _heads(8, 128))},
        131072,
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        _NANO_30B,
        31_577_940_288,
        {Mamba2Config: (23, _mamba2(64, 64, 8, 128)), AttentionConfig: (6, _heads(2, 128))},
        262144,
    ),
    "Granite-4.0-H-Micro": Published(
        _GRANITE_MICRO,
        3.19e9,
        {Mamba2Config: (36, _mamba2(64, 64, 1, 128)), AttentionConfig: (4, _heads(8, 64))},
        131072,
    ),
    "Granite-4.0-H-Tiny": Published(
        _GRANITE_TINY,
        6_939_037_248,
        {Mamba2Config: (36, _mamba2(48, 64, 1, 128)), AttentionConfig: (4, _heads(4, 128))},
        131072,
    ),
    "Falcon-H1-0.5B": Published(
        _FALCON_H1,
        521_411_104,
        {Mamba2Config: (36, _mamba2(24, 64, 1, 128)), AttentionConfig: (36, _heads(2, 64))},
        16384,
    ),
    "LFM2-350M": Published(
        _LFM2_350M,
        354_483_968,
        {ShortConvConfig: (10, FP32 * 2 * 1024), AttentionConfig: (6, _heads(8, 64))},
        128000,
    ),
    "LFM2-1.2B": Published(_LFM2, 1_170_340_608, _LFM2_MIXERS, 128000),
    "LFM2.5-1.2B": Published(_LFM2_5, 1_170_340_608, _LFM2_MIXERS, 128000),
    "LFM2-8B-A1B": Published(
        _LFM2_8B,
        8_339_930_560,
        {ShortConvConfig: (18, FP32 * 2 * 2048), AttentionConfig: (6, _heads(8, 64))},
        128000,
    ),
    "Kimi-Linear-48B-A3B": Published(
        _KIMI,
        49_122_681_728,
        {DeltaNetConfig: (20, _KIMI_DELTA), LatentAttentionConfig: (7, _LATENT)},
        1048576,
    ),
    "RWKV7-World-1.5B": Published(_RWKV7_WORLD, 1_527_404_544, _RWKV7, _UNBOUNDED),
    "Bamba-9B-v2": Published(
        _BAMBA,
        9.78e9,
        {Mamba2Config: (29, _mamba2(128, 64, 1, 128)), AttentionConfig: (3, _heads(8, 128))},
        262144,
    ),
    "Mamba-Codestral-7B": Published(
        _CODESTRAL, 7_285_403_648, {Mamba2Config: (64, _mamba2(128, 64, 8, 128))}, _UNBOUNDED
    ),
    "mamba2-780m": Published(_MAMBA2_780M, 0.78e9, {Mamba2Config: (48, _mamba2(48, 64, 1, 128))}, _UNBOUNDED),
}
