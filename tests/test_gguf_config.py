"""Names and configurations of GGUF files, against the gguf package's names and the configs that files are made of."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.gguf.config import eos_ids, hf_config
from localllm.gguf.header import read_header
from localllm.gguf.names import hf_name, holds_weights, stored_form
from localllm.gguf.rope import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS, rope_factors
from localllm.layers.config import AttentionConfig, DeltaNetConfig
from localllm.models.architecture import LayerConfig
from localllm.models.families import parse_config
from localllm.models.fields import Fields
from localllm.models.layout import block_layouts
from localllm.models.rope_fields import FULL, LINEAR, SLIDING, partial_rotary_factor, rope_sections
from tests.thinning import examples

Locate = Callable[[str], Path]

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
}
REAL = [
    *("Mixtral-8x7B-v0.1", "codellama_7b", "gemma2_9b", "gemma3_1b_it", "llama-3.3-70b-instruct", "llama2_7b"),
    *("llama3_1_8b", "llama3_2_1b", "mistral_7b_v03", "olmo2_7b", "phi-3_5", "phi-4", "qwen2.5-7b", "qwen2.5_3b"),
    *("qwen2_0_5b", "qwen3-30b-a3b", "qwen3-8b", "qwen3_0.6b", "smollm2_135m", "tinyllama_1b_chat_v1.0"),
]
# Keys of a config.json, any of them, and GGUF's for them.
KEYS = {
    "LLM.CONTEXT_LENGTH": ("max_position_embeddings",),
    "LLM.EMBEDDING_LENGTH": ("hidden_size",),
    "LLM.FEED_FORWARD_LENGTH": ("intermediate_size",),
    "LLM.EXPERT_COUNT": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "LLM.EXPERT_USED_COUNT": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "LLM.EXPERT_SHARED_COUNT": ("n_shared_experts", "moe_num_shared_experts"),
    "LLM.EXPERT_WEIGHTS_SCALE": ("routed_scaling_factor",),
    "LLM.EXPERT_WEIGHTS_NORM": ("norm_topk_prob",),
    "LLM.EXPERT_GROUP_COUNT": ("n_group",),
    "LLM.EXPERT_GROUP_USED_COUNT": ("topk_group",),
    "LLM.LEADING_DENSE_BLOCK_COUNT": ("first_k_dense_replace", "moe_layer_start_index"),
    "LLM.INTERLEAVE_MOE_LAYER_STEP": ("moe_layer_interval",),
    "LLM.ATTN_LOGIT_SOFTCAPPING": ("attn_logit_softcapping",),
    "LLM.FINAL_LOGIT_SOFTCAPPING": ("final_logit_softcapping",),
    "LLM.EMBEDDING_SCALE": ("embedding_multiplier",),
    "LLM.RESIDUAL_SCALE": ("residual_multiplier",),
    "LLM.LOGIT_SCALE": ("logits_scaling",),
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
    "Attention.LAYERNORM_RMS_EPS": ("rms_norm_eps",),
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
        if value is not None:
            found[name_of(path)] = value
    if "linear_value_head_dim" in raw:
        found[name_of("SSM.INNER_SIZE")] = raw["linear_value_head_dim"] * raw["linear_num_value_heads"]
    extra = raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") or 0
    if "linear_attention" in (raw.get("layer_types") or ()):
        kinds = [kind == "linear_attention" for kind in raw["layer_types"]] + [False] * extra
        found[f"{architecture}.attention.recurrent_layers"] = kinds  # which the package does not know
    found[name_of("LLM.BLOCK_COUNT")] = raw["num_hidden_layers"] + extra
    if extra:
        found[name_of("LLM.NEXTN_PREDICT_LAYERS")] = extra
    if raw["model_type"] in ("phi3", "phimoe", "gemma2", "gemma3_text"):
        found[name_of("Attention.SLIDING_WINDOW")] = raw.get("sliding_window") or 0
    fields = Fields(raw, "config.json")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    default_share = {"glm4_moe": 0.5, "minimax_m2": raw.get("rotary_dim", head_dim) / head_dim}
    share = default_share.get(raw["model_type"], 1.0)
    share = share if partial_rotary_factor(fields) == 1.0 else partial_rotary_factor(fields)
    found[name_of("Rope.DIMENSION_COUNT")] = int(head_dim * share)
    sections = rope_sections(fields)
    theta = sections[FULL].raw.get("rope_theta") or raw.get("rope_theta")
    if theta is not None:
        found[name_of("Rope.FREQ_BASE")] = float(theta)
    if raw["model_type"] == "gemma3_text" and (local := sections[SLIDING].raw.get("rope_theta")):
        found[name_of("Rope.FREQ_BASE_SWA")] = local
    kind = sections[FULL].raw.get("rope_type", sections[FULL].raw.get("type"))
    if kind in ("linear", "yarn", "longrope"):
        found[name_of("Rope.SCALING_TYPE")] = kind
    if kind in ("linear", "yarn"):
        found[name_of("Rope.SCALING_FACTOR")] = sections[FULL].raw["factor"]
    for key, path in {"beta_fast": "SCALING_YARN_BETA_FAST", "beta_slow": "SCALING_YARN_BETA_SLOW"}.items():
        if kind == "yarn" and key in sections[FULL].raw:
            found[name_of(f"Rope.{path}")] = sections[FULL].raw[key]
    original = raw.get("original_max_position_embeddings") or sections[FULL].raw.get("original_max_position_embeddings")
    if original is not None and kind in ("yarn", "longrope"):
        found[name_of("Rope.SCALING_ORIG_CTX_LEN")] = original
    if raw.get("bos_token_id") is not None:
        found[keys.Tokenizer.BOS_ID] = raw["bos_token_id"]
    for token in parse_config(raw, "config.json").eos_token_ids[:1]:
        found[keys.Tokenizer.EOS_ID] = token
    return {name: as_stored(value) for name, value in found.items()}


def tensors_of(raw: Mapping[str, Any], architecture: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """GGUF's name -> (shape, plain name) of every tensor of the model, through the gguf package's table of names."""
    gguf = pytest.importorskip("gguf")
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    config = parse_config(raw, "config.json")
    names = gguf.get_tensor_name_map(kind, len(config.layers))
    found: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(plain: str, shape: tuple[int, ...]) -> None:
        # The package knows a correction and a step by the names that its conversion gives them.
        known = plain.replace("e_score_correction_bias", "e_score_correction.bias")
        known = known.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
        name = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert name is not None, plain
        found[name if re.search(r"\.(weight|bias|ssm_a)$", name) else f"{name}.weight"] = shape, plain

    for block in block_layouts(config):
        for matrix in block.matrices:
            fused = architecture == "phi3" and matrix.name in ("qkv_proj", "gate_up_proj")
            parts = {matrix.stored: matrix.out_features} if fused else matrix.parts
            for part, rows in parts.items():
                add(f"{part}.weight", (rows, matrix.in_features))
                if matrix.has_bias:
                    add(f"{part}.bias", (rows,))
        for vector in block.vectors:
            add(vector.stored, (vector.features,))
        if block.experts is not None:
            count, width = block.experts.num_experts, block.experts.config.intermediate_size
            hidden = config.hidden_size
            for part, shape in {
                "gate_proj": (width, hidden),
                "up_proj": (width, hidden),
                "down_proj": (hidden, width),
            }.items():
                add(f"{block.experts.stored}.{part}", (count, *shape))
    return found


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


def converted(raw: Mapping[str, Any]) -> dict[str, Any]:
    architecture = ARCHITECTURES[raw["model_type"]]
    shapes = {name: shape for name, (shape, _) in tensors_of(raw, architecture).items()}
    factors = factors_of(raw)
    shapes |= {name: (len(values),) for name, values in factors.items()}
    return hf_config(metadata_of(raw, architecture), shapes, factors)


def assert_same_model(made: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    ours, theirs = (vars(parse_config(each, "config.json")).copy() for each in (json.loads(json.dumps(made)), raw))
    for config in (ours, theirs):
        config.pop("dtype")
        config.pop("draft_head", None)
        config["eos_token_ids"] = config["eos_token_ids"][:1]  # a file names one
        config["layers"] = [with_stored_factors(layer) for layer in config["layers"]]
    if raw["model_type"] == "mistral":
        assert ours.pop("model_type") == "llama"
        theirs.pop("model_type")
    assert ours == theirs


def with_stored_factors(layer: LayerConfig) -> LayerConfig:
    if not isinstance(layer.mixer, AttentionConfig):
        return layer
    rope = layer.mixer.rope
    short, long = (tuple(map(as_stored, factors)) for factors in (rope.short_factor, rope.long_factor))
    return replace(layer, mixer=replace(layer.mixer, rope=replace(rope, short_factor=short, long_factor=long)))


# Names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_tensor_has_the_name_that_its_block_reads(model_type: str) -> None:
    architecture = ARCHITECTURES[model_type]
    for name, (_, plain) in tensors_of(config_of_transformers(model_type), architecture).items():
        assert hf_name(name, architecture) == plain
        assert holds_weights(name)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES.values())))
def test_every_tensor_that_the_gguf_package_lists_is_known(architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = [gguf.TENSOR_NAMES[each].format(bid=7) + ".weight" for each in gguf.MODEL_TENSORS[kind]]
    assert names
    for name in names:
        assert (hf_name(name, architecture) is not None) == holds_weights(name), name


@pytest.mark.parametrize(
    ("name", "architecture", "plain"),
    [
        ("blk.3.attn_q.bias", "qwen2", "model.layers.3.self_attn.q_proj.bias"),
        ("blk.3.ffn_down.5.weight", "llama", "model.layers.3.mlp.experts.5.down_proj.weight"),
        ("blk.0.ffn_gate_up_exps.weight", "qwen3moe", "model.layers.0.mlp.experts.gate_up_proj"),
        ("blk.0.attn_q.scale", "llama", "model.layers.0.self_attn.q_proj.scale"),
        ("blk.3.exp_probs_b.bias", "glm4moe", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("blk.3.exp_probs_b", "ernie4_5-moe", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("output_norm.bias", "phimoe", "model.norm.bias"),
        ("blk.3.ssm_a", "qwen35", "model.layers.3.linear_attn.A_log"),
        ("blk.3.ssm_dt.bias", "qwen3next", "model.layers.3.linear_attn.dt_bias"),
        ("blk.3.attn_qkv.weight", "qwen3next", "model.layers.3.linear_attn.in_proj_qkv.weight"),
        ("blk.3.attn_gate.weight", "qwen3next", "model.layers.3.linear_attn.in_proj_z.weight"),
        ("rope_freqs.weight", "llama", None),
        ("blk.3.attn_q.5.weight", "llama", None),
        ("blk.3.ssm_in.weight", "llama", None),
        ("blk.999999999999.attn_q.weight", "llama", None),
        ("blk.x.attn_q.weight", "llama", None),
        ("", "llama", None),
    ],
)
def test_names_beside_the_usual_ones(name: str, architecture: str, plain: str | None) -> None:
    assert hf_name(name, architecture) == plain


def test_the_rows_of_permuted_heads_come_back() -> None:
    np = pytest.importorskip("numpy")
    heads, head_dim, K = 3, 8, 5
    weight = np.arange(heads * head_dim * K).reshape(heads * head_dim, K)
    # As llama.cpp's conversion stores it: the halves of a head become pairs.
    stored = weight.reshape(heads, 2, head_dim // 2, K).swapaxes(1, 2).reshape(weight.shape)
    # As `GgufForm` says.
    read = stored.reshape(heads, head_dim // 2, 2, K).swapaxes(1, 2).reshape(weight.shape)
    assert (read == weight).all()
    # ERNIE's heads are in pairs in Hugging Face's form as well.
    paired = {name for name in ARCHITECTURES.values() if stored_form(name).pairs_heads}
    assert paired == {"llama", "granitemoe", "ernie4_5-moe"}


def test_the_forms_of_architectures() -> None:
    """As llama.cpp's conversion has them: `modify_tensors` in conversion/gemma.py and conversion/qwen.py."""
    names = set(ARCHITECTURES.values())
    with_offset = {"gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"}
    assert {name for name in names if stored_form(name).norm_offset} == with_offset
    assert {name for name in names if stored_form(name).tiles_value_heads} == {"qwen35", "qwen35moe"}


