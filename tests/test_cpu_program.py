"""The whole step on the CPU as one native call, against the same decoder computed operator by operator."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.bench.random_model import RandomBlocks
from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.paged_kv import PagedKV
from localllm.engine.residency import new_pages
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.errors import NonFiniteError
from localllm.kernels import cpu_isa, cpu_linear
from localllm.layers.linear import Linear
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.models.cpu_products import has_native_matrices
from localllm.models.cpu_program import CpuProgram
from localllm.models.decoder import Decoder
from localllm.models.families import parse_config
from localllm.models.load import load_decoder
from localllm.quant.layouts import CodedLayout, Int4Layout, Int8Layout, WeightLayout
from localllm.quant.recipe import computing, recipe
from tests.thinning import thinned

pytestmark = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")

BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 16, "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
HYBRID = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
    "partial_rotary_factor": 0.5, "head_dim": 64,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "global_head_dim": 64, "sliding_window": 20, "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 160, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 10.0,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 48, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_expand": 3,
    "mamba_proj_bias": True, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
CONVS = ["conv", "full_attention", "conv"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral, window": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 6, "hidden_size": 192, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "phi3, partial rotary": {"model_type": "phi3", "partial_rotary_factor": 0.5, "head_dim": 64, "hidden_size": 256},
    "gemma2": GEMMA2,
    "olmo2": {"model_type": "olmo2"},
    "a vocabulary that fills no tile": {"model_type": "llama", "vocab_size": 163},
    "one key head": {"model_type": "llama", "num_key_value_heads": 1},
    "a key head each": {"model_type": "llama", "num_key_value_heads": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5},
    "qwen3_moe, dense layers": {"model_type": "qwen3_moe", "mlp_only_layers": [0], "norm_topk_prob": True, **EXPERTS},
    "qwen2_moe, gated shared": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 192, **EXPERTS},
    "granitemoe": {
        "model_type": "granitemoe",
        "num_local_experts": 6,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **HYBRID},
    "qwen3_next": {"model_type": "qwen3_next", "shared_expert_intermediate_size": 64, **HYBRID, **EXPERTS},
    "kimi_linear": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 64,
        "linear_num_heads": 2,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": CONVS, "conv_bias": True},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": CONVS,
        "num_dense_layers": 1,
        **EXPERTS,
    },
    "lfm3": {
        "model_type": "lfm3",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_attention_heads": 16,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **HYBRID,
        "partial_rotary_factor": 1.0,
        "head_dim": None,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {"rope_theta": None},
    },
    "bamba": {"model_type": "bamba", **MAMBA, "attn_layer_indices": [1], "partial_rotary_factor": 1.0},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 128,
        "num_local_experts": 6,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 48,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 64,
        "num_key_value_heads": 2,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 128,
        "mlp_bias": True,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        **MAMBA,
        "mamba_d_ssm": 384,
        "projectors_bias": True,
        "key_multiplier": 0.5,
        "head_dim": 64,
        "mamba_rms_norm": True,
        "mamba_n_heads": 24,
        "mamba_d_head": 16,
    },
    "mamba": {"model_type": "mamba", "intermediate_size": 384, "time_step_rank": 48, "use_bias": True},
    "falcon_mamba": {"model_type": "falcon_mamba", "intermediate_size": 256, "time_step_rank": 64, "state_size": 32},
    "jamba": {
        "model_type": "jamba",
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 6,
        "mamba_dt_rank": 16,
    },
    "mamba2": {"model_type": "mamba2", "num_heads": 4, "head_dim": 64, "n_groups": 1, "state_size": 32},
    "rwkv7": {"model_type": "rwkv7", "v_low_rank_dim": 32, "intermediate_size": 256},
    "rwkv7, odd": {
        "model_type": "rwkv7",
        "head_dim": 32,
        "decay_low_rank_dim": 16,
        "a_low_rank_dim": 96,
        "gate_low_rank_dim": 64,
        "norm_first": False,
        "norm_bias": False,
        "tie_word_embeddings": True,
    },
    "gemma4": GEMMA4,
    "gemma4, shared keys": GEMMA4
    | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
    | {"num_key_value_heads": 1, "use_double_wide_mlp": True},
    "gemma4, keys as values": {
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4, experts": {
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20},
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [0, 1]},
    "arcee": {"model_type": "arcee", "mlp_bias": True},
    "muse_glimmer": {"model_type": "muse_glimmer_text", "sliding_window": 20},
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", "num_experts": 6, "moe_topk": 2},
    "glm4_moe, groups": {
        "model_type": "glm4_moe",
        "head_dim": 64,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
        "num_nextn_predict_layers": 0,
        "use_qk_norm": True,
    },
}


def decoder(description: dict[str, Any], weights: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config, chosen = parse_config(BASE | description, "a test's config"), recipe(weights)
    return load_decoder(RandomBlocks(chosen), config, chosen, dtype=dtype, device=torch.device("cpu"))


def new_kv(model: Decoder, capacity: int = 128, kv: str = "bf16") -> PagedKV:
    return PagedKV(new_pages(model, KV_FORMATS[kv]), capacity)


def run(runner: ModelRunner, ids: Sequence[int], ends: Sequence[int], kv_format: str = "bf16") -> Tensor:
    """All logits of a sequence, computed in chunks that end where `ends` says."""
    kv, parts = new_kv(runner.model, max(128, len(ids)), kv_format), []
    for end in ends:
        parts.append(runner.forward([Chunk(ids[:end], kv, end - kv.length, all_logits=True)]))
    return torch.cat(parts)


def ids(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = torch.randint(0, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


@pytest.mark.parametrize(
    ("family", "weights"),
    thinned(
        itertools.product(FAMILIES, ["int4", "int4-g32", "int8"]),
        lambda case: case[1] == "int4" or case in {("llama", "int4-g32"), ("gemma2", "int8")},
    ),
)
def test_the_native_step_computes_what_the_operators_compute(family, weights):
    """The operators run in fp32 on INT8 activations too; the native step rounds keys and values to bf16, which turns
    some of the activations' roundings. A wrong sign, scale or offset anywhere makes an error as large as the logits."""
    native, plain = decoder(FAMILIES[family], weights), decoder(FAMILIES[family], weights, torch.float32)
    assert CpuProgram.supports(native) and not CpuProgram.supports(plain)
    tokens = ids(40)
    ours, expected = run(ModelRunner(native), tokens, [40]), run(ModelRunner(plain), tokens, [40])
    errors = (ours - expected).square().mean(dim=1)
    # Where two experts are nearly as good, the rounding decides, and a token gets the other one.
    error = errors.median() if native.config.mixtures else errors.mean()
    assert float(error.sqrt()) < 0.04 * float(expected.std())


@pytest.mark.parametrize(
    ("family", "kv_format"),
    thinned(itertools.product(FAMILIES, KV_FORMATS), set(zip(FAMILIES, itertools.cycle(KV_FORMATS))).__contains__),
)
def test_chunks_of_any_size_give_the_same_bits(family, kv_format):
    runner = ModelRunner(decoder(FAMILIES[family], "int4"))
    tokens = ids(200)
    whole = run(runner, tokens, [200], kv_format)
    for ends in ([1, 2, 3, 11, 24, 60, 130, 200], list(range(8, 201, 8)), [63, 64, 65, 192, 200]):
        assert torch.equal(run(runner, tokens, ends, kv_format), whole)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_hidden_states_are_heard_before_the_head_takes_their_room(weights):
    runner = ModelRunner(decoder(FAMILIES["qwen3_5"], weights))
    heard: list[Tensor] = []
    runner.on_states = lambda _chunks, states: heard.append(states.clone())
    tokens = ids(10)
    for wants_all in (True, False):
        runner.forward([Chunk(tokens, new_kv(runner.model), 10, all_logits=wants_all)])
    assert torch.equal(*heard)


KINDS = [(torch.bfloat16, "k8v4"), (torch.float32, "bf16"), (torch.bfloat16, "bf16"), (torch.float32, "k8v4")]


