"""Configurations of GGUF files whose layers have states or latents in place of keys and values."""

from __future__ import annotations

import pytest

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.gguf.config import hf_config
from localllm.kernels.state_shapes import MambaShape
from localllm.layers.config import AttentionConfig, DeltaNetConfig, LatentAttentionConfig, MoEConfig
from localllm.models.families import parse_config
from localllm.models.rope_fields import FULL, LINEAR
from tests.gguf_metadata import small

STATES: dict[str, object] = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": 16,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 4,
    "ssm__inner_size": 64,
}
EXPERTS: dict[str, object] = {"expert_count": 8, "expert_used_count": 2}


def small_hybrid(architecture: str, **keys: object) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    metadata, shapes = small(architecture, **{"block_count": 4, **STATES, **EXPERTS, **keys})
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


def read_hybrid(architecture: str, *tensors: str, **keys: object) -> dict[str, object]:
    metadata, shapes = small(architecture, **{**STATES, **keys})
    return hf_config(metadata, shapes | dict.fromkeys(tensors, (64, 24)))


def test_layers_without_heads_of_keys_have_another_mixer() -> None:
    of_two: dict[str, object] = {"attention__head_count_kv": [0, 2]}
    kinds = {"granitehybrid": "linear_attention", "lfm2": "conv"}
    given = {
        "granitehybrid": {"rope__scaling__finetuned": False, "attention__scale": 0.25},
        "lfm2": {"shortconv__l_cache": 3},
    }
    for architecture, kind in kinds.items():
        made = read_hybrid(architecture, "blk.0.ffn_down.weight", **of_two, **given[architecture])
        assert made["layer_types"] == [kind, "full_attention"]
        config = parse_config(made, "config.json")
        assert [isinstance(layer.mixer, AttentionConfig) for layer in config.layers] == [False, True]
        assert config.attentions[0].num_kv_heads == 2
    with pytest.raises(UnsupportedModelError, match=r"heads that rotate \(Bamba\)"):
        read_hybrid("granitehybrid", "blk.0.ffn_down.weight", **of_two)
    with pytest.raises(CheckpointError, match=r"head_count_kv"):
        read_hybrid("lfm2", attention__head_count_kv=[0, 2, 2], shortconv__l_cache=3)


def test_a_layer_of_nemotron_is_what_its_tensors_are() -> None:
    tensors = ("blk.0.ssm_in.weight", "blk.1.ffn_down.weight", "blk.2.attn_q.weight", "blk.2.attn_output.weight")
    lists = {"attention__head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 24, 0, 24], "block_count": 4}
    keys: dict[str, object] = {**lists, "nextn_predict_layers": 1}  # whose layer no list of kinds has
    made = read_hybrid("nemotron_h", *tensors, **keys)
    assert made["layers_block_type"] == ["linear_attention", "mlp", "full_attention"]
    config = parse_config(made, "config.json")
    assert [layer.feed_forward is not None for layer in config.layers] == [False, True, False]
    assert config.attentions[0].rotary_dim == 0
    with pytest.raises(UnsupportedModelError, match="latent size"):
        parse_config(read_hybrid("nemotron_h", *tensors, moe_latent_size=8, **keys), "config.json")
    with pytest.raises(UnsupportedModelError, match="type"):
        parse_config(read_hybrid("nemotron_h", *tensors[1:], **keys), "config.json")


def test_features_that_a_share_of_the_hidden_state_would_round_down_are_what_they_were() -> None:
    made = read_hybrid("mamba2", embedding_length=2816, ssm__inner_size=7680)
    assert parse_config(made, "config.json").recurrents[0].shape.features == 7680


@pytest.mark.parametrize("architecture", ["mamba2", "falcon-h1"])
@pytest.mark.parametrize("key", STATES)
def test_mamba_2_without_one_of_its_sizes_is_refused(architecture: str, key: str) -> None:
    assert parse_config(read_hybrid(architecture), "config.json").recurrents[0].shape.num_heads == 4
    with pytest.raises(CheckpointError, match=key.replace("__", r"\.")):
        read_hybrid(architecture, **{key: None})
    with pytest.raises(CheckpointError, match=r"ssm\.inner_size"):
        read_hybrid(architecture, ssm__inner_size=66)


@pytest.mark.parametrize("key", [key for key in STATES if key != "ssm__group_count"])
def test_mamba_without_one_of_its_sizes_is_refused(key: str) -> None:
    for norms, kind in ((None, "mamba"), (False, "mamba"), (True, "falcon_mamba")):
        assert read_hybrid("mamba", ssm__dt_b_c_rms=norms)["model_type"] == kind
    shape = parse_config(read_hybrid("mamba"), "config.json").recurrents[0].shape
    assert shape == MambaShape(64, 16, 4)
    with pytest.raises(CheckpointError, match=key.replace("__", r"\.")):
        read_hybrid("mamba", **{key: None})


def test_a_layer_of_jamba_is_what_its_heads_and_its_tensors_are() -> None:
    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in (1, 3)]
    lists: dict[str, object] = {"attention__head_count_kv": [0, 0, 2, 0], "block_count": 4}
    layers = parse_config(read_hybrid("jamba", *routers, **lists, **EXPERTS), "config.json").layers
    assert [isinstance(layer.mixer, AttentionConfig) for layer in layers] == [False, False, True, False]
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in layers] == [False, True, False, True]
    dense = parse_config(read_hybrid("jamba", **(lists | {"attention__head_count_kv": [0, 2, 0, 2]})), "config.json")
    assert not dense.mixtures and len(dense.attentions) == 2
    with pytest.raises(UnsupportedModelError, match="attn layers at irregular places"):
        read_hybrid("jamba", **(lists | {"attention__head_count_kv": [2, 2, 0, 2]}))


