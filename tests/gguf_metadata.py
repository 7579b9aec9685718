"""What llama.cpp's conversion writes of a config.json into a GGUF file, under the names of the gguf package."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

from localllm.gguf.rope import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS
from localllm.kernels.state_shapes import Mamba2Shape, MambaShape
from localllm.layers.config import AttentionConfig, KeyValue, RopeConfig
from localllm.models.architecture import LayerConfig
from localllm.models.families import parse_config
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL, SLIDING, rope_sections

# model_type of a config.json -> GGUF's architecture
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "olmo2": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "granitemoe": "granitemoe",
    "phimoe": "phimoe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_moe": "hunyuan-moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "ministral3": "mistral3",
    "smollm3": "smollm3",
    "olmo3": "olmo2",
    "granite": "granite",
    "glm": "chatglm",
    "glm4": "glm4",
    "seed_oss": "seed_oss",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere2": "cohere2",
    "qwen3_vl_text": "qwen3vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "muse_glimmer_text": "muse-glimmer",
    "internlm3": "llama",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "nemotron": "nemotron",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "minicpm3": "minicpm3",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "jamba": "jamba",
    "mamba2": "mamba2",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "kimi_linear": "kimi-linear",
    "rwkv7": "rwkv7",
}
# Whose layers differ, and whose files are compared with their checkpoints alone.
HYBRIDS = (
    "mamba", "falcon_mamba", "jamba", "mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe",
    "kimi_linear", "rwkv7",
)  # fmt: skip
# Families whose files are those of another.
READ_AS = {
    "mistral": "llama",
    "internlm3": "llama",
    "gemma4_unified_text": "gemma4_text",
    "glm4_moe_lite": "deepseek_v3",
}
# Tensors of Gemma 4's routers by the names that llama.cpp's conversion gives them, which the package's table lacks.
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
# Windows: of these where there is one, and of which layers; of the others never.
WITH_PATTERN = (
    "olmo3", "exaone4", "muse_glimmer_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
)  # fmt: skip
WINDOWED = (*WITH_PATTERN, "phi3", "phimoe", "gemma2", "gemma3_text", "cohere2", "gpt_oss")
WITHOUT_HEAD_DIM = ("granite", "glm", "stablelm", "minicpm3", "jamba", "mamba2")  # whose heads share the hidden size
# Keys of a config.json, any of them, and GGUF's for them.
KEYS = {
    "LLM.CONTEXT_LENGTH": ("max_position_embeddings", "model_max_length"),
    "LLM.EMBEDDING_LENGTH": ("hidden_size",),
    "LLM.FEED_FORWARD_LENGTH": ("intermediate_size",),
    "LLM.EXPERT_COUNT": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "LLM.EXPERT_USED_COUNT": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    "LLM.EXPERT_SHARED_COUNT": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "LLM.EXPERT_WEIGHTS_SCALE": ("routed_scaling_factor",),
    "LLM.EXPERT_WEIGHTS_NORM": ("norm_topk_prob",),
    "LLM.EXPERT_GROUP_COUNT": ("n_group", "num_expert_group"),
    "LLM.EXPERT_GROUP_USED_COUNT": ("topk_group",),
    "LLM.LEADING_DENSE_BLOCK_COUNT": ("first_k_dense_replace", "moe_layer_start_index"),
    "LLM.INTERLEAVE_MOE_LAYER_STEP": ("moe_layer_interval",),
    "LLM.ATTN_LOGIT_SOFTCAPPING": ("attn_logit_softcapping",),
    "LLM.FINAL_LOGIT_SOFTCAPPING": ("final_logit_softcapping",),
    "LLM.EMBEDDING_SCALE": ("embedding_multiplier",),
    "LLM.RESIDUAL_SCALE": ("residual_multiplier",),
    "LLM.LOGIT_SCALE": ("logits_scaling", "logit_scale", "output_multiplier"),
    "LLM.FULL_ATTENTION_INTERVAL": ("full_attention_interval",),
    "SSM.CONV_KERNEL": ("linear_conv_kernel_dim",),
    "SSM.STATE_SIZE": ("linear_key_head_dim",),
    "SSM.GROUP_COUNT": ("linear_num_key_heads",),
    "SSM.TIME_STEP_RANK": ("linear_num_value_heads",),
    "Attention.SCALE": ("attention_multiplier",),
    "Attention.HEAD_COUNT": ("num_attention_heads",),
    "Attention.HEAD_COUNT_KV": ("num_key_value_heads",),
    "Attention.KEY_LENGTH": ("head_dim",),
    "Attention.VALUE_LENGTH": ("head_dim",),
    "Attention.LAYERNORM_RMS_EPS": ("rms_norm_eps", "norm_eps"),
    "Attention.LAYERNORM_EPS": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
}


def as_stored(value: Any) -> Any:
    """Numbers with a fraction are fp32 in a file."""
    return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value


def metadata_of(raw: Mapping[str, Any], architecture: str) -> dict[str, object]:
    """What llama.cpp's conversion writes of a config.json, under the names of the gguf package."""
    keys = pytest.importorskip("gguf").Keys

    def name_of(path: str) -> str:
        group, name = path.split(".")
        template: str = getattr(getattr(keys, group), name)
        return template.format(arch=architecture)

    found: dict[str, object] = {keys.General.ARCHITECTURE: architecture}
    for path, names in KEYS.items():
        value = next((raw[name] for name in names if raw.get(name) is not None), None)
        is_told = raw["model_type"] not in WITHOUT_HEAD_DIM or names != ("head_dim",)
        if value is not None and is_told:
            found[name_of(path)] = value
    if "linear_value_head_dim" in raw:
        found[name_of("SSM.INNER_SIZE")] = raw["linear_value_head_dim"] * raw["linear_num_value_heads"]
    extra = raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") or 0
    if "linear_attention" in (raw.get("layer_types") or ()):
        kinds = [kind == "linear_attention" for kind in raw["layer_types"]] + [False] * extra
        found[f"{architecture}.attention.recurrent_layers"] = kinds  # which the package does not know
    found[name_of("LLM.BLOCK_COUNT")] = num_layers_of(raw) + extra
    if extra:
        found[name_of("LLM.NEXTN_PREDICT_LAYERS")] = extra
    found |= {name_of(path): value for path, value in (_windows(raw) | _rope(raw)).items() if value is not None}
    found |= {name_of(path): value for path, value in _OWN.get(raw["model_type"], lambda _: {})(raw).items()}
    if raw.get("bos_token_id") is not None:
        found[keys.Tokenizer.BOS_ID] = raw["bos_token_id"]
    for token in parse_config(raw, "config.json").eos_token_ids[:1]:
        found[keys.Tokenizer.EOS_ID] = token
    return {name: as_stored(value) for name, value in found.items()}


