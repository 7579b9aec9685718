"""Keys of a config.json that several of llama.cpp's architectures need, and the kinds of layers."""

from __future__ import annotations

from localllm.gguf.metadata import Json, Metadata

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def top_k(file: Metadata) -> Json:
    return {"num_experts_per_tok": file.integer("expert_used_count")}


def experts(file: Metadata) -> Json:
    own = {"num_experts": file.integer("expert_count"), "moe_intermediate_size": file.width("ffn_down_exps.weight")}
    return {**own, "decoder_sparse_step": 1, "mlp_only_layers": [], **top_k(file)}


def all_experts(file: Metadata) -> Json:
    return {"shared_expert_intermediate_size": file.width("ffn_down_shexp.weight"), **experts(file)}


def grouped_experts(file: Metadata) -> Json:
    return {
        "n_routed_experts": file.integer("expert_count"),
        "n_shared_experts": file.integer("expert_shared_count", 0),
        "moe_intermediate_size": file.width("ffn_down_exps.weight"),
        "first_k_dense_replace": file.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "norm_topk_prob": file.get("expert_weights_norm") is True,
        "n_group": file.integer("expert_group_count", 1) or 1,
        "topk_group": file.integer("expert_group_used_count", 1) or 1,
        **top_k(file),
    }


def original_context(file: Metadata) -> Json:
    own = file.integer("rope.scaling.original_context_length", 0)
    return {"original_max_position_embeddings": own or file.integer("context_length")}


def multipliers(file: Metadata) -> Json:
    return {
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "attention_multiplier": file.number("attention.scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }
