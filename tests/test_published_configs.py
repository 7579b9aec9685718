"""Models of the newest families are read from their makers' config.json as they are."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from localllm.kernels.sizes import PAGE_TOKENS
from localllm.layers.config import (
    AttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MLPConfig,
    MoEConfig,
    Recurrent,
    SingleMixer,
)
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.families import load_config, parse_config
from tests.parameters import num_parameters
from tests.published_models import BF16, PUBLISHED


def config_of(name: str, **keys: Any) -> ModelConfig:
    """keys: of the file that differ; None takes one away."""
    raw = {key: value for key, value in {**PUBLISHED[name].raw, **keys}.items() if keys.get(key, 0) is not None}
    return parse_config(raw, "config.json")


def mixer_bytes(mixer: SingleMixer) -> int:
    """Of a sequence's state, or of a token's keys and values."""
    if isinstance(mixer, Recurrent):
        return mixer.shape.snapshot_bytes
    return mixer.kv_shape.page_bytes("dense", "dense", BF16) // PAGE_TOKENS


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_means_the_model_that_its_maker_describes(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(published.text)
    config = load_config(tmp_path)
    found = num_parameters(config) + (num_parameters(config.draft_head) if config.draft_head else 0)
    rounding = 0.0 if isinstance(published.parameters, int) else 0.01
    assert found == pytest.approx(published.parameters, rel=rounding, abs=0)
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    assert Counter(map(type, mixers)) == {kind: count for kind, (count, _) in published.mixers.items()}
    sizes = {(type(mixer), mixer_bytes(mixer)) for mixer in mixers}
    assert sizes == {(kind, size) for kind, (_, size) in published.mixers.items()}
    assert config.longest_context == published.context


EXPERTS = {  # layers with them, experts, of a token, width of one, width of those that all tokens have
    "GLM-4.7-Flash": (46, 64, 4, 1536, 1536),
    "DeepSeek-V2-Lite": (26, 64, 6, 1408, 2816),
    "Moonlight-16B-A3B": (26, 64, 6, 1408, 2816),
    "Nemotron-3-Nano-30B-A3B": (23, 128, 6, 1856, 3712),
    "Granite-4.0-H-Tiny": (40, 64, 6, 512, 1024),
    "LFM2-8B-A1B": (22, 32, 4, 1792, None),
    "Kimi-Linear-48B-A3B": (26, 256, 8, 1024, 1024),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_the_file(name: str) -> None:
    bodies = [layer.feed_forward for layer in config_of(name).layers]
    mixtures = [body for body in bodies if isinstance(body, MoEConfig)]
    moe, router = mixtures[0], mixtures[0].router
    shared = None if moe.shared is None else moe.shared.intermediate_size
    found = (len(mixtures), router.num_experts, router.top_k, moe.expert.intermediate_size, shared)
    assert found == EXPERTS[name] and set(mixtures) == {moe}


def test_experts_are_chosen_as_their_makers_do() -> None:
    choices = {name: config_of(name).mixtures[0].router for name in EXPERTS}
    sums = {name: (router.scores, router.normalizes, router.scale) for name, router in choices.items()}
    assert sums == {
        "GLM-4.7-Flash": ("sigmoid", True, 1.8),
        "DeepSeek-V2-Lite": ("softmax", False, 1.0),
        "Moonlight-16B-A3B": ("sigmoid", True, 2.446),
        "Nemotron-3-Nano-30B-A3B": ("sigmoid", True, 2.5),
        "Granite-4.0-H-Tiny": ("chosen", False, 1.0),
        "LFM2-8B-A1B": ("sigmoid", True, 1.0),
        "Kimi-Linear-48B-A3B": ("sigmoid", True, 2.446),
    }
    assert {router.groups for router in choices.values()} == {1}
    assert all(router.has_correction == (router.scores == "sigmoid") for router in choices.values())


def test_latents_turn_and_are_scaled_as_their_makers_do() -> None:
    glm, lite, moonlight, minicpm, kimi = (
        config_of(name).latents[0]
        for name in ("GLM-4.7-Flash", "DeepSeek-V2-Lite", "Moonlight-16B-A3B", "MiniCPM3-4B", "Kimi-Linear-48B-A3B")
    )
    assert (glm.rope.kind, glm.rope.theta, glm.rotary_dim, glm.query_rank) == ("default", 1e6, 64, 768)
    assert (lite.rope.kind, lite.rope.factor, lite.rotary_dim, lite.query_rank) == ("yarn", 40.0, 64, None)
    assert lite.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert (moonlight.rope.kind, moonlight.rope.theta, moonlight.scale) == ("default", 50000.0, 192**-0.5)
    assert minicpm.rope.kind == "longrope" and minicpm.rope.short_factor == minicpm.rope.long_factor
    assert len(minicpm.rope.long_factor) == minicpm.rotary_dim // 2 and minicpm.value_dim == 64
    assert (kimi.rotary_dim, kimi.query_rank, kimi.scale) == (0, None, 192**-0.5)


def layers_with(config: ModelConfig, kind: type[SingleMixer]) -> list[int]:
    return [
        number for number, layer in enumerate(config.layers) if any(isinstance(each, kind) for each in layer.mixers)
    ]


def test_attention_is_where_the_file_counts_it() -> None:
    assert layers_with(config_of("Kimi-Linear-48B-A3B"), LatentAttentionConfig) == [3, 7, 11, 15, 19, 23, 26]
    assert layers_with(config_of("Granite-4.0-H-Micro"), AttentionConfig) == [5, 15, 25, 35]
    assert layers_with(config_of("LFM2-8B-A1B"), AttentionConfig) == [2, 6, 10, 14, 18, 21]
    assert layers_with(config_of("Bamba-9B-v2"), AttentionConfig) == [9, 18, 27]
    assert config_of("LFM2-1.2B").layers == config_of("LFM2.5-1.2B").layers


def letter(layer: LayerConfig) -> str:
    """Of a layer of Nemotron, as its files have it."""
    kinds = {Mamba2Config: "M", AttentionConfig: "*", MLPConfig: "-", MoEConfig: "E"}
    [kind] = {type(body) for body in layer.bodies}
    return kinds[kind]


@pytest.mark.parametrize("name", ["Nemotron-Nano-9B-v2", "Nemotron-3-Nano-30B-A3B"])
def test_layers_of_nemotron_are_its_letters_or_the_names_of_newer_files(name: str) -> None:
    pattern, config = PUBLISHED[name].raw["hybrid_override_pattern"], config_of(name)
    assert "".join(map(letter, config.layers)) == pattern
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    newer = config_of(name, hybrid_override_pattern=None, layers_block_type=[names[each] for each in pattern])
    assert newer == config
    assert {(mlp.activation, mlp.has_gate) for mlp in config.mlps} == {("relu2", False)}
    assert {(mixer.least_step, mixer.most_step) for mixer in config.recurrents} == {(0.0, None)}
    assert {attention.rotary_dim for attention in config.attentions} == {0}


def test_multipliers_and_shares_of_heads_are_those_of_the_makers() -> None:
    bamba, granite, falcon = (config_of(name) for name in ("Bamba-9B-v2", "Granite-4.0-H-Micro", "Falcon-H1-0.5B"))
    assert {(each.rotary_dim, each.head_dim) for each in bamba.attentions} == {(64, 128)}
    assert {(each.rotary_dim, each.scale) for each in granite.attentions} == {(0, 0.015625)}
    assert (granite.embedding_scale, granite.residual_scale, granite.logit_scale) == (12.0, 0.22, 1 / 8)
    assert {(each.rotary_dim, each.rope.theta) for each in falcon.attentions} == {(64, 1e11)}
    assert falcon.attentions[0].scale == pytest.approx(64**-0.5 * 0.390625)
    assert dict(falcon.stored.multipliers)[".self_attn.o_proj."] == 0.9375
    assert {mixer.norm for mixer in falcon.recurrents if isinstance(mixer, Mamba2Config)} == {None}
    minicpm = config_of("MiniCPM3-4B")
    scales = (minicpm.embedding_scale, minicpm.residual_scale, minicpm.logit_scale)
    assert scales == pytest.approx((12.0, 1.4 / math.sqrt(62), 0.1))


def test_a_layer_that_drafts_and_all_ends_of_a_text_are_read_of_glm() -> None:
    config = config_of("GLM-4.7-Flash")
    assert config.eos_token_ids == (154820, 154827, 154829) and config.stored.num_extra_layers == 1
    assert config.draft_head is not None and config.draft_head.layers == config.layers[-1:]


def test_rwkv_7_may_say_the_width_of_each_layers_values_and_no_number_of_heads() -> None:
    config = config_of("RWKV7-World-1.5B")
    assert config_of("RWKV7-World-1.5B", value_dim=[2048] * 24, num_heads=None) == config
    assert config.has_embedding_norm and config.norm_kind == "layer"
