"""The keys of llama.cpp's architectures whose keys and values are made of latents."""

from __future__ import annotations

from localllm.gguf.common_keys import grouped_experts, original_context
from localllm.gguf.metadata import Json, Metadata
from localllm.gguf.rope import rope_scaling

SOFTMAX, SIGMOID = 1, 2  # what expert_gating_func is


def deepseek2(file: Metadata) -> Json:
    """Return the keys of DeepSeek V2, or of V3, whose experts sigmoids choose: GLM 4.7 Flash and Kimi K2 are models of
    that, too. Files of 2024 say neither of themselves."""
    gating = file.integer("expert_gating_func", SIGMOID if file.has("exp_probs_b.bias") else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise file.unsupported(f"experts that are chosen in another way (expert_gating_func {gating})")
    experts = grouped_experts(file)
    if gating == SOFTMAX:
        method = "greedy" if experts["n_group"] == 1 else "group_limited_greedy"
        own: Json = {"model_type": "deepseek_v2", "topk_method": method}
    else:
        own = {"model_type": "deepseek_v3"}
    # These files have one head of keys, the latent; those from before that have the heads that are made of it.
    kind = "_mla" if file.get("attention.key_length_mla") is not None else ""
    key_dim, value_dim = (file.integer(f"attention.{each}_length{kind}") for each in ("key", "value"))
    return {**own, **experts, **latent_attention(file, key_dim, value_dim), "rope_scaling": _latent_scaling(file)}


def latent_attention(file: Metadata, key_dim: int, value_dim: int) -> Json:
    """Return the sizes of heads whose keys, the rotated features included, and values have so many features."""
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


def minicpm3(file: Metadata) -> Json:
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
        **latent_attention(file, key_dim, value_dim),
        **original_context(file),
    }
