"""config.json to ModelConfig: what each family means by its keys, and what no file may do."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.kernels.sizes import Glu, RouterConfig
from localllm.kernels.state_shapes import DeltaShape, Rwkv7Shape
from localllm.models.architecture import ModelConfig
from localllm.models.capabilities import has_plain_steps, is_latent_for_gpu
from localllm.models.families import load_config, parse_config
from tests.patience import PATIENCE_S

# file: type, vocab, hidden, intermediate, layers, heads, kv heads, head dim, rotary dim, positions, tied, eos
SHAPES: dict[str, tuple[Any, ...]] = {
    "codellama_7b": ("llama", 32016, 4096, 11008, 32, 32, 32, 128, 128, 16384, False, (2,)),
    "gemma2_9b": ("gemma2", 256000, 3584, 14336, 42, 16, 8, 256, 256, 8192, True, (1,)),
    "gemma3_1b_it": ("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, 256, 32768, True, (1, 106)),
    "llama-3.3-70b-instruct": (
        *("llama", 128256, 8192, 28672, 80, 64, 8, 128, 128, 131072, False, (128001, 128008, 128009)),
    ),
    "llama2_7b": ("llama", 32000, 4096, 11008, 32, 32, 32, 128, 128, 2048, False, (2,)),
    "llama3_1_8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 128, 131072, False, (128001, 128008, 128009)),
    "llama3_2_1b": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, 64, 131072, True, (128001, 128008, 128009)),
    "mistral_7b": ("mistral", 32000, 4096, 14336, 32, 32, 8, 128, 128, 32768, False, (2,)),
    "mistral_7b_v03": ("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 128, 32768, False, (2,)),
    "olmo2_7b": ("olmo2", 100352, 4096, 11008, 32, 32, 32, 128, 128, 4096, False, (50279,)),
    "phi-3_5": ("phi3", 32064, 3072, 8192, 32, 32, 32, 96, 96, 131072, False, (32000,)),
    "phi-4": ("phi3", 200064, 3072, 8192, 32, 24, 8, 128, 96, 131072, True, (199999,)),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 128, 131072, False, (151643,)),
    "qwen2.5_3b": ("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, 128, 32768, True, (151645,)),
    "qwen2_0_5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 64, 32768, True, (151645,)),
    "qwen3-8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 128, 40960, False, (151645,)),
    "qwen3_0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 128, 40960, True, (151645,)),
    "qwen3_1.7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 128, 40960, True, (151645,)),
    "smollm2_135m": ("llama", 49152, 576, 1536, 30, 9, 3, 64, 64, 8192, True, (2,)),
    "tinyllama_1b_chat_v1.0": ("llama", 32000, 2048, 5632, 22, 32, 4, 64, 64, 2048, False, (2,)),
}
# file: type, layers, width of an expert, router
MIXTURES: dict[str, tuple[Any, ...]] = {
    "Mixtral-8x7B-v0.1": ("mixtral", 32, 14336, RouterConfig("softmax", 8, 2, normalizes=True)),
    "gpt-oss-20b": ("gpt_oss", 24, 2880, RouterConfig("chosen", 32, 4)),
    "qwen3-30b-a3b": ("qwen3_moe", 48, 768, RouterConfig("softmax", 128, 8, normalizes=True)),
}
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2")
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 99,
    "intermediate_size": 32,
}  # fmt: skip


def shape_of(config: ModelConfig) -> tuple[Any, ...]:
    c, a = config, config.attentions[0]
    return (
        *(c.model_type, c.vocab_size, c.hidden_size, c.mlps[0].intermediate_size, c.num_layers),
        *(a.num_heads, a.num_kv_heads, a.head_dim, a.rotary_dim),
        *(c.max_position_embeddings, c.tie_word_embeddings, c.eos_token_ids),
    )


def parse(model_type: str, **keys: object) -> ModelConfig:
    return parse_config({"model_type": model_type, **SMALL, **keys}, "config.json")


@pytest.mark.parametrize("name", SHAPES)
def test_a_real_config_parses_to_the_shapes_of_its_model(name, shared_data):
    raw = json.loads(shared_data(f"configs/{name}.json").read_text())
    assert shape_of(parse_config(raw, name)) == SHAPES[name]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_real_config_of_a_mixture_parses_to_its_experts(name, shared_data):
    config = parse_config(json.loads(shared_data(f"configs/{name}.json").read_text()), name)
    (moe,) = config.mixtures
    found = config.model_type, config.num_layers, moe.expert.intermediate_size, moe.router
    assert found == MIXTURES[name] and moe.shared is None
    assert all(layer.feed_forward == moe for layer in config.layers)


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_experts": 1 << 20}, "num_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group"),
        ("glm4_moe", {"n_group": 64, "topk_group": 2, "num_experts_per_tok": 8}, "topk_group"),
        ("dots1", {"n_routed_experts": None, "num_experts_per_tok": 2}, "n_routed_experts"),
        ("hunyuan_v1_moe", {"moe_topk": [1]}, "moe_topk"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling"),
    ],
)
def test_numbers_that_no_mixture_can_have_are_refused_by_their_key(model_type, keys, said):
    with pytest.raises(CheckpointError, match=said):
        parse(model_type, **keys)


@pytest.mark.parametrize(
    ("config", "why", "fix"),
    [
        ({"model_type": "qwen9_moe"}, "other architectures run", "localllm plan qwen3.8-27b"),
        (
            {"model_type": "mamba9", "architectures": ["MambaForCausalLM"]},
            "other architectures run",
            "localllm list --all",
        ),
        ({"model_type": "llava", "vision_config": {}}, "reads images", "localllm list --all"),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "no language model: it is made for CLIPModel", "list"),
    ],
)
def test_an_architecture_that_does_not_run_is_refused_by_name_with_the_nearest_that_does(config, why, fix):
    with pytest.raises(UnsupportedModelError) as refusal:
        parse_config(config, "config.json")
    assert config["model_type"] in refusal.value.what
    assert why in refusal.value.why and fix in refusal.value.fix


def test_every_real_config_is_expected_to_parse(shared_data):
    assert {path.stem for path in shared_data("configs").glob("*.json")} == {*SHAPES, *MIXTURES}


def test_gpt_oss_has_sinks_biases_and_every_second_layer_a_window(shared_data):
    config = parse_config(json.loads(shared_data("configs/gpt-oss-20b.json").read_text()), "config.json")
    assert config.windows == (128, None) * 12
    assert {(each.has_sinks, each.has_bias, each.has_output_bias) for each in config.attentions} == {(True,) * 3}
    (rope,), (mlp,) = config.ropes, config.mlps
    assert (rope.kind, rope.factor, rope.truncate, rope.theta) == ("yarn", 32.0, False, 150000)
    assert mlp.glu == Glu("quick_gelu", limit=7.0, up_offset=1.0) and mlp.has_bias


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral_7b", (4096,) * 32),
        ("mistral_7b_v03", (None,) * 32),
        ("gemma2_9b", (4096, None) * 21),
        ("gemma3_1b_it", ((512,) * 5 + (None,)) * 4 + (512, 512)),
        ("qwen2.5-7b", (None,) * 28),
        ("phi-4", (262144,) * 32),
        ("llama3_1_8b", (None,) * 32),
    ],
)
def test_each_layer_of_a_real_config_has_its_window(name, windows, shared_data):
    raw = json.loads(shared_data(f"configs/{name}.json").read_text())
    assert parse_config(raw, name).windows == windows


def test_gemma3_rotates_local_and_global_layers_with_their_own_theta(shared_data):
    config = parse_config(json.loads(shared_data("configs/gemma3_1b_it.json").read_text()), "config.json")
    assert [each.rope.theta for each in config.attentions[:7]] == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4]


def test_phi4_stretches_three_quarters_of_each_head_by_longrope(shared_data):
    rope = parse_config(json.loads(shared_data("configs/phi-4.json").read_text()), "config.json").attentions[0].rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("longrope", 32.0, 4096)
    assert (len(rope.short_factor), len(rope.long_factor), rope.long_factor[-1]) == (48, 48, 47.77)


def test_llama3_scaling_is_read_number_by_number(shared_data):
    rope = (
        parse_config(json.loads(shared_data("configs/llama3_2_1b.json").read_text()), "config.json").attentions[0].rope
    )
    assert (rope.kind, rope.theta, rope.original_max_position_embeddings) == ("llama3", 5e5, 8192)
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (32, 1, 4)


TRAITS = {
    "llama": {"mixer.has_bias": False, "mixer.has_output_bias": False, "norm_placement": "pre", "mixer.qk_norm": None},
    "mistral": {"mixer.has_bias": False, "mixer.has_output_bias": False},
    "qwen2": {"mixer.has_bias": True, "mixer.has_output_bias": False, "mixer.qk_norm": None},
    "qwen3": {"mixer.has_bias": False, "mixer.qk_norm": "head", "mixer.head_dim": 128},
    "phi3": {"mixer.has_bias": False, "feed_forward.has_bias": False, "norm_eps": 1e-5},
    "gemma2": {
        "norm_placement": "sandwich",
        "norm_weight_offset": 1.0,
        "embedding_scale": 8.0,
        "mixer.scale": 1 / 16,
        "mixer.softcap": 50.0,
        "final_softcap": 30.0,
        "feed_forward.activation": "gelu_tanh",
        "tie_word_embeddings": True,
    },
    "gemma3_text": {"mixer.qk_norm": "head", "mixer.softcap": None, "final_softcap": None, "norm_weight_offset": 1.0},
    "olmo2": {"norm_placement": "post", "mixer.qk_norm": "full", "norm_eps": 1e-5, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("model_type", TRAITS)
def test_a_family_has_its_traits_when_the_file_is_silent(model_type):
    config = parse(model_type)
    for name, value in TRAITS[model_type].items():
        holder = config if hasattr(config, name) else config.layers[0]
        assert attrgetter(name)(holder) == value, name


def variations(model_type: str, seed: int) -> dict[str, Any]:
    """Random keys that the family's transformers class takes."""
    rng = random.Random(f"{model_type} {seed}")
    heads = rng.choice([4, 8])
    layers = rng.randint(2, 9)
    keys: dict[str, Any] = {
        "hidden_size": heads * rng.choice([8, 16]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, 4]),
        "num_hidden_layers": layers,
        "vocab_size": rng.randint(50, 500),
        "intermediate_size": rng.randint(10, 99),
        "max_position_embeddings": rng.choice([128, 4096]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.5,
        "eos_token_id": rng.choice([7, [7, 8]]),
    }
    if model_type not in ("phi3", "gemma3_text"):
        theta = {"rope_theta": rng.choice([10000.0, 5e5])}
        original = {"original_max_position_embeddings": 64}
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
        yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, **original}
        linear, dynamic = ({"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic"))
        keys["rope_parameters"] = rng.choice([{"rope_type": "default"}, llama3, yarn, linear, dynamic]) | theta
    if model_type == "phi3" and rng.random() < 0.7:
        half = keys["hidden_size"] // heads // 2 // 2
        factors = {"short_factor": [1.0] * half, "long_factor": [2.5] * half}
        keys["rope_parameters"] = {"rope_type": "longrope", "partial_rotary_factor": 0.5, **factors}
        keys["original_max_position_embeddings"] = 64
    if model_type in ("llama", "qwen3", "gemma2", "gemma3_text", "olmo2"):
        keys["attention_bias"] = rng.random() < 0.5
    if model_type == "llama":
        keys["mlp_bias"] = rng.random() < 0.5
    if model_type not in ("phi3", "olmo2", "qwen2"):
        keys["head_dim"] = rng.choice([8, 32])
    if model_type in ("mistral", "phi3"):
        keys["sliding_window"] = rng.choice([None, 32])
    if model_type in ("qwen2", "qwen3"):
        keys |= {"use_sliding_window": rng.random() < 0.5, "max_window_layers": rng.randint(0, 9), "sliding_window": 16}
    if model_type in ("gemma2", "gemma3_text"):
        keys |= {"sliding_window": 16, "query_pre_attn_scalar": 100, "attn_logit_softcapping": rng.choice([None, 9.0])}
        if rng.random() < 0.5:
            keys["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    if model_type == "gemma3_text" and rng.random() < 0.5:
        keys["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    return keys


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("model_type", DENSE)
def test_a_config_that_transformers_wrote_means_the_same_here(model_type, seed):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type, **({} if seed == 0 else variations(model_type, seed)))
    ours = parse_config(json.loads(theirs.to_json_string(use_diff=seed % 2 == 0)), "config.json")
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("model_type", DENSE)
def test_keys_that_older_versions_wrote_mean_the_same_here(model_type, seed):
    from transformers import AutoConfig

    keys = variations(model_type, seed)
    rope = dict(keys.pop("rope_parameters", {}))
    for beside in ("rope_theta", "partial_rotary_factor"):
        if beside in rope:
            keys[beside] = rope.pop(beside)
    if rope:
        keys["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    keys["torch_dtype"] = "float16"
    ours = parse_config({"model_type": model_type, **json.loads(json.dumps(keys))}, "config.json")
    assert_same(ours, AutoConfig.for_model(model_type, **keys))


# Our names and theirs, where those differ.
ALIKE = {
    "vocab_size": "", "hidden_size": "", "max_position_embeddings": "", "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "", "bos_token_id": "", "num_layers": "num_hidden_layers",
}  # fmt: skip


def assert_same(ours: ModelConfig, theirs: Any) -> None:
    for name in ALIKE:
        assert getattr(ours, name) == getattr(theirs, ALIKE[name] or name), name
    heads, eos = theirs.num_attention_heads, theirs.eos_token_id
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    for each in ours.attentions:
        assert (each.num_heads, each.num_kv_heads, each.head_dim) == (heads, theirs.num_key_value_heads, head_dim)
        assert each.has_output_bias == getattr(theirs, "attention_bias", False)
        assert each.has_bias == (each.has_output_bias or theirs.model_type == "qwen2")
    assert ours.eos_token_ids == (() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos))
    (mlp,) = ours.mlps
    assert mlp.intermediate_size == theirs.intermediate_size
    assert mlp.has_bias == getattr(theirs, "mlp_bias", False)
    windowed = theirs.model_type in ("mistral", "phi3")
    usual = "sliding_attention" if windowed else "full_attention"
    kinds = getattr(theirs, "layer_types", None) or [usual] * ours.num_layers
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    capped = theirs.model_type == "gemma2"  # gemma 3's files have the key, its code never uses it
    assert {each.softcap for each in ours.attentions} == {theirs.attn_logit_softcapping if capped else None}
    assert ours.final_softcap == getattr(theirs, "final_logit_softcapping", None)
    for layer, kind in enumerate(kinds):
        assert_same_rope(ours, layer, theirs, theirs.rope_parameters.get(kind, theirs.rope_parameters))


def assert_same_rope(ours: ModelConfig, layer: int, theirs: Any, rope: dict[str, Any]) -> None:
    attention = ours.attentions[layer]
    mine = attention.rope
    assert (mine.kind, mine.theta) == (rope["rope_type"], rope["rope_theta"])
    assert attention.rotary_dim == int(attention.head_dim * rope.get("partial_rotary_factor", 1.0))
    if mine.kind in ("llama3", "yarn", "longrope"):
        assert mine.original_max_position_embeddings == rope["original_max_position_embeddings"]
        assert mine.factor == rope.get("factor", ours.max_position_embeddings / mine.original_max_position_embeddings)
    if mine.kind in ("linear", "dynamic"):
        assert mine.factor == rope["factor"]
    assert list(mine.short_factor) == rope.get("short_factor", [])
    assert mine.beta_fast == rope.get("beta_fast", 32.0)


def test_a_multimodal_gemma3_is_read_through_its_text_config():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"vision_config": {"hidden_size": "never read"}, "text_config": text}
    raw |= {"model_type": "gemma3", "eos_token_id": [1, 106]}
    config = parse_config(raw, "config.json")
    assert shape_of(config)[1:9] == (262208, 2560, 10240, 34, 8, 4, 256, 256)
    assert (config.windows[4], config.windows[5], config.eos_token_ids) == (1024, None, (1, 106))
    assert (config.attentions[4].rope.kind, config.attentions[5].rope.kind, config.attentions[5].rope.factor) == (
        "default",
        "linear",
        8.0,
    )


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_early_names_of_phi3s_scaling_mean_longrope(kind):
    scaling = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [4] * 8}
    config = parse("phi3", rope_scaling=scaling, max_position_embeddings=8192)
    assert (
        config.attentions[0].rope.kind,
        config.attentions[0].rope.factor,
        config.attentions[0].rope.long_factor,
    ) == ("longrope", 2.0, (4.0,) * 8)


