"""GLM 4.7 Flash: DeepSeek V3's layers in the sizes of one machine."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig
from localllm.models.families.deepseek_v3 import DEFAULTS, read_grouped
from localllm.models.families.reading import MAX_LAYERS, num_layers, unsupported, with_defaults
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
_DENSE, _SPARSE = "dense", "sparse"


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, _DEFAULTS)
    return read_grouped(fields, _num_dense(fields))


def _num_dense(fields: Fields) -> int:
    """Return how many layers have no experts, which are the first ones."""
    count, kinds = num_layers(fields), fields.items("mlp_layer_types", most=MAX_LAYERS)
    if kinds is None:
        return fields.integer("first_k_dense_replace", 0, MAX_LAYERS)
    num_dense = kinds.count(_DENSE)
    if len(kinds) != count:
        raise fields.refuse("mlp_layer_types", f"a list of num_hidden_layers = {count} entries")
    if kinds != [_DENSE] * num_dense + [_SPARSE] * (count - num_dense):
        raise unsupported(fields.source, "such an order of mlp_layer_types", f"{_DENSE} layers before {_SPARSE} ones")
    return num_dense