# Configurations


# Where a default of transformers is none that a model has, or that the format cannot say.
FEW: dict[str, dict[str, object]] = {
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "vocab_size": 999},
    "qwen3_moe": {"norm_topk_prob": True},
    "glm4_moe": {"num_attention_heads": 64, "n_routed_experts": 16, "use_qk_norm": True},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 4, "sliding_window": None},
    **{name: {"sliding_window": None} for name in ("mistral", "mixtral", "phimoe")},
}


def config_of_transformers(model_type: str, **keys: object) -> dict[str, Any]:
    """The config.json that transformers writes for its default model of the family."""
    from transformers import AutoConfig

    few: dict[str, object] = {"num_hidden_layers": 6, **FEW.get(model_type, {})}
    config = AutoConfig.for_model(model_type, **{**few, **keys})
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw


@pytest.mark.parametrize("name", REAL)
def test_a_real_config_comes_back(name: str, shared_data: Locate) -> None:
    raw = json.loads(shared_data(f"configs/{name}.json").read_text())
    assert_same_model(converted(raw), raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_config_of_each_family_comes_back(model_type: str, tied: bool) -> None:
    if model_type == "gemma2" and not tied:
        pytest.skip("no Gemma 2 has a head of its own")
    raw = config_of_transformers(model_type, tie_word_embeddings=tied)
    assert_same_model(converted(raw), raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "other llama3", "shifted llama3"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
def test_a_rope_scaling_comes_back(model_type: str, kind: str) -> None:
    original = {"original_max_position_embeddings": 4096}
    rope: dict[str, Any] = {
        "linear": {"rope_type": "linear", "factor": 2.5},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, **original},
        "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        "other llama3": {
            "rope_type": "llama3",
            "factor": 3.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 8.0,
            **original,
        },
        "shifted llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0}
        | {"original_max_position_embeddings": 16384},
    }[kind]
    raw = config_of_transformers(model_type, rope_parameters={**rope, "rope_theta": 500000.0})
    made = converted(raw)
    scaling = made["rope_scaling"]
    assert isinstance(scaling, dict)
    assert scaling["rope_type"] == rope["rope_type"]
    if kind != "shifted llama3":
        assert_same_model(made, raw)
        return
    # Only the ratios of the context and its limits are in a file.
    dim = raw["head_dim"] if raw.get("head_dim") else raw["hidden_size"] // raw["num_attention_heads"]
    factors = (llama3_factors(500000.0, dim, each) for each in (scaling, rope))
    assert next(factors) == pytest.approx(next(factors), rel=1e-4)


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