def test_the_trained_length_beside_a_scaling_counts_before_the_one_inside_it():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    assert parse("llama", rope_scaling=scaling).attentions[0].rope.original_max_position_embeddings == 512
    beside = parse("llama", rope_scaling=scaling, original_max_position_embeddings=256)
    assert beside.attentions[0].rope.original_max_position_embeddings == 256


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")])
def test_either_name_of_the_dtype_is_read(key, value):
    assert parse("llama", **{key: value}).dtype == "bfloat16"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_may_be_as_the_tensors_are(key):
    assert parse("llama", **{key: "auto"}).dtype is None
    assert parse("llama", **{key: "float64"}).dtype == "float64"


def test_a_null_head_dim_is_hidden_size_over_heads():
    assert parse("qwen3", head_dim=None).attentions[0].head_dim == 16


FIVE = {"eos_token_id": 5}


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (FIVE, '{"eos_token_id": [9, 5]}', (5, 9)),
        (FIVE, '{"eos_token_id": 9}', (5, 9)),
        (FIVE, "{}", (5,)),
        (FIVE, None, (5,)),
        ({}, None, (2,)),  # the family's own, which gives way
        ({}, '{"eos_token_id": 9}', (9,)),
    ],
)
def test_end_tokens_of_both_files_end_a_text(own, generation, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, **own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert load_config(tmp_path).eos_token_ids == expected


FULL, SLIDING = "full_attention", "sliding_attention"
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "rope scaling": ({"rope_scaling": {"rope_type": "axial", "factor": 2}}, "axial"),
    "new rope scaling": ({"rope_parameters": {"rope_type": "axial"}}, "axial"),
    "activation": ({"hidden_act": "relu6"}, "relu6"),
    "layer type": ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"] * 6}, "chunked"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "0.5"),
    "dtype": ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "architecture": ({"model_type": "llama4"}, "llama4"),
    "code": ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "evil"),
    "encoder": ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "mixed mistral": ({"model_type": "mistral", "layer_types": [FULL, SLIDING] * 3}, "layer_types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_needs_and_is_not_here_is_refused_by_name(name):
    keys, word = REFUSED[name]
    with pytest.raises(UnsupportedModelError) as refusal:
        parse_config({"model_type": "llama", **SMALL, **keys}, "folder/config.json")
    assert "folder/config.json" in refusal.value.what and refusal.value.fix
    assert word in refusal.value.what + refusal.value.why


LINEAR = {"type": "linear"}
WRONG: dict[str, tuple[object, ...]] = {
    "hidden_size": (10**9, -1, 0, 2**63, 10**400, 64.0, "64", True, None, [64], {}),
    "num_hidden_layers": (10**7, -1, 0, 6.0, "6", True, None),
    "num_attention_heads": (10**9, 0, -4, 5, 4.0),
    "num_key_value_heads": (0, 3, 8, -1, 2.0, 2**63),
    "head_dim": (0, 17, -2, 1, 10**6, 16.0),
    "vocab_size": (2**63, 0, -1, "99", None),
    "intermediate_size": (10**12, 0, 32.5),
    "max_position_embeddings": (2**63, 0, -1, 128.0, None),
    "rms_norm_eps": (-1.0, 2, "1e-5", True, None, float("nan"), float("inf")),
    "rope_theta": (0, -1.0, "1e4", True, float("inf")),
    "rope_scaling": (
        "linear",
        [1],
        2,
        {"type": 3},
        {"factor": 2.0},
        {"type": "linear"},
        {"type": "linear", "factor": 0},
    ),
    "rope_parameters": ({"rope_type": "linear", "factor": "2"}, {"rope_type": "yarn", "factor": True}),
    "partial_rotary_factor": (0, -0.5, 2, "half"),
    "attention_bias": (1, "false", 0.0),
    "tie_word_embeddings": (1, "yes"),
    "hidden_act": (3, ["silu"]),
    "eos_token_id": (-1, 2**31, [1, "2"], [True], 1.0, list(range(1000))),
    "bos_token_id": (-1, "1", [1]),
    "dtype": (16, ["bfloat16"]),
    "model_type": (None, 7, ["llama"], {}),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_or_size_is_refused_with_its_key(key, value):
    with pytest.raises(CheckpointError) as refusal:
        parse_config({"model_type": "llama", **SMALL, key: value}, "folder/config.json")
    assert "folder/config.json" in refusal.value.what and key in refusal.value.what + refusal.value.why
    assert refusal.value.why and refusal.value.fix
    assert len(refusal.value.what + refusal.value.why) < 400


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8}
OF_FAMILIES: list[tuple[str, dict[str, object], str]] = [
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"sliding_window": "all"}, "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "layer_types": [FULL]}, "layer_types"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    ("gemma3", {}, "text_config"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "short_factor"),
    ("llama", {"rope_scaling": LLAMA3}, "high_freq"),
    ("rwkv7", {"head_dim": 48}, "head_dim"),
    ("rwkv7", {"decay_low_rank_dim": 0}, "decay_low_rank_dim"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0] * 8}},
        "long_factor",
    ),
]


