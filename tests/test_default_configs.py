"""Configurations as transformers makes them where a file says nothing: read alike, and to as many parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from localllm.models.families import parse_config
from localllm.registry import FAMILIES
from tests.parameters import num_parameters

# Text models that transformers builds as a part of another one alone, and what it has no defaults for.
PARTS = {"qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text", "muse_glimmer_text"}
NEEDED = {
    "glm4_moe": {"head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
# Their text models mean other things by themselves, as which no file has them.
WHOLE = {"mistral3", "qwen3_vl_moe_text"}
NOT_TEXT = ("visual", "vision", "audio", "image", "multi_modal", "embed_tokens_extend")
BUFFERS = (
    "e_score_correction_bias",
    "expert_bias",
    "act_fn",
    "layer_scalar",
)  # which a checkpoint stores like parameters


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in CONFIG_MAPPING and name not in PARTS])
def test_a_default_config_means_as_many_parameters(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))
    transformers.utils.logging.set_verbosity_error()
    with torch.device("meta"):
        try:
            peer = (
                transformers.Gemma3nForCausalLM(config.get_text_config())
                if model_type.startswith("gemma3n")
                else AutoModelForCausalLM.from_config(config)
            )
        except ValueError:
            peer = AutoModelForImageTextToText.from_config(config)
    buffers = ((name, buffer) for name, buffer in peer.named_buffers() if any(word in name for word in BUFFERS))
    stored = (*peer.named_parameters(), *buffers)
    theirs = sum(tensor.numel() for name, tensor in stored if not any(word in name for word in NOT_TEXT))
    assert num_parameters(parse_config(config.to_dict(), model_type)) == theirs


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in CONFIG_MAPPING and name not in WHOLE])
def test_what_a_file_does_not_say_means_what_transformers_takes_for_it(model_type: str) -> None:
    needed = NEEDED.get(model_type, {})
    full = AutoConfig.for_model(model_type, **needed).to_dict()
    short: dict[str, object] = {"model_type": model_type, **needed}
    if full.get("text_config"):
        short["text_config"] = {"model_type": full["text_config"].get("model_type")}
    told, meant = (replace(parse_config(raw, model_type), dtype="float32") for raw in (short, full))
    assert told == meant
