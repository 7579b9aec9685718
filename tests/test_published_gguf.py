"""GGUF files of published models: what llama.cpp's conversion writes of them, word for word, and what is read of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from localllm.gguf.config import hf_config
from localllm.gguf.metadata import Shape
from localllm.models.families import parse_config
from tests.gguf_metadata import as_stored, assert_same_model
from tests.published_models import PUBLISHED


@dataclass(frozen=True)
class Converted:
    """metadata: without the architecture's name in front of its keys. tensors: shapes of those that tell something,
    rows first. differs: what the files do not say, or say otherwise."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, Shape]
    differs: dict[str, Any]


def heads_of_keys(heads: int, layers: int, *attending: int) -> list[int]:
    return [heads if layer in attending else 0 for layer in range(layers)]


NANO_PATTERN = PUBLISHED["Nemotron-3-Nano-30B-A3B"].raw["hybrid_override_pattern"]
# The matrix by which a layer of each letter is known, and its shape.
NANO_TENSORS: dict[str, tuple[str, Shape]] = {
    "M": ("ssm_in", (10304, 2688)),
    "*": ("attn_q", (4096, 2688)),
    "E": ("ffn_down_exps", (128, 2688, 1856)),
}
# What has no positions is converted with this length.
ANY_LENGTH = {"max_position_embeddings": 1 << 20}

