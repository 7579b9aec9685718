"""Configurations of GGUF files, against the gguf package's names and the configs that files are made of."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.gguf.config import eos_ids, hf_config
from localllm.gguf.header import read_header
from localllm.gguf.names import hf_name, holds_weights
from localllm.gguf.rope import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS, rope_factors
from localllm.layers.config import AltUpConfig, QueryGrowth
from localllm.models.block_layouts import block_layouts
from localllm.models.families import parse_config
from localllm.models.layout import COEFFICIENTS
from tests.gguf_metadata import (
    ARCHITECTURES,
    HYBRIDS,
    SCALES,
    as_stored,
    assert_same_model,
    factors_of,
    llama3_factors,
    metadata_of,
    small,
)
from tests.thinning import examples

Locate = Callable[[str], Path]

REAL = [
    *("Mixtral-8x7B-v0.1", "codellama_7b", "gemma2_9b", "gemma3_1b_it", "llama-3.3-70b-instruct", "llama2_7b"),
    *("llama3_1_8b", "llama3_2_1b", "mistral_7b_v03", "olmo2_7b", "phi-3_5", "phi-4", "qwen2.5-7b", "qwen2.5_3b"),
    *("gpt-oss-20b", "qwen2_0_5b", "qwen3-30b-a3b", "qwen3-8b", "qwen3_0.6b", "smollm2_135m", "tinyllama_1b_chat_v1.0"),
]
# Matrices that are stored as one.
FUSED = {"phi3": ("qkv_proj", "gate_up_proj"), "chatglm": ("gate_up_proj",), "glm4": ("gate_up_proj",)}
# The package does not know Muse Glimmer.
MODEL_TYPES = [each for each in ARCHITECTURES if each not in ("muse_glimmer_text", *HYBRIDS)]


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
        for theirs, ours in reversed(config.stored.renames) if architecture in ("glm4", "gemma4") else ():
            known = known.replace(ours, theirs)
        _, _, layer, part = [*known.split(".", 3), "", "", ""][:4]
        name = f"blk.{layer}.{SCALES[part]}" if part in SCALES else names.get_name(known, (".weight", ".bias"))
        assert name is not None, plain
        found[name if re.search(r"\.(weight|bias|scale|ssm_a)$", name) else f"{name}.weight"] = shape, plain

    for block in block_layouts(config):
        for matrix in block.matrices:
            if matrix.cut is not None and architecture == "minicpm3":  # whose files have it whole
                add(f"{matrix.cut.stored}.weight", (matrix.cut.heads * matrix.cut.rows, config.latents[0].latent_dim))
                continue
            fused = matrix.name in FUSED.get(architecture, ())
            parts = {matrix.stored: matrix.out_features} if fused else matrix.parts
            for part, rows in parts.items():
                states = re.fullmatch(r"(model\.altup_\w+)\.\d+", part)
                if states:  # which are one tensor
                    add(f"{states[1]}.weight", (config.altup.num_states - 1, rows, matrix.in_features))
                    continue
                add(f"{part}.weight", (rows, matrix.in_features))
                if matrix.has_bias:
                    add(f"{part}.bias", (rows,))
        for vector in block.vectors:
            if vector.name != COEFFICIENTS:  # which are in the metadata
                add(vector.stored, (vector.features,))
        if block.experts is not None:
            count, width = block.experts.num_experts, block.experts.config.intermediate_size
            hidden = config.hidden_size
            fused = architecture == "gemma4"
            wide = (
                {"gate_up_proj": (2 * width, hidden)}
                if fused
                else dict.fromkeys(("gate_proj", "up_proj"), (width, hidden))
            )
            for part, shape in {**wide, "down_proj": (hidden, width)}.items():
                add(f"{block.experts.stored}.{part}", (count, *shape))
                if block.experts.config.has_bias:
                    add(f"{block.experts.stored}.{part}.bias", (count, shape[0]))
    return found


def converted(raw: Mapping[str, Any]) -> dict[str, Any]:
    architecture = ARCHITECTURES[raw["model_type"]]
    shapes = {name: shape for name, (shape, _) in tensors_of(raw, architecture).items()}
    factors = factors_of(raw)
    shapes |= {name: (len(values),) for name, values in factors.items()}
    return hf_config(metadata_of(raw, architecture), shapes, factors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_tensor_has_the_name_that_its_block_reads(model_type: str) -> None:
    architecture = ARCHITECTURES[model_type]
    tensors = tensors_of(config_of_transformers(model_type), architecture)
    for name, (_, plain) in tensors.items():
        assert hf_name(name, architecture, tensors) == plain
        assert holds_weights(name)


# Where a default of transformers is none that a model has, or that the format cannot say.
FEW: dict[str, dict[str, object]] = {
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "vocab_size": 999},
    "qwen3_moe": {"norm_topk_prob": True},
    "glm4_moe": {"num_attention_heads": 64, "n_routed_experts": 16, "use_qk_norm": True},
    "qwen3_vl_text": {"bos_token_id": 7},
    "starcoder2": {"sliding_window": 4096},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 262400}
    | {"activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6},
    "gemma4_text": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_hidden_layers": 12},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 2},
    "deepseek_v3": {"n_routed_experts": 16, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": {"num_nextn_predict_layers": 0},
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
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_config_of_each_family_comes_back(model_type: str, tied: bool) -> None:
    if model_type in ("gemma2", "gemma3n_text", "gemma4_text", "cohere2") and not tied:
        pytest.skip("none of these has a head of its own")
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


GEMMA4: dict[str, object] = {
    "block_count": 4,
    "attention__key_length": 16,
    "attention__value_length": 16,
    "attention__key_length_swa": 8,
    "attention__sliding_window": 12,
    "attention__sliding_window_pattern": [True, False, True, False],
}


def read_gemma4(**keys: object) -> dict[str, object]:
    metadata, shapes = small("gemma4", **{**GEMMA4, **keys})
    return hf_config(metadata, {**shapes, LLAMA3_FACTORS: (8,)}, {LLAMA3_FACTORS: [1.0] * 2 + [as_stored(1e30)] * 6})


def test_layers_of_gemma_4_differ_as_the_file_says() -> None:
    lists: dict[str, object] = {"feed_forward_length": [32, 32, 64, 64], "attention__head_count_kv": [2, 1, 2, 1]}
    config = parse_config(read_gemma4(attention__shared_kv_layers=2, **lists), "config.json")
    assert [layer.feed_forward.intermediate_size for layer in config.layers] == [32, 32, 64, 64]
    assert [(each.num_kv_heads, each.head_dim) for each in config.attentions] == [(2, 8), (1, 16)] * 2
    assert [(each.rope.kind, each.rope.share) for each in config.attentions[:2]] == [
        ("default", 1.0),
        ("proportional", 0.25),
    ]
    assert [each.kv_of_layer for each in config.attentions] == [None, None, 0, 1]
    assert [each.value_from_key for each in config.attentions] == [False, True, False, False]
    assert config.per_layer is None and config.final_softcap is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention__key_length_swa": None}, r"key_length_swa is not usable"),
        ({"attention__value_length_swa": 16}, r"value_length_swa other than"),
        ({"rope__dimension_count_swa": 4}, r"dimension_count_swa other than"),
        ({"attention__head_count_kv": [1, 2, 2, 1]}, "several numbers of heads of keys"),
        ({"attention__head_count_kv": [1, 2]}, r"attention\.head_count_kv is not usable"),
        ({"feed_forward_length": [32, 64, 64, 64]}, "another feed_forward_length"),
        ({"feed_forward_length": [32, 32, 48, 48], "attention__shared_kv_layers": 2}, "another feed_forward_length"),
        ({"attention__shared_kv_layers": 4}, "num_kv_shared_layers"),
        ({"attention__sliding_window_pattern": [True, False]}, "layer_types"),
        ({"embedding_length_per_layer_input": 8}, "vocab_size_per_layer_input"),
    ],
)
def test_a_gemma_4_that_does_not_add_up_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        parse_config(read_gemma4(**keys), "config.json")


def test_a_gemma_4_without_the_divisors_of_its_frequencies_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is missing"):
        hf_config(*small("gemma4", **GEMMA4))


def test_early_files_of_gemma_3n_mean_what_llama_cpp_takes_for_granted() -> None:
    metadata, shapes = small("gemma3n", block_count=25, attention__sliding_window=12)
    shapes |= {"blk.0.laurel_r.weight": (64, 16)}
    config = parse_config(hf_config(metadata, shapes), "config.json")
    assert config.windows[3:5] == (12, None)
    assert [each.kv_of_layer for each in config.attentions[19:]] == [None, 18, 18, 18, 18, 19]
    assert {layer.feed_forward.sparsity for layer in config.layers[:10]} == {0.95}
    assert config.final_softcap == 30.0
    assert config.altup == AltUpConfig(num_states=4, laurel_rank=16)


def test_what_a_file_does_not_say_is_known_of_its_architecture() -> None:
    def read(architecture: str, **keys: object) -> dict[str, object]:
        return hf_config(*small(architecture, **keys))

    growing = read("mistral3", attention__temperature_scale=0.5, rope__scaling__original_context_length=32)
    assert parse_config(growing, "config.json").attentions[0].growth == QueryGrowth(0.5, 32)
    assert read("mistral3")["model_type"] == "mistral"
    assert read("olmo2")["model_type"] == "olmo2"
    windowed = parse_config(read("olmo2", block_count=8, attention__sliding_window=16), "config.json")
    assert windowed.windows == (16, 16, 16, None) * 2  # every fourth, where the file has no pattern
    assert read("exaone4", block_count=64)["sliding_window"] == 4096
    assert read("exaone4", block_count=30)["sliding_window"] is None
    eps = {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon": None}
    assert parse_config(read("starcoder2", **eps), "config.json").windows == (4096, 4096)
    with pytest.raises(CheckpointError, match=r"cohere2\.logit_scale"):
        read("cohere2", **eps)
    with pytest.raises(CheckpointError, match=r"nemotron\.attention\.layer_norm_epsilon"):
        read("nemotron")


def test_ids_that_end_a_text() -> None:
    keys = {f"tokenizer.ggml.{name}_token_id": index for name, index in {"eos": 1, "eot": 3, "eom": 1}.items()}
    assert eos_ids(keys) == [1, 3]
    tokens = ["a", "</s>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|observation|>"]
    table = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 4, 1, 3]}
    assert eos_ids({**keys, **table}) == [1, 3, 2, 5]  # <|end|> is an ordinary token there
    ends = {"tokenizer.ggml.tokens": ["<|return|>", "<|end|>", "<|call|>", "<turn|>"]}
    ends |= {"tokenizer.ggml.token_type": [3] * 4}
    assert eos_ids(ends) == [0, 2, 3]  # a message of gpt-oss ends with <|end|>, and a turn has several
    tags = {"tokenizer.ggml.tokens": ["<eos>", "</s>", "<b>"], "tokenizer.ggml.token_type": [3, 4, 4]}
    assert eos_ids(tags) == [0]
    hostile = {"tokenizer.ggml.eos_token_id": [1], "tokenizer.ggml.eot_token_id": 1 << 60, **table}
    assert eos_ids(hostile) == [1, 2, 3, 5]
    assert eos_ids({}) == []


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "clip"}, "image or audio encoder"),
        ({"general.architecture": "qwen2", "general.type": "mmproj"}, "image or audio encoder"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA adapter"),
        ({"general.type": "imatrix", "general.architecture": "llama"}, "importance matrix"),
        ({"general.architecture": "bloom"}, "the architecture 'bloom' is not supported"),
        (small("mistral3", expert_count=8)[0], "experts"),
        (small("granite", rope__scaling__finetuned=False)[0], "do not rotate"),
        (small("glm4", rope__dimension_sections=[4, 2, 2, 0])[0], "GLM-4V"),
        (small("muse-glimmer", logit_scale=1.0)[0], "weights that differ"),
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
    if "bloom" in said:
        assert "other architectures run" in caught.value.why


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
