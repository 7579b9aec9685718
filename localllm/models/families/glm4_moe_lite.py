"""GLM 4.7 Flash: DeepSeek V3's layers in the sizes of one machine."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.deepseek_v3 import DEFAULTS, read_grouped
from localllm.models.families.reading import with_defaults
from localllm.models.fields import Fields

_DEFAULTS: dict[str, object] = {
    **DEFAULTS,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, _DEFAULTS)
    return read_grouped(fields)