@pytest.mark.parametrize(
    ("family", "dtype", "kv_format"),
    thinned(
        [(family, *kind) for family in FAMILIES for kind in KINDS],
        {(family, *kind) for family, kind in zip(FAMILIES, itertools.cycle(KINDS[:2]))}.__contains__,
    ),
)
def test_a_prompt_that_goes_through_each_block_in_parts_gives_the_same_bits(family, dtype, kv_format):
    model = decoder(FAMILIES[family], "int4", dtype)
    tokens = ids(200)
    whole = run(ModelRunner(model, batch_rows=9), tokens, [200], kv_format)
    assert torch.equal(run(ModelRunner(model), tokens, [*range(9, 200, 9), 200], kv_format), whole)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3, partial rotary"])
@pytest.mark.parametrize("isa", cpu_isa.host_isas()[1:], ids=lambda isa: isa.name)
def test_every_instruction_set_gives_the_same_bits(family, isa):
    best, forced = (ModelRunner(decoder(FAMILIES[family], "int4")) for _ in range(2))
    forced.cpu_program = CpuProgram(forced.model, isa)
    tokens = ids(60)
    assert torch.equal(run(forced, tokens, [1, 5, 60]), run(best, tokens, [1, 5, 60]))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_batch_gives_each_sequence_the_bits_that_it_has_alone(weights):
    runner = ModelRunner(decoder(FAMILIES["llama"], weights))
    prompts = [ids(length, seed) for seed, length in enumerate((3, 40, 17, 1, 9, 28, 5, 2, 11, 64, 30, 6, 7))]
    alone = [run(runner, prompt, [len(prompt) - 1, len(prompt)] if len(prompt) > 1 else [1])[-1] for prompt in prompts]
    stores = [new_kv(runner.model) for _ in prompts]
    for prompt, kv in zip(prompts, stores, strict=True):
        if len(prompt) > 1:
            runner.forward([Chunk(prompt, kv, len(prompt) - 1)])
    for rows in (512, 4):
        parts = ModelRunner(runner.model, batch_rows=rows)
        together = parts.forward([Chunk(prompt, kv, 1) for prompt, kv in zip(prompts, stores, strict=True)])
        assert all(torch.equal(row, expected) for row, expected in zip(together, alone, strict=True))
        for kv in stores:
            kv.trim(kv.length - 1)


def test_a_prompt_is_computed_alike_after_a_batch_of_as_many_rows():
    runner = ModelRunner(decoder(FAMILIES["llama"], "int4"))
    expected = run(ModelRunner(runner.model), ids(7), [7])
    runner.forward([Chunk(ids(1, seed), new_kv(runner.model), 1) for seed in range(7)])
    assert torch.equal(run(runner, ids(7), [7]), expected)


def test_a_forward_that_grows_leaves_earlier_logits_alone():
    runner = ModelRunner(decoder(FAMILIES["qwen2"], "int4"))
    first = run(runner, ids(5), [5])
    kept = first.clone()
    run(runner, ids(90, 1), [90])
    assert torch.equal(first, kept) and torch.equal(run(runner, ids(5), [5]), kept)


def test_a_nan_is_named_by_its_block_and_leaves_the_next_request_alone():
    model = decoder(FAMILIES["llama"], "int4")
    runner = ModelRunner(model)
    expected = run(runner, ids(6), [6])
    scale = model.blocks[1].body.down_proj.tensors["scale"]  # type: ignore[union-attr]
    before = scale[0, 0, 3].clone()
    scale[0, 0, 3] = float("nan")
    kv = new_kv(model)
    chunk = Chunk(ids(6), kv, 6)
    assert not runner.forward([chunk]).isfinite().all()
    error = runner.locate_non_finite(chunk)
    assert isinstance(error, NonFiniteError) and model.blocks[1].name in error.what
    scale[0, 0, 3] = before
    assert torch.equal(run(runner, ids(6), [6]), expected)