def test_a_file_is_read_with_its_factors(tmp_path: Path) -> None:
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    path, writer = tmp_path / "model.gguf", gguf.GGUFWriter(tmp_path / "model.gguf", "phi3")
    for key, value in small("phi3", rope__scaling__original_context_length=64)[0].items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((99, 64), np.float32))
    writer.add_tensor(LONG_FACTORS, np.array([1.08, 2.5] * 4, np.float32))
    writer.add_tensor(SHORT_FACTORS, np.array([1.0, 1.1] * 4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    config = hf_config(header.metadata, shapes, rope_factors([header]), str(path))
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [as_stored(1.08), 2.5] * 4,
        "short_factor": [1.0, as_stored(1.1)] * 4,
    }
    assert parse_config(config, str(path)).layers[0].mixer.rope.original_max_position_embeddings == 64
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight is missing"):
        hf_config(header.metadata, shapes)


def test_values_for_each_layer_are_one_where_they_agree() -> None:
    metadata, shapes = small(attention__head_count_kv=[2, 2])
    assert hf_config(metadata, shapes)["num_key_value_heads"] == 2
    metadata, shapes = small(attention__head_count_kv=[2, 4])
    with pytest.raises(UnsupportedModelError, match=r"another attention\.head_count_kv in each layer"):
        hf_config(metadata, shapes)


def test_the_largest_gemmas_scale_by_their_width() -> None:
    for architecture, layers, scalar in [("gemma2", 26, 8), ("gemma2", 46, 16), ("gemma3", 48, 8), ("gemma3", 62, 16)]:
        keys: dict[str, object] = {"block_count": layers, "attention__key_length": 8, "attention__sliding_window": 16}
        assert hf_config(*small(architecture, **keys))["query_pre_attn_scalar"] == scalar


def test_layers_of_gemma_slide_as_the_file_says() -> None:
    keys: dict[str, object] = {"attention__key_length": 8, "attention__sliding_window": 16}
    for pattern, expected in [
        ([True, False], ["sliding", "full"]),
        ([False, True], ["full", "sliding"]),
        (1, ["full"] * 2),
    ]:
        config = hf_config(*small("gemma3", attention__sliding_window_pattern=pattern, **keys))
        assert config["layer_types"] == [f"{kind}_attention" for kind in expected]
    assert hf_config(*small("gemma3", attention__key_length=8))["layer_types"] == ["full_attention"] * 2


DELTA: dict[str, object] = {
    "block_count": 4,
    "ssm__conv_kernel": 4,
    "ssm__state_size": 16,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 4,
    "ssm__inner_size": 64,
}
EXPERTS: dict[str, object] = {"expert_count": 8, "expert_used_count": 2}


def small_hybrid(architecture: str, **keys: object) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    metadata, shapes = small(architecture, **{**DELTA, **EXPERTS, **keys})
    if architecture != "qwen35":
        shapes |= {f"blk.0.ffn_down_{kind}.weight": (64, 24) for kind in ("exps", "shexp")}
    return metadata, shapes


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35", "qwen35moe"])
def test_layers_with_states_are_where_the_file_says(architecture: str) -> None:
    L, F, mtp = LINEAR, FULL, {"nextn_predict_layers": 1}
    recurrent = [True, False, False, True, False]
    for keys, expected in [
        ({}, [L, L, L, F]),
        ({"full_attention_interval": 2}, [L, F, L, F]),
        ({"block_count": 5, **mtp}, [L, L, L, F]),
        ({"block_count": 5, "attention__recurrent_layers": recurrent, **mtp}, [L, F, F, L]),
    ]:
        config = hf_config(*small_hybrid(architecture, **keys))
        assert (config["layer_types"], config["num_hidden_layers"]) == (expected, 4)
        mixers = [type(layer.mixer) for layer in parse_config(config, "config.json").layers]
        assert mixers == [DeltaNetConfig if kind == LINEAR else AttentionConfig for kind in expected]


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"ssm__conv_kernel": None}, r"ssm\.conv_kernel"),
        ({"ssm__state_size": None}, r"ssm\.state_size"),
        ({"ssm__group_count": None}, r"ssm\.group_count"),
        ({"ssm__time_step_rank": None}, r"ssm\.time_step_rank"),
        ({"ssm__time_step_rank": 0}, r"ssm\.inner_size"),
        ({"ssm__inner_size": None}, r"ssm\.inner_size"),
        ({"ssm__inner_size": 63}, r"ssm\.inner_size"),
        ({"ssm__group_count": 3}, "linear_num_value_heads"),
        ({"ssm__group_count": 0}, "linear_num_key_heads"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"full_attention_interval": 5}, "layer_types"),  # no layer has keys and values
        ({"nextn_predict_layers": 4}, "block_count"),
        ({"attention__recurrent_layers": [True, False]}, r"recurrent_layers"),
        ({"attention__recurrent_layers": [True, False, True, False, False]}, r"recurrent_layers"),
        ({"attention__recurrent_layers": [1, 0, 1, 0]}, r"recurrent_layers"),
        ({"attention__recurrent_layers": True}, r"recurrent_layers"),
    ],
)
def test_a_hybrid_that_does_not_add_up_is_refused_by_its_key(
    architecture: str, keys: dict[str, object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse_config(hf_config(*small_hybrid(architecture, **keys)), "config.json")


def test_experts_alone_need_no_other_width() -> None:
    config = hf_config(*small_hybrid("qwen35moe", feed_forward_length=None))
    assert parse_config(config, "config.json").mixtures[0].expert.intermediate_size == 24
    for architecture, key in {"qwen35": "feed_forward_length", "qwen3next": "intermediate_size"}.items():
        with pytest.raises(CheckpointError, match=key):
            parse_config(hf_config(*small_hybrid(architecture, feed_forward_length=None)), "config.json")
    metadata, shapes = small_hybrid("qwen35moe")
    del shapes["blk.0.ffn_down_shexp.weight"]
    with pytest.raises(CheckpointError, match="ffn_down_shexp"):
        hf_config(metadata, shapes)


def test_ids_that_end_a_text() -> None:
    keys = {f"tokenizer.ggml.{name}_token_id": index for name, index in {"eos": 1, "eot": 3, "eom": 1}.items()}
    assert eos_ids(keys) == [1, 3]
    tokens = ["a", "</s>", "<|im_end|>", "<|eot_id|>", "<|end|>"]
    table = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 4, 1]}
    assert eos_ids({**keys, **table}) == [1, 3, 2]  # <|end|> is an ordinary token there
    hostile = {"tokenizer.ggml.eos_token_id": [1], "tokenizer.ggml.eot_token_id": 1 << 60, **table}
    assert eos_ids(hostile) == [1, 2, 3]
    assert eos_ids({}) == []


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "clip"}, "image or audio encoder"),
        ({"general.architecture": "qwen2", "general.type": "mmproj"}, "image or audio encoder"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA adapter"),
        ({"general.type": "imatrix", "general.architecture": "llama"}, "importance matrix"),
        ({"general.architecture": "mamba2"}, "'mamba2' cannot run here"),
        (small("olmo2", attention__sliding_window=4096)[0], "OLMo 3"),
        (small("mistral3", attention__temperature_scale=0.1)[0], "Ministral 3"),
        (small("qwen3", attention__causal=False)[0], "both directions"),
        (small("llama", attention__value_length=32)[0], "values of another size"),
        (small("llama", rope__scaling__type="spiral")[0], "RoPE scaling 'spiral'"),
    ],
)
def test_what_does_not_run_is_refused_by_name(metadata: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        hf_config(metadata, small()[1], source="a.gguf")
    assert "a.gguf" in caught.value.what
    assert caught.value.fixes
    if "mamba2" in said:
        assert "qwen3moe" in caught.value.why


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"embedding_length": None}, r"llama\.embedding_length .*it is absent|llama\.embedding_length"),
        ({"embedding_length": "64"}, r"llama\.embedding_length"),
        ({"embedding_length": -1}, r"llama\.embedding_length"),
        ({"embedding_length": True}, r"llama\.embedding_length"),
        ({"attention__head_count": 0}, r"llama\.attention\.head_count"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, r"layer_norm_rms_epsilon"),
        ({"rope__freq_base": math.inf}, r"rope\.freq_base"),
        ({"block_count": 1 << 30}, r"block_count"),
        ({"block_count": 0}, r"block_count"),
        ({"attention__head_count_kv": []}, r"head_count_kv"),
        ({"attention__head_count_kv": [1] * 100_000}, r"head_count_kv"),
    ],
)
def test_unusable_values_are_refused_by_their_key(keys: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        hf_config(*small(**keys))


def test_a_file_without_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no model that writes text"):
        hf_config(small()[0], {})
    with pytest.raises(CheckpointError, match="does not say what it holds"):
        hf_config({}, {})


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.floats(1.0, width=32), min_size=8, max_size=8), st.floats(1.0, exclude_min=True, allow_infinity=False)
)
def test_any_factors_are_read_or_refused(factors: list[float], theta: float) -> None:
    metadata, shapes = small(rope__freq_base=theta)
    try:
        hf_config(metadata, {**shapes, LLAMA3_FACTORS: (8,)}, {LLAMA3_FACTORS: factors})
    except (CheckpointError, UnsupportedModelError):
        return


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [math.nan], [0.5] * 8])
def test_unusable_factors_are_refused(factors: list[float]) -> None:
    metadata, shapes = small()
    with pytest.raises(CheckpointError, match=LLAMA3_FACTORS):
        hf_config(metadata, {**shapes, LLAMA3_FACTORS: (8,)}, {LLAMA3_FACTORS: factors})


def test_factors_that_are_not_llama_3s_are_refused() -> None:
    metadata, shapes = small()
    factors = {LLAMA3_FACTORS: [1.0, 5.0, 2.0, 7.0, 1.0, 3.0, 8.0, 1.0]}
    with pytest.raises(UnsupportedModelError, match="RoPE factors of its own"):
        hf_config(metadata, {**shapes, LLAMA3_FACTORS: (8,)}, factors)
    assert hf_config(metadata, {**shapes, LLAMA3_FACTORS: (8,)}, {LLAMA3_FACTORS: [1.0] * 8})["rope_scaling"] is None


def test_reading_gguf_imports_neither_torch_nor_numpy() -> None:
    modules = ", ".join(f"localllm.gguf.{name}" for name in ("config", "header", "names", "tokenizer"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