LATENT: dict[str, object] = {
    "attention__q_lora_rank": 20,
    "attention__kv_lora_rank": 32,
    "attention__head_count_kv": 1,
    "attention__key_length": 40,
    "attention__value_length": 32,
    "attention__key_length_mla": 24,
    "attention__value_length_mla": 12,
    "rope__dimension_count": 8,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}


def read_latent(*tensors: str, **keys: object) -> dict[str, object]:
    metadata, shapes = small("deepseek2", **{**LATENT, **EXPERTS, **keys})
    return hf_config(metadata, shapes | {"blk.1.ffn_down_exps.weight": (8, 64, 24), **dict.fromkeys(tensors, (8,))})


def test_early_files_of_deepseek_say_what_is_made_of_latents() -> None:
    whole = dict.fromkeys(("attention__key_length_mla", "attention__value_length_mla", "expert_gating_func"))
    early = {"attention__key_length": 24, "attention__value_length": 12, "attention__head_count_kv": 4, **whole}
    now, then = read_latent(), read_latent(**early)
    assert (now["model_type"], then["model_type"]) == ("deepseek_v3", "deepseek_v2")
    assert read_latent("blk.1.exp_probs_b.bias", **early)["model_type"] == "deepseek_v3"
    for made in (now, then):
        [mixer] = {layer.mixer for layer in parse_config(made, "config.json").layers}
        assert isinstance(mixer, LatentAttentionConfig)
        sizes = (mixer.num_heads, mixer.query_rank, mixer.latent_dim, mixer.plain_dim, mixer.shared_dim)
        assert (*sizes, mixer.value_dim) == (4, 20, 32, 16, 8, 12)
    lite = read_latent(attention__q_lora_rank=None)
    assert parse_config(lite, "config.json").latents[0].query_rank is None
    assert read_latent(expert_gating_func=1, expert_group_count=2)["topk_method"] == "group_limited_greedy"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_gating_func": 3}, "experts that are chosen in another way"),
        ({"rope__dimension_count": 24}, r"rope\.dimension_count"),
        ({"rope__dimension_count": None}, r"rope\.dimension_count"),
        ({"attention__kv_lora_rank": None}, r"kv_lora_rank"),
        ({"attention__value_length_mla": None}, r"value_length_mla"),
        ({"attention__head_count": 0}, "num_attention_heads"),
        ({"expert_count": None}, "expert_count"),
    ],
)
def test_latent_attention_that_does_not_add_up_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        parse_config(read_latent(**keys), "config.json")


def test_the_values_of_minicpm_3_are_what_is_left_of_a_heads_rows() -> None:
    keys = {"attention__kv_lora_rank": 32, "attention__key_length": 24, "rope__dimension_count": 8}
    metadata, shapes = small("minicpm3", **keys)
    made = hf_config(metadata, shapes | {"blk.0.attn_kv_b.weight": (4 * (16 + 12), 32)})
    config = parse_config(made, "config.json")
    assert {(each.plain_dim, each.value_dim) for each in config.latents} == {(16, 12)}
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12, 1.4 / 2**0.5, 4)
    with pytest.raises(CheckpointError, match="attn_kv_b"):
        hf_config(metadata, shapes)
    with pytest.raises(CheckpointError, match="v_head_dim"):
        parse_config(hf_config(metadata, shapes | {"blk.0.attn_kv_b.weight": (4 * 16, 32)}), "config.json")


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