@pytest.mark.parametrize(("family", "keys", "word"), OF_FAMILIES)
def test_a_familys_own_keys_are_checked_too(family, keys, word):
    with pytest.raises(CheckpointError) as refusal:
        parse(family, **keys)
    assert word in refusal.value.what + refusal.value.why


@pytest.mark.parametrize("keys", [{"attn": {"layers": [1]}}, {"value_dim": [64, 32]}, {"hidden_act": "silu"}])
def test_an_rwkv7_of_which_there_is_none_is_refused(keys):
    with pytest.raises(UnsupportedModelError):
        parse("rwkv7", **keys)


def test_an_rwkv7_says_its_sizes_by_ratios_too():
    layers = parse("rwkv7", hidden_size=320, head_dim=None, num_heads=5, intermediate_size=None, value_dim=[320]).layers
    mixers = [layer.mixer for layer in layers]
    assert len(layers) == 12 and [mixer.is_first for mixer in mixers[::2]] == [True, *[False] * 5]
    assert mixers[0].shape == Rwkv7Shape(5, 64) and mixers[1].intermediate_size == 1280


def test_a_broken_generation_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_config(tmp_path)


def test_reading_a_config_imports_no_torch():
    check = "import sys, localllm.models.families; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=PATIENCE_S)


HYBRID: dict[str, Any] = {"model_type": "qwen3_5_text", **SMALL, "head_dim": 16, "partial_rotary_factor": 0.5}
DELTA = "linear_attention"