@pytest.mark.parametrize(
    "description",
    [
        {"model_type": "llama", "head_dim": 48},
        {"model_type": "llama", "hidden_size": 100},
        {"model_type": "llama", "intermediate_size": 200},
        {"model_type": "phi3", "partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_sizes_that_fill_no_whole_tiles_take_the_operators(description):
    model = decoder(description, "int4")
    assert not CpuProgram.supports(model)
    runner = ModelRunner(model)
    assert runner.cpu_program is None
    logits = run(runner, ids(20), [20])
    plain = run(ModelRunner(decoder(description, "int4", torch.float32)), ids(20), [20])
    assert float((logits - plain).square().mean().sqrt()) < 0.05 * float(plain.std())


def test_other_formats_and_devices_take_the_operators():
    assert not CpuProgram.supports(decoder(FAMILIES["llama"], "bf16"))
    assert not CpuProgram.supports(dataclasses.replace(decoder(FAMILIES["llama"], "int8"), device=torch.device("meta")))


def empty(layout: WeightLayout, out_features: int, in_features: int) -> Linear:
    specs = layout.specs(out_features, in_features)
    zeros = {name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for name, spec in specs.items()}
    return Linear(computing(layout), zeros, out_features, in_features)


def time_mix_of(up: Linear) -> Rwkv7TimeMix:
    """A time mix of RWKV-7 with this second matrix of its decays."""
    bodies = (block.body for block in decoder(FAMILIES["rwkv7"], "int8").blocks)
    body = next(body for body in bodies if isinstance(body, Rwkv7TimeMix))
    assert has_native_matrices(body)
    return dataclasses.replace(body, decay=dataclasses.replace(body.decay, up=up))


@pytest.mark.parametrize(
    ("layout", "takes"),
    [
        (Int8Layout(), True),
        (CodedLayout("int8", 64), True),
        (CodedLayout("iq4", 64), True),
        (CodedLayout("int8", 64, has_bias=True), False),  # which columns of zeros would have, too
        (CodedLayout("int8", 32), False),  # rows of the buffer end with whole groups of 64
        (CodedLayout("iq4", 128), False),
        (Int4Layout(), False),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_the_second_small_matrix_of_rwkv_7_takes_padding_in_groups_of_64_without_a_bias(layout, takes):
    assert has_native_matrices(time_mix_of(empty(layout, 128, 128)))
    padded = empty(layout, 128, 72)
    assert padded.packed is not None and padded.packed.in_features > 72
    assert has_native_matrices(time_mix_of(padded)) == takes


def test_no_other_matrix_of_rwkv_7_takes_padding():
    body, padded = time_mix_of(empty(Int8Layout(), 128, 64)), empty(Int8Layout(), 128, 72)
    assert has_native_matrices(body)
    assert not has_native_matrices(dataclasses.replace(body, o_proj=padded))
    assert not has_native_matrices(dataclasses.replace(body, decay=dataclasses.replace(body.decay, down=padded)))
    assert not has_native_matrices(time_mix_of(empty(Int8Layout(), 120, 64)))  # nor are rows padded
    mix = next(
        block.body for block in decoder(FAMILIES["rwkv7"], "int8").blocks if isinstance(block.body, Rwkv7ChannelMix)
    )
    assert has_native_matrices(mix) and not has_native_matrices(dataclasses.replace(mix, value=padded))


@pytest.mark.parametrize("rank", [16, 48, 80])
def test_padded_small_matrices_of_rwkv_7_compute_what_the_operators_do(rank):
    names = ("decay", "a", "v", "gate")
    description = FAMILIES["rwkv7"] | {f"{name}_low_rank_dim": rank for name in names}
    native, plain = decoder(description, "int8"), decoder(description, "int8", torch.float32)
    assert CpuProgram.supports(native) and not CpuProgram.supports(plain)
    ours, expected = (run(ModelRunner(each), ids(40), [40]) for each in (native, plain))
    assert float((ours - expected).square().mean().sqrt()) < 0.04 * float(expected.std())