def small(architecture: str = "llama", **keys: object) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    """The metadata and the shapes of a small model. keys: further ones, "__" for "." in them; None takes one away."""
    metadata: dict[str, object] = {
        "embedding_length": 64,
        "feed_forward_length": 32,
        "block_count": 2,
        "context_length": 128,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {key.replace("__", "."): value for key, value in keys.items()}
    present = {f"{architecture}.{key}": value for key, value in metadata.items() if value is not None}
    return {"general.architecture": architecture, **present}, {"token_embd.weight": (99, 64)}


def num_layers_of(raw: Mapping[str, Any]) -> int:
    """The layers of a file, which Nemotron H's lists."""
    return len(raw["layers_block_type"]) if "layers_block_type" in raw else int(raw["num_hidden_layers"])


def _windows(raw: Mapping[str, Any]) -> dict[str, Any]:
    kind, window = raw["model_type"], raw.get("sliding_window")
    if kind not in WINDOWED:
        return {}
    if kind not in WITH_PATTERN or window is None:
        return {"Attention.SLIDING_WINDOW": window or (0 if kind in ("phi3", "phimoe") else None)}
    slides = [each == "sliding_attention" for each in raw["layer_types"]]
    return {"Attention.SLIDING_WINDOW": window, "Attention.SLIDING_WINDOW_PATTERN": slides}


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw["model_type"] in ("mamba", "falcon_mamba", "jamba", "mamba2", "nemotron_h", "rwkv7"):
        return {}
    sections, rotating = rope_sections(Fields(raw, "config.json")), _rotating(raw)
    rope = sections[FULL].raw
    kind = rope.get("rope_type", rope.get("type"))
    theta = rotating.rope.theta if "alpha" in rope else rope.get("rope_theta") or raw.get("rope_theta")
    found = {
        "Rope.DIMENSION_COUNT": rotating.rotary_dim,
        "Rope.FREQ_BASE": None if theta is None else float(theta),
        "Rope.DIMENSION_SECTIONS": rope.get("mrope_section") and [*rope["mrope_section"], 0],
    }
    if sections[SLIDING] is not sections[FULL]:
        found["Rope.FREQ_BASE_SWA"] = sections[SLIDING].raw.get("rope_theta") or raw.get("rope_local_base_freq")
    if kind in ("linear", "yarn", "longrope"):
        found["Rope.SCALING_TYPE"] = kind
    if kind in ("yarn", "longrope"):
        original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        found["Rope.SCALING_ORIG_CTX_LEN"] = original
    if kind in ("linear", "yarn"):
        found["Rope.SCALING_FACTOR"] = rope["factor"]
    if kind == "yarn":
        names = {"attention_factor": "ATTN_FACTOR", "beta_fast": "BETA_FAST", "beta_slow": "BETA_SLOW"}
        found |= {f"Rope.SCALING_YARN_{name}": rope.get(key) for key, name in names.items()}
    return found


def _rotating(raw: Mapping[str, Any]) -> KeyValue:
    """The attention of the first layer that rotates."""
    config = parse_config(raw, "config.json")
    attentions = (*config.attentions, *config.latents)
    return next((each for each in attentions if each.rotary_dim), attentions[0])


def _growth(raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = raw["rope_parameters"]
    beta, scale = rope["llama_4_scaling_beta"], rope["mscale_all_dim"]
    return {"Attention.TEMPERATURE_SCALE": beta, "Rope.SCALING_YARN_LOG_MUL": scale}


def _gemma3n(raw: Mapping[str, Any]) -> dict[str, Any]:
    deviations = [NormalDist().inv_cdf(share) if share else -math.inf for share in raw["activation_sparsity_pattern"]]
    return {
        "LLM.ALTUP_ACTIVE_IDX": raw["altup_active_idx"],
        "LLM.ALTUP_NUM_INPUTS": raw["altup_num_inputs"],
        "LLM.EMBD_LENGTH_PER_LAYER_INP": raw["hidden_size_per_layer_input"],
        "Attention.SHARED_KV_LAYERS": raw["num_kv_shared_layers"],
        "LLM.ACTIVATION_SPARSITY_SCALE": deviations,
    }


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    shared, sliding = raw.get("num_kv_shared_layers", 0), raw["head_dim"]
    wide = _full(raw)
    full = wide.head_dim
    found = {
        "Attention.SHARED_KV_LAYERS": shared,
        "LLM.EMBD_LENGTH_PER_LAYER_INP": raw.get("hidden_size_per_layer_input") or 0,
        "Attention.KEY_LENGTH": full,
        "Attention.VALUE_LENGTH": full,
        "Attention.KEY_LENGTH_SWA": sliding,
        "Attention.VALUE_LENGTH_SWA": sliding,
        "Rope.DIMENSION_COUNT": full,
        "Rope.DIMENSION_COUNT_SWA": sliding,
    }
    if raw.get("use_double_wide_mlp"):
        widths = [raw["intermediate_size"]] * (raw["num_hidden_layers"] - shared)
        found["LLM.FEED_FORWARD_LENGTH"] = widths + [2 * raw["intermediate_size"]] * shared
    heads = {"sliding_attention": raw["num_key_value_heads"], "full_attention": wide.num_kv_heads}
    found["Attention.HEAD_COUNT_KV"] = [heads[kind] for kind in raw["layer_types"]]
    return found


def _full(raw: Mapping[str, Any]) -> AttentionConfig:
    """The attention of the full layers, whose heads a file may name layer by layer."""
    return next(each for each in parse_config(raw, "config.json").attentions if each.window is None)


def _latent(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Multi-head latent attention as one head of keys, which are latents."""
    latent, shared = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    found = {
        "LLM.EXPERT_GATING_FUNC": 1 if raw["model_type"] == "deepseek_v2" else 2,
        "Attention.HEAD_COUNT_KV": 1,
        "Attention.KEY_LENGTH": latent + shared,
        "Attention.VALUE_LENGTH": latent,
        "Attention.KEY_LENGTH_MLA": raw["qk_nope_head_dim"] + shared,
        "Attention.VALUE_LENGTH_MLA": raw["v_head_dim"],
    } | _ranks(raw)
    if "mlp_layer_types" in raw:
        found["LLM.LEADING_DENSE_BLOCK_COUNT"] = raw["mlp_layer_types"].count("dense")
    scale = rope_sections(Fields(raw, "config.json"))[FULL].raw.get("mscale_all_dim")
    return found if scale is None else found | {"Rope.SCALING_YARN_LOG_MUL": 0.1 * scale}


def _ranks(raw: Mapping[str, Any]) -> dict[str, Any]:
    query = {} if raw.get("q_lora_rank") is None else {"Attention.Q_LORA_RANK": raw["q_lora_rank"]}
    return {"Attention.KV_LORA_RANK": raw["kv_lora_rank"], **query}


def _minicpm3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"Attention.KEY_LENGTH": raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"], **_ranks(raw)}


def _scanned(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of Mamba."""
    [shape] = {each.shape for each in parse_config(raw, "config.json").recurrents}
    assert isinstance(shape, MambaShape)
    return {
        "SSM.INNER_SIZE": shape.features,
        "SSM.TIME_STEP_RANK": shape.step_rank,
        "SSM.STATE_SIZE": shape.state_size,
        "SSM.CONV_KERNEL": shape.conv_width,
    }


def _mamba1(raw: Mapping[str, Any]) -> dict[str, Any]:
    unused = {"LLM.CONTEXT_LENGTH": 1 << 20, "LLM.FEED_FORWARD_LENGTH": 0, "Attention.HEAD_COUNT": 0}
    norms = {"Attention.LAYERNORM_RMS_EPS": raw["layer_norm_epsilon"]}
    return {**_scanned(raw), **unused, **norms, "SSM.DT_B_C_RMS": raw["model_type"] == "falcon_mamba"}


def _jamba(raw: Mapping[str, Any]) -> dict[str, Any]:
    layers, period, offset = raw["num_hidden_layers"], raw["attn_layer_period"], raw["attn_layer_offset"]
    kinds = ["attention" if layer % period == offset else "mamba" for layer in range(layers)]
    return {**_scanned(raw), **_key_heads(raw, kinds)}


def _mamba(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of Mamba 2."""
    [shape] = {each.shape for each in parse_config(raw, "config.json").recurrents}
    assert isinstance(shape, Mamba2Shape)
    return {
        "SSM.INNER_SIZE": shape.features,
        "SSM.TIME_STEP_RANK": shape.num_heads,
        "SSM.GROUP_COUNT": shape.num_groups,
        "SSM.STATE_SIZE": shape.state_size,
        "SSM.CONV_KERNEL": shape.conv_width,
    }


def _mamba2(raw: Mapping[str, Any]) -> dict[str, Any]:
    unused = {"LLM.CONTEXT_LENGTH": 1 << 20, "LLM.FEED_FORWARD_LENGTH": 0, "Attention.HEAD_COUNT": 0}
    return {**_mamba(raw), **unused, "Attention.LAYERNORM_RMS_EPS": raw["layer_norm_epsilon"]}


def _key_heads(raw: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Heads of keys, of which layers without attention have none."""
    heads = raw["num_key_value_heads"]
    return {"Attention.HEAD_COUNT_KV": [heads if "attention" == each.removeprefix("full_") else 0 for each in kinds]}


def _granitemoehybrid(raw: Mapping[str, Any]) -> dict[str, Any]:
    rotates = {"Rope.SCALING_FINETUNED": False, "Rope.DIMENSION_COUNT": 16}
    width = {"LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH": raw["shared_intermediate_size"]}
    return {**_mamba(raw), **_key_heads(raw, raw["layer_types"]), **rotates, **width}


def _nemotron_h(raw: Mapping[str, Any]) -> dict[str, Any]:
    kinds = raw["layers_block_type"]
    widths = {"mlp": raw["intermediate_size"], "moe": raw["moe_intermediate_size"]}
    return {
        **_mamba(raw),
        **_key_heads(raw, kinds),
        "Attention.LAYERNORM_EPS": raw["layer_norm_epsilon"],
        "LLM.FEED_FORWARD_LENGTH": [widths.get(kind, 0) for kind in kinds],
        "Rope.DIMENSION_COUNT": 16,
        "Rope.SCALING_FINETUNED": False,
    }


def _lfm2(raw: Mapping[str, Any]) -> dict[str, Any]:
    [width] = {mlp.intermediate_size for mlp in parse_config(raw, "config.json").mlps[:1]}
    found = {"ShortConv.L_CACHE": raw["conv_L_cache"], "LLM.FEED_FORWARD_LENGTH": width}
    dense = {"LLM.LEADING_DENSE_BLOCK_COUNT": raw["num_dense_layers"]} if "num_dense_layers" in raw else {}
    return {**found, **dense, **_key_heads(raw, raw["layer_types"])}


def _kimi_linear(raw: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"KDA.HEAD_DIM": raw["linear_head_dim"], "Rope.DIMENSION_COUNT": raw["qk_rope_head_dim"]}
    return {**_latent(raw), **_key_heads(raw, raw["layer_types"]), **sizes}


def _rwkv7(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "LLM.CONTEXT_LENGTH": 1 << 20,
        "Attention.HEAD_COUNT": 0,
        "WKV.HEAD_SIZE": raw["head_dim"],
        "Attention.DECAY_LORA_RANK": raw["decay_low_rank_dim"],
        "Attention.ICLR_LORA_RANK": raw["a_low_rank_dim"],
        "Attention.VALUE_RESIDUAL_MIX_LORA_RANK": raw["v_low_rank_dim"],
        "Attention.GATE_LORA_RANK": raw["gate_low_rank_dim"],
    }


_OWN = {
    "kimi_linear": _kimi_linear,
    "rwkv7": _rwkv7,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "jamba": _jamba,
    "mamba2": _mamba2,
    "granitemoehybrid": _granitemoehybrid,
    "falcon_h1": _mamba,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
    "minicpm3": _minicpm3,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "ministral3": _growth,
    "stablelm": lambda raw: {"LLM.USE_PARALLEL_RESIDUAL": raw["use_parallel_residual"]},
}


def factors_of(raw: Mapping[str, Any]) -> dict[str, list[float]]:
    """The tensors of rotary factors that llama.cpp's conversion writes."""
    fields = Fields(raw, "config.json")
    rope = rope_sections(fields)[FULL].raw
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "longrope":
        return {
            LONG_FACTORS: [as_stored(float(factor)) for factor in rope["long_factor"]],
            SHORT_FACTORS: [as_stored(float(factor)) for factor in rope["short_factor"]],
        }
    if kind == "proportional":
        pairs = _full(raw).head_dim // 2
        turning = int(pairs * rope["partial_rotary_factor"])
        return {LLAMA3_FACTORS: [1.0] * turning + [as_stored(1e30)] * (pairs - turning)}
    if kind != "llama3":
        return {}
    dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    theta = rope.get("rope_theta") or raw["rope_theta"]
    return {LLAMA3_FACTORS: llama3_factors(theta, dim, rope)}


def llama3_factors(theta: float, dim: int, rope: Mapping[str, Any]) -> list[float]:
    factors = []
    low, high = (rope[f"{name}_freq_factor"] for name in ("low", "high"))
    original = rope["original_max_position_embeddings"]
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (index / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return [as_stored(factor) for factor in factors]


def assert_same_model(made: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    ours, theirs = (vars(parse_config(each, "config.json")).copy() for each in (json.loads(json.dumps(made)), raw))
    for config in (ours, theirs):
        config.pop("dtype")
        config.pop("draft_head", None)
        config["eos_token_ids"] = config["eos_token_ids"][:1]  # a file names one
        config["logit_scale"] = as_stored(config["logit_scale"])
        config["layers"] = [with_stored_factors(layer) for layer in config["layers"]]
    if raw["model_type"] in READ_AS:
        assert ours.pop("model_type") == READ_AS[raw["model_type"]]
        theirs.pop("model_type")
    assert ours == theirs


def with_stored_factors(layer: LayerConfig) -> LayerConfig:
    if not isinstance(layer.mixer, KeyValue):
        return layer
    rope = layer.mixer.rope
    if rope.kind == "dynamic":  # which is not stored, and changes nothing within the context
        rope = RopeConfig(rope.theta)
    short, long = (tuple(map(as_stored, factors)) for factors in (rope.short_factor, rope.long_factor))
    stored = replace(rope, theta=as_stored(rope.theta), short_factor=short, long_factor=long)
    return replace(layer, mixer=replace(layer.mixer, rope=stored))