def test_a_hybrid_is_read_layer_by_layer() -> None:
    """Every fourth layer is full where the file says nothing else."""
    usual = parse_config(HYBRID, "a test's config")
    kinds = [type(layer.mixer).__name__ for layer in usual.layers]
    assert kinds == ["DeltaNetConfig"] * 3 + ["AttentionConfig"] + ["DeltaNetConfig"] * 2
    assert usual.attentions[0].has_output_gate and usual.attentions[0].rotary_dim == 8
    listed = parse_config(HYBRID | {"layer_types": [FULL, DELTA, FULL, FULL, DELTA, FULL]}, "a test's config")
    assert [listed.kept_number(n, layer.mixer) for n, layer in enumerate(listed.layers)] == [0, 0, 1, 2, 1, 3]
    every_second = parse_config(HYBRID | {"full_attention_interval": 2}, "a test's config")
    assert len(every_second.attentions) == len(every_second.recurrents) == 3


KIMI: dict[str, Any] = {"model_type": "kimi_linear", **SMALL}


def test_layers_of_kimi_linear_are_those_that_its_file_counts_from_one() -> None:
    """Its own keys count where DeepSeek's stand beside them."""
    own = {"head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 3, "full_attn_layers": [2, 6]}
    names = {"num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "model_max_length": 99}
    config = parse_config(KIMI | {"linear_attn_config": own, **names}, "a test's config")
    assert [layer.mixer in config.recurrents for layer in config.layers] == [True, False, True, True, True, False]
    assert config.state_shapes[0] == DeltaShape(3, 3, 16, 16, 3, decays="key") and config.max_position_embeddings == 99
    assert config.latents[0].rotary_dim == 0 and config.mixtures[0].router.num_experts == 8
    usual = parse_config(KIMI, "a test's config")
    assert [layer.mixer in usual.recurrents for layer in usual.layers] == [True] * 4 + [False, True]
    assert [layer.feed_forward in usual.mixtures for layer in usual.layers] == [False] + [True] * 5


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"linear_attn_config": {"full_attn_layers": [0]}}, "linear_attn_config.full_attn_layers"),
        ({"linear_attn_config": {"full_attn_layers": [7]}}, "from 1 to num_hidden_layers = 6"),
        ({"linear_attn_config": {"full_attn_layers": []}}, "at least one layer of full_attention"),
        ({"linear_attn_config": {"head_dim": 0}}, "linear_head_dim"),
        ({"mlp_layer_types": ["dense"]}, "a list of num_hidden_layers = 6 entries"),
        ({"mlp_layer_types": ["none"] * 6}, "mlp_layer_types"),
        ({"layer_types": ["conv"] * 6}, "conv"),
    ],
)
def test_a_kimi_linear_that_does_not_add_up_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError)) as refused:
        parse_config(KIMI | keys, "a test's config")
    assert said in f"{refused.value.what} {refused.value.why}"


