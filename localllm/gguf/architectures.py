"""The keys of a config.json that one of llama.cpp's architectures needs beside those that all have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType

from localllm.gguf import hybrids, latents
from localllm.gguf.common_keys import (
    FULL,
    SLIDING,
    all_experts,
    experts,
    grouped_experts,
    multipliers,
    original_context,
    top_k,
)
from localllm.gguf.metadata import MAX_LAYERS, Json, Metadata, decimal
from localllm.gguf.names import HEAD_NORMS
from localllm.gguf.rope import DEFAULT_THETA, LLAMA3_FACTORS, factors_of, rope_scaling

_PER_LAYER = "attention.sliding_window_pattern"


def _plain(model_type: str, **keys: object) -> Callable[[Metadata], Json]:
    """Return what reads a file that says nothing besides."""
    return lambda _: {"model_type": model_type, **keys}


def _llama(file: Metadata) -> Json:
    if file.integer("expert_count", 0):
        own = {"num_local_experts": file.integer("expert_count"), **top_k(file)}
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
    return {"model_type": "qwen3_moe", "use_sliding_window": False, "norm_topk_prob": True, **experts(file)}


def _qwen3vlmoe(file: Metadata) -> Json:
    return {**_qwen3moe(file), "model_type": "qwen3_vl_moe_text"}


def _qwen2moe(file: Metadata) -> Json:
    return {
        "model_type": "qwen2_moe",
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "qkv_bias": file.has_bias,
        **all_experts(file),
    }


def _phi3(file: Metadata) -> Json:
    return {"model_type": "phi3", **original_context(file)}


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
        **top_k(file),
        **original_context(file),
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
        "rope_parameters": {FULL: full, SLIDING: sliding},
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
    full = [layer for layer, kind in enumerate(kinds[: max(own, 0)]) if kind == FULL]
    names = [{f"blk.{layer}.attn_{part}.weight" for part in ("v", "qkv")} for layer in full]
    found: Json = {"num_key_value_heads": heads.get(SLIDING), "num_global_key_value_heads": heads.get(FULL)}
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
        "layer_rope_theta": [theta if kind == SLIDING else 0 for kind in kinds],
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
    return {"model_type": "olmoe", "norm_topk_prob": False, **own, **top_k(file)}


def _glm4moe(file: Metadata) -> Json:
    return {"model_type": "glm4_moe", "use_qk_norm": file.has("attn_q_norm.weight"), **grouped_experts(file)}


def _dots1(file: Metadata) -> Json:
    return {"model_type": "dots1", "sliding_window": None, **grouped_experts(file)}


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
    return {"model_type": "granite", **multipliers(file)}


def _granitemoe(file: Metadata) -> Json:
    if file.has("ffn_down_shexp.weight"):
        raise file.unsupported("a shared expert")
    return {
        "model_type": "granitemoe",
        "intermediate_size": file.width("ffn_down_exps.weight"),
        "num_local_experts": file.integer("expert_count"),
        **multipliers(file),
        **top_k(file),
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
        **top_k(file),
    }


def _minimax_m2(file: Metadata) -> Json:
    own = {"intermediate_size": file.width("ffn_down_exps.weight"), "num_local_experts": file.integer("expert_count")}
    return {"model_type": "minimax_m2", **own, **top_k(file)}


def _hunyuan_moe(file: Metadata) -> Json:
    return {
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": file.width("ffn_down_exps.weight"),
        "num_experts": file.integer("expert_count"),
        "moe_topk": file.integer("expert_used_count"),
    }


def _query_scalar(file: Metadata, *, largest: int) -> int:
    """Return what Gemma's scores are divided by the root of, which GGUF does not store: the size of a head, and in the
    largest model of a generation, known by its number of layers, a head's share of the hidden size."""
    is_largest = file.num_layers == largest
    return file.integer("embedding_length") // file.integer("attention.head_count") if is_largest else file.head_dim


def _layer_types(file: Metadata, default: int) -> list[str]:
    """Return the kind of each layer. default: every so many is full where the file does not say."""
    pattern = file.keys.get(f"{file.architecture}.{_PER_LAYER}")
    if isinstance(pattern, list):
        return [SLIDING if slides else FULL for slides in pattern[: MAX_LAYERS + 1]]
    every = file.integer(_PER_LAYER, default) or default
    return [SLIDING if (layer + 1) % every else FULL for layer in range(file.num_layers)]


# Which say of heads what others do not.
OF_OTHER_HEADS = ("deepseek2", "minicpm3", "mamba", "mamba2", "kimi-linear", "rwkv7")
# Whose layers lack what others have.
HYBRIDS = ("granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")
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
        "qwen3next": hybrids.qwen3next,
        "qwen35": hybrids.qwen35,
        "qwen35moe": hybrids.qwen35moe,
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
        "deepseek2": latents.deepseek2,
        "minicpm3": latents.minicpm3,
        "mamba": hybrids.mamba,
        "jamba": hybrids.jamba,
        "mamba2": hybrids.mamba2,
        "granitehybrid": hybrids.granitehybrid,
        "falcon-h1": hybrids.falcon_h1,
        "nemotron_h": hybrids.nemotron_h,
        "nemotron_h_moe": hybrids.nemotron_h,
        "lfm2": hybrids.lfm2,
        "lfm2moe": hybrids.lfm2moe,
        "kimi-linear": hybrids.kimi_linear,
        "rwkv7": hybrids.rwkv7,
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
        "mamba": ("mamba", "falcon_mamba"),
        "nemotron_h_moe": ("nemotron_h",),
        "lfm2moe": ("lfm2_moe",),
        "kimi-linear": ("kimi_linear",),
        "deepseek2": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    }
)


def holds_type(architecture: str, model_type: str) -> bool:
    """Return whether files of an architecture may hold a model of this type of Hugging Face's."""
    known = architecture in ARCHITECTURES
    return known and model_type.removesuffix("_text") in _MODEL_TYPES.get(architecture, (architecture,))