CONVERTED = {
    "GLM-4.7-Flash": Converted(
        "deepseek2",
        {
            "block_count": 48,
            "context_length": 202752,
            "embedding_length": 2048,
            "feed_forward_length": 10240,
            "attention.head_count": 20,
            "attention.head_count_kv": 1,
            "rope.freq_base": 1000000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_used_count": 4,
            "expert_group_count": 1,
            "expert_group_used_count": 1,  # and not how experts are chosen, which a tensor tells
            "leading_dense_block_count": 1,
            "vocab_size": 154880,
            "attention.q_lora_rank": 768,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 256,
            "attention.value_length_mla": 256,
            "expert_feed_forward_length": 1536,
            "expert_count": 64,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
            "rope.dimension_count": 64,
            "nextn_predict_layers": 1,
        },
        {
            "token_embd.weight": (154880, 2048),
            "output.weight": (154880, 2048),
            "blk.0.ffn_down.weight": (2048, 10240),
            "blk.1.ffn_down_exps.weight": (64, 2048, 1536),
            "blk.1.ffn_down_shexp.weight": (2048, 1536),
            "blk.1.exp_probs_b.bias": (64,),
            "blk.47.nextn.eh_proj.weight": (2048, 4096),
        },
        {"eos_token_id": 154820},  # a file names one
    ),
    "DeepSeek-V2-Lite": Converted(
        "deepseek2",
        {
            "block_count": 27,
            "context_length": 163840,
            "embedding_length": 2048,
            "feed_forward_length": 10944,
            "attention.head_count": 16,
            "attention.head_count_kv": 1,
            "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "expert_used_count": 6,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 1,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "leading_dense_block_count": 1,
            "vocab_size": 102400,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "expert_feed_forward_length": 1408,
            "expert_count": 64,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
            "rope.dimension_count": 64,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
        {
            "token_embd.weight": (102400, 2048),
            "output.weight": (102400, 2048),
            "blk.0.ffn_down.weight": (2048, 10944),
            "blk.1.ffn_down_exps.weight": (64, 2048, 1408),
            "blk.1.ffn_down_shexp.weight": (2048, 2816),
        },
        {},
    ),
    "Granite-4.0-H-Micro": Converted(
        "granitehybrid",
        {
            "block_count": 40,
            "context_length": 1048576,
            "embedding_length": 2048,
            "feed_forward_length": 8192,
            "attention.head_count": 32,
            "attention.head_count_kv": heads_of_keys(8, 40, 5, 15, 25, 35),
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 0,
            "vocab_size": 100352,
            "rope.dimension_count": 64,
            "attention.scale": 0.015625,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 8.0,
            "expert_shared_feed_forward_length": 8192,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.inner_size": 4096,
            "ssm.time_step_rank": 64,
            "rope.scaling.finetuned": False,
        },
        {
            "token_embd.weight": (100352, 2048),
            "blk.0.ffn_down.weight": (2048, 8192),
            "blk.0.ssm_conv1d.bias": (4352,),
        },
        ANY_LENGTH,
    ),
    "Nemotron-3-Nano-30B-A3B": Converted(
        "nemotron_h_moe",
        {
            "block_count": 52,
            "context_length": 1048576,
            "embedding_length": 2688,
            "feed_forward_length": [1856 if letter == "E" else 0 for letter in NANO_PATTERN],
            "attention.head_count": 32,
            "attention.head_count_kv": heads_of_keys(2, 52, 5, 12, 19, 26, 33, 42),
            "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.layer_norm_epsilon": 1e-5,
            "expert_used_count": 6,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "vocab_size": 131072,
            "rope.dimension_count": 84,  # of heads that would share the hidden size
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 8,
            "ssm.inner_size": 4096,
            "ssm.time_step_rank": 64,
            "rope.scaling.finetuned": False,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "expert_feed_forward_length": 1856,
            "expert_shared_feed_forward_length": 3712,
            "expert_count": 128,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        {
            "token_embd.weight": (131072, 2688),
            "output.weight": (131072, 2688),
            "blk.0.ssm_conv1d.bias": (6144,),
            "blk.1.exp_probs_b.bias": (128,),
            "blk.1.ffn_down_shexp.weight": (2688, 3712),
            **{
                f"blk.{layer}.{NANO_TENSORS[each][0]}.weight": NANO_TENSORS[each][1]
                for layer, each in enumerate(NANO_PATTERN)
            },
        },
        ANY_LENGTH,
    ),
    "LFM2-8B-A1B": Converted(
        "lfm2moe",
        {
            "block_count": 24,
            "context_length": 128000,
            "embedding_length": 2048,
            "feed_forward_length": 7168,
            "attention.head_count": 32,
            "attention.head_count_kv": heads_of_keys(8, 24, 2, 6, 10, 14, 18, 21),
            "rope.freq_base": 1000000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 32,
            "expert_used_count": 4,
            "expert_feed_forward_length": 1792,
            "leading_dense_block_count": 2,
            "expert_gating_func": 2,
            "vocab_size": 65536,
            "shortconv.l_cache": 3,
        },
        {
            "token_embd.weight": (65536, 2048),
            "blk.0.ffn_down.weight": (2048, 7168),
            "blk.2.ffn_down_exps.weight": (32, 2048, 1792),
            "blk.2.exp_probs_b.bias": (32,),
        },
        {},
    ),
    "Kimi-Linear-48B-A3B": Converted(
        "kimi-linear",
        {
            "block_count": 27,
            "context_length": 1048576,
            "embedding_length": 2304,
            "feed_forward_length": 9216,
            "attention.head_count": 32,
            "attention.head_count_kv": heads_of_keys(1, 27, 3, 7, 11, 15, 19, 23, 26),
            "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "vocab_size": 163840,
            "ssm.conv_kernel": 4,
            "kda.head_dim": 128,
            "attention.kv_lora_rank": 512,
            "rope.dimension_count": 64,
            "attention.key_length": 576,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "expert_feed_forward_length": 1024,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 2.446,
        },
        {
            "token_embd.weight": (163840, 2304),
            "output.weight": (163840, 2304),
            "blk.0.ffn_down.weight": (2304, 9216),
            "blk.0.ssm_beta.weight": (32, 2304),
            "blk.1.ffn_down_exps.weight": (256, 2304, 1024),
            "blk.1.ffn_down_shexp.weight": (2304, 1024),
            "blk.1.exp_probs_b.bias": (256,),
        },
        {},
    ),
    "RWKV7-World-1.5B": Converted(
        "rwkv7",
        {
            "context_length": 1048576,
            "embedding_length": 2048,
            "block_count": 24,
            "attention.layer_norm_epsilon": 1e-5,
            "wkv.head_size": 64,
            "attention.decay_lora_rank": 96,
            "attention.iclr_lora_rank": 96,
            "attention.value_residual_mix_lora_rank": 64,
            "attention.gate_lora_rank": 256,
            "feed_forward_length": 8192,
            "attention.head_count": 0,
        },
        {
            "token_embd.weight": (65536, 2048),
            "output.weight": (65536, 2048),
            "token_embd_norm.weight": (2048,),
            "blk.0.attn_norm.bias": (2048,),
        },
        {},
    ),
    "Falcon-H1-0.5B": Converted(
        "falcon-h1",
        {
            "context_length": 16384,
            "embedding_length": 1024,
            "feed_forward_length": 2048,
            "attention.head_count": 8,
            "block_count": 36,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 1536,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 24,
            "ssm.group_count": 1,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "vocab_size": 32784,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.freq_base": 1e11,
        },
        {
            "token_embd.weight": (32784, 1024),
            "output.weight": (32784, 1024),
            "blk.0.ffn_down.weight": (1024, 2048),
            "blk.0.ssm_conv1d.bias": (1792,),
        },
        # Its multipliers are in the weights.
        {key: 1.0 for key in PUBLISHED["Falcon-H1-0.5B"].raw if key.endswith("_multiplier")}
        | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_means_the_model_of_the_published_one(name: str) -> None:
    converted, ids = CONVERTED[name], ("bos_token_id", "eos_token_id")
    raw = dict.fromkeys(ids) | PUBLISHED[name].raw | converted.differs
    told = {f"tokenizer.ggml.{key}": raw[key] for key in ids if raw[key] is not None}
    metadata = {f"{converted.architecture}.{key}": as_stored(value) for key, value in converted.metadata.items()}
    made = hf_config({"general.architecture": converted.architecture, **told, **metadata}, converted.tensors)
    assert_same_model(made, raw)
    assert parse_config(made, name).longest_context == converted.metadata["context_length"]