LFM2: dict[str, Any] = {"model_type": "lfm2", **SMALL}


def test_short_convolutions_stand_where_no_attention_is_listed() -> None:
    """The older keys count before the newer ones."""
    listed = parse_config(LFM2 | {"full_attn_idxs": [1, 4], "tie_embedding": False}, "a test's config")
    assert [layer.mixer in listed.recurrents for layer in listed.layers] == [True, False, True, True, False, True]
    assert not listed.tie_word_embeddings and listed.recurrents[0].shape.conv_width == 3
    newer = parse_config(LFM2 | {"full_attn_idxs": [1], "layer_types": ["conv", FULL] * 3}, "a test's config")
    assert len(newer.attentions) == 3 and not parse_config(LFM2, "a test's config").recurrents
    mlps = [{"block_ff_dim": 1000}, {"block_ff_dim": 1000, "block_ffn_dim_multiplier": None}]
    plain = {"block_ff_dim": 1000, "block_auto_adjust_ff_dim": False}
    widths = [parse_config(LFM2 | each, "a test's config").mlps[0].intermediate_size for each in (*mlps, plain)]
    assert widths == [768, 666, 1000]


def test_every_fourth_layer_of_lfm3_attends_to_all_and_one_to_a_window() -> None:
    usual = parse_config({"model_type": "lfm3", **SMALL, "num_hidden_layers": 8}, "a test's config")
    kinds = [None if mixer in usual.recurrents else mixer.window for mixer in (x.mixer for x in usual.layers)]
    assert kinds == [None, None, None, None, 256, None, None, None]
    assert [layer.mixer in usual.recurrents for layer in usual.layers] == [1, 1, 0, 1, 0, 1, 0, 1]
    assert [mixer.rope.kind for mixer in usual.attentions] == ["proportional", "default", "proportional"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_types": ["conv"] * 6}, "at least one layer of full_attention"),
        ({"layer_types": ["conv", "linear_attention"] * 3}, "linear_attention"),
        ({"full_attn_idxs": [6]}, "numbers of layers below num_hidden_layers = 6"),
        ({"full_attn_idxs": [True]}, "full_attn_idxs"),
        ({"conv_L_cache": 1}, "conv_L_cache"),
        ({"conv_L_cache": 9}, "conv_L_cache"),
        ({"conv_bias": 1}, "conv_bias"),
        ({"tie_embedding": "no"}, "tie_embedding"),
        ({"intermediate_size": 1, "block_ffn_dim_multiplier": None}, "intermediate_size"),
        ({"norm_eps": -1.0}, "norm_eps"),
    ],
)
def test_short_convolutions_that_are_not_usable_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError)) as refused:
        parse_config(LFM2 | keys, "a test's config")
    assert said in f"{refused.value.what} {refused.value.why}"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_types": [DELTA, FULL]}, "num_hidden_layers = 6"),
        ({"layer_types": [DELTA] * 6}, "at least one layer of full_attention"),
        ({"full_attention_interval": 7}, "at least one layer of full_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "a multiple of linear_num_key_heads = 3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"linear_value_head_dim": "128"}, "linear_value_head_dim"),
    ],
)
def test_a_hybrid_that_does_not_add_up_is_refused_by_its_key(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        parse_config(HYBRID | keys, "a test's config")
    assert said in f"{refused.value.what} {refused.value.why}"


@pytest.mark.parametrize(
    "keys",
    [{"layer_types": [DELTA] * 5 + ["sliding_attention"]}, {"layer_types": ["mamba"] * 6}, {"hidden_act": "gelu"}],
)
def test_a_hybrid_of_another_kind_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        parse_config(HYBRID | keys, "a test's config")


NOT_SUPPORTED = {
    "latent experts": ("nemotron_h", {"moe_latent_size": 64, "layers_block_type": ["moe"]}, "moe_latent_size"),
    "an unknown letter": ("nemotron_h", {"hybrid_override_pattern": "M?"}, "'?'"),
    "no layer": ("nemotron_h", {"hybrid_override_pattern": ""}, "layers_block_type"),
    "positions of another kind": ("granitemoehybrid", {"position_embedding_type": "alibi"}, "alibi"),
    "heads that are not all features": ("bamba", {"mamba_n_heads": 7, "mamba_d_head": 64}, "mamba_n_heads"),
    "groups that divide no heads": ("mamba2", {"n_groups": 3}, "n_groups"),
    "a step without an upper bound's number": ("bamba", {"time_step_limit": [0.0, "never"]}, "time_step_limit"),
    "a step that no number is long enough for": ("bamba", {"time_step_limit": [1e39, math.inf]}, "time_step_limit"),
    "another activation of a scan": ("mamba", {"hidden_act": "gelu"}, "Mamba with another activation"),
    "steps of nothing": ("mamba", {"time_step_rank": 0}, "time_step_rank"),
    "no features": ("mamba", {"expand": 0.001, "hidden_size": 64}, "expand"),
    "a convolution of one token": ("falcon_mamba", {"conv_kernel": 1}, "conv_kernel"),
    "attention in a layer behind the period": ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset"),
    "experts every no layers": ("jamba", {"expert_layer_period": 0}, "expert_layer_period"),
    "a layer that is not there": ("bamba", {"attn_layer_indices": [99]}, "attn_layer_indices"),
    "a router that is another family's": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    "experts in every second layer": ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
    "latents with positions": ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
    "a softmax that chooses": ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    "a bias that would not be multiplied": (
        "falcon_h1",
        {"attention_bias": True, "attention_in_multiplier": 0.5, "mamba_d_ssm": None},
        "attention_bias",
    ),
}


@pytest.mark.parametrize("case", NOT_SUPPORTED)
def test_what_such_a_model_cannot_be_is_refused_by_name(case: str) -> None:
    family, own, named = NOT_SUPPORTED[case]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(named)):
        parse_config({"model_type": family, **own}, "config.json")


def test_a_mamba_has_a_rank_of_steps_and_features_for_its_hidden_state() -> None:
    sizes = {"model_type": "mamba", "hidden_size": 2560}
    for told, expected in (({}, (5120, 160)), ({"time_step_rank": 96, "intermediate_size": 4000}, (4000, 96))):
        (shape,) = set(parse_config(sizes | told, "config.json").state_shapes)
        assert (shape.features, shape.step_rank) == expected


def test_a_step_of_mamba_2_may_be_unbounded_in_each_way_that_files_have_it() -> None:
    for highest in (math.inf, "Infinity", {"__float__": "Infinity"}, sys.float_info.max, 10**400):
        config = parse_config({"model_type": "bamba", "time_step_limit": [0.1, highest]}, "config.json")
        assert {(mixer.least_step, mixer.most_step) for mixer in config.recurrents} == {(0.1, None)}
    config = parse_config({"model_type": "bamba", "time_step_limit": [0.0, 2.5]}, "config.json")
    assert {mixer.most_step for mixer in config.recurrents} == {2.5}


def test_what_nemotron_draws_its_first_steps_from_bounds_no_step() -> None:
    published = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_limit": [0.0, math.inf]}
    config = parse_config({"model_type": "nemotron_h", **published}, "config.json")
    assert {(mixer.least_step, mixer.most_step) for mixer in config.recurrents} == {(0.0, None)}


def test_rwkv_7_goes_on_behind_the_length_of_its_training() -> None:
    config = parse_config({"model_type": "rwkv7", "max_position_embeddings": 2048}, "config.json")
    assert config.longest_context == 1 << 20


def test_a_granite_of_attention_alone_may_say_anything_of_mamba_2() -> None:
    unused = {"mamba_n_heads": 48, "mamba_d_head": 30}
    config = parse_config(
        {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["attention"] * 2, **unused},
        "config.json",
    )
    assert not config.recurrents


def test_multipliers_that_are_null_are_ones() -> None:
    sizes = {"model_type": "falcon_h1", "mamba_d_ssm": None}
    null = parse_config({**sizes, "mlp_multipliers": None, "ssm_multipliers": None}, "config.json")
    ones = parse_config({**sizes, "mlp_multipliers": [1, 1], "ssm_multipliers": [1] * 5}, "config.json")
    assert null == ones


def test_what_kernels_do_not_know_of_a_mixer_goes_to_torch() -> None:
    glm = {"model_type": "glm4_moe_lite", "num_hidden_layers": 2}
    config = parse_config(glm, "config.json")
    (latents, *_) = config.latents
    assert has_plain_steps(config) and is_latent_for_gpu(latents)
    assert not is_latent_for_gpu(replace(latents, window=64))
    assert not has_plain_steps(parse_config({**glm, "kv_lora_rank": 4096}, "config.json"))  # a thread's stack
    heads = {"model_type": "rwkv7", "hidden_size": 2048}
    assert has_plain_steps(parse_config({**heads, "head_dim": 256}, "config.json"))
    assert not has_plain_steps(parse_config({**heads, "head_dim": 512}, "config.json"))
