"""`localllm bench`: random weights in every format, floors, and figures that add up."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from localllm.bench import target
from localllm.bench.machine import PeakMemory
from localllm.bench.random_model import RandomBlocks
from localllm.bench.report import Spread
from localllm.bench.run import Depth, DepthSamples, prefill, random_ids, summary
from localllm.bench.target import BenchmarkTarget, random_target
from localllm.bench.workload import Workload
from localllm.cache.kv_format import KV_FORMATS
from localllm.engine.engine import Engine
from localllm.engine.events import Timings
from localllm.engine.step_types import Chunk
from localllm.kernels import kv_page
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.families import parse_config
from localllm.models.shapes import Shape
from localllm.offload.measurements import roofline as floors
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import recipe
from localllm.settings import EngineConfig

DENSE_KV = KV_FORMATS["bf16"]
CPU = torch.device("cpu")
ODD: dict[str, Any] = {  # no size is a multiple of a tile's 16 rows, nor of a group
    "model_type": "llama", "vocab_size": 263, "hidden_size": 36, "intermediate_size": 54, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 10, "max_position_embeddings": 256,
    "attention_bias": True,
}  # fmt: skip
RECIPES = ["bf16", "bf12", "int8", "nf4", "int4-g32", "int4-g64", "int4-g128"]


def odd_shape(**differences: Any) -> Shape:
    return Shape("odd", parse_config({**ODD, **differences}, "odd"), {**ODD, **differences})


def made(shape: Shape, weights: str = "bf16", ctx: int = 64) -> BenchmarkTarget:
    return random_target(shape, EngineConfig(device="cpu", weights=weights), Workload(ctx - 1, 0, (0,), 1))


@pytest.fixture(autouse=True)
def small_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(floors, "MATMUL_SHAPE", (16, 64, 64))


# Random weights


@pytest.mark.parametrize("weights", RECIPES)
@pytest.mark.parametrize("shape", [odd_shape(), odd_shape(hidden_size=64, tie_word_embeddings=True)])
def test_random_blocks_are_what_the_layout_says(weights: str, shape: Shape) -> None:
    chosen, seen = recipe(weights), []
    source = RandomBlocks(chosen)
    for layout in block_layouts(shape.config):
        tensors = source.tensors(layout)
        made = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        assert made == [(name, spec.shape, spec.torch_dtype) for name, spec in layout.specs(chosen).items()]
        seen += tensors.values()
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in seen)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert sum(tensor.nbytes for tensor in seen) == model_bytes(shape.config, chosen)


@pytest.mark.parametrize("weights", RECIPES)
def test_random_matrices_are_whole_rows_of_unit_scale(weights: str) -> None:
    chosen = recipe(weights)
    layout = block_layouts(odd_shape().config)[2]
    tensors = RandomBlocks(chosen).tensors(layout)
    for matrix in layout.matrices:
        parts = {name.split(".")[1]: tensor for name, tensor in tensors.items() if name.startswith(f"{matrix.name}.")}
        weight = matrix.format(chosen).dequantize(parts, matrix.out_features, matrix.in_features).float()
        norms = weight.square().sum(dim=1)  # 1 on average: N(0, 1/K)
        assert weight.shape == (matrix.out_features, matrix.in_features)
        assert 0.2 < norms.min() and norms.max() < 4


@pytest.mark.parametrize("weights", RECIPES)
def test_a_model_of_random_weights_computes_finite_logits_that_depend_on_the_prompt(weights: str) -> None:
    ours = made(odd_shape(), weights)
    kv = Depth(ours, 0, Workload(8, 4, (0,), 1))._kv
    logits = []
    for first in (3, 70):
        kv.trim(0)
        logits.append(ours.engine.runner.forward([Chunk([first, 5, 9], kv, 3)]))
    assert all(row.isfinite().all() for row in logits)
    assert not torch.equal(*logits)


# What a token costs


def test_a_token_costs_the_bytes_of_all_matrices_but_the_embeddings_rows_and_two_operations_for_each_weight() -> None:
    untied, tied = made(odd_shape()), made(odd_shape(tie_word_embeddings=True))
    hidden, heads, kv, inner, vocab = 36, 40, 10, 54, 263
    blocks = 2 * ((heads + 2 * kv) * hidden + hidden * heads + 3 * hidden * inner)
    assert target.matrix_bytes(untied.engine.model) == 2 * (blocks + vocab * hidden)
    assert target.matrix_bytes(tied.engine.model) == 2 * (blocks + vocab * hidden)
    assert made(odd_shape(), "int4-g32").prefill_flops_per_token() == 2 * blocks


def test_the_bytes_of_a_token_count_scales_and_padding() -> None:
    ours = made(odd_shape(), "int4-g32")
    chosen = recipe("int4-g32")
    matrices = [matrix for layout in block_layouts(ours.engine.config)[1:] for matrix in layout.matrices]
    specs = [matrix.format(chosen).specs(matrix.out_features, matrix.in_features) for matrix in matrices]
    assert target.matrix_bytes(ours.engine.model) == sum(s.nbytes for spec in specs for s in spec.values())


def test_the_cache_is_read_as_far_as_each_layers_window_reaches() -> None:
    raw = {**ODD, "model_type": "mistral", "sliding_window": 12}
    windowed = made(Shape("windowed", parse_config(raw, "windowed"), raw))
    row = 2 * 1 * 10 * 2  # keys and values, heads, features, bytes
    lengths = [11, 12, 12, 12]  # 10 tokens in the cache, and the new one itself
    assert target.mean_kv_bytes(windowed.engine.model, DENSE_KV, 10, 4) == 2 * row * sum(lengths) // 4
    assert target.mean_kv_bytes(made(odd_shape()).engine.model, DENSE_KV, 10, 4) == 2 * row * (11 + 12 + 13 + 14) // 4


# Decoding at a depth


class Spy:
    """Sees every forward of an engine: how much is in the cache, and how many tokens come."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int]] = []
        forward = engine.runner.forward

        def seen(chunks: list[Chunk], **options: Any) -> torch.Tensor:
            self.calls += [(chunk.kv.length, chunk.num_tokens) for chunk in chunks]
            return forward(chunks, **options)

        monkeypatch.setattr(engine.runner, "forward", seen)


@pytest.mark.parametrize("is_random", [True, False])
@pytest.mark.parametrize("context", [0, 1, 7, 40])
def test_every_round_decodes_one_by_one_behind_the_whole_context(
    context: int, is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(8, 5, (context,), 1)
    ours = dataclasses.replace(made(odd_shape(), ctx=workload.ctx), has_random_weights=is_random)
    depth = Depth(ours, context, workload)
    spy = Spy(ours.engine, monkeypatch)
    for _ in range(2):
        tok_s, _ = depth.decode()
        assert tok_s > 0
        assert spy.calls == [(context + step, 1) for step in range(5)]
        spy.calls.clear()
    assert not ours.engine.has_work


def test_a_real_models_cache_is_filled_by_reading_a_prompt() -> None:
    workload = Workload(8, 5, (20,), 1)
    ours = dataclasses.replace(made(odd_shape(), ctx=workload.ctx), has_random_weights=False)
    depth = Depth(ours, 20, workload)
    expected = ours.engine.residency.new_kv(20)
    ours.engine.runner.forward([Chunk(random_ids(ours, 21, seed=20), expected, 20)])
    assert depth._kv.length == expected.length == 20
    for layer in range(2):
        pages = [kv.layer(layer, 0, 20).pages[0][None] for kv in (depth._kv, expected)]
        ours_read, theirs = (kv_page.load(expected.layouts[0], page)[0] for page in pages)
        assert torch.equal(ours_read[:, :20], theirs[:, :20])


def test_the_floor_is_sampled_before_and_after_decoding() -> None:
    workload = Workload(8, 5, (4,), 1)
    samples = iter([10.0, 30.0])
    _, floor = Depth(made(odd_shape(), ctx=workload.ctx), 4, workload).decode(lambda: next(samples))
    assert floor == pytest.approx(15.0)  # as many bytes each time: the times add up, not the rates
    assert next(samples, None) is None


def test_a_prompt_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = made(odd_shape())
    spy = Spy(ours.engine, monkeypatch)
    timings = [prefill(ours.engine, random_ids(ours, 30)) for _ in range(2)]
    assert spy.calls == [(0, 30), (0, 30)]
    assert all(timing.ttft_s and timing.prefill_tok_s for timing in timings)


# Figures


def test_ratios_are_formed_within_a_round() -> None:
    workload = Workload(8, 4, (4,), 3)
    ours = made(odd_shape(), ctx=workload.ctx)
    cost = ours.bytes_per_token(4, 4) / 1e9
    flops = ours.prefill_flops_per_token() / 1e9
    speeds = (10.0, 100.0, 1000.0)  # a machine that is at times ten times slower
    prompts = [Timings(ttft_s=1.0, prefill_tok_s=0.5 * speed / flops) for speed in speeds]
    depth = DepthSamples(4, [(0.8 * speed / cost, speed) for speed in speeds], 1, None)
    run = summary(ours, workload, prompts, depth, {"matmul_gflops": speeds})
    fractions = (run.floor_fraction, run.floor_fraction_spread.min, run.prefill_fraction)
    assert fractions == pytest.approx((0.8, 0.8, 0.5))
    assert (run.decode_tok_s.median, run.decode_tok_s.max) == pytest.approx((80 / cost, 800 / cost))


def test_the_peak_of_memory_is_of_what_came_after() -> None:
    big = torch.ones(64 << 20, dtype=torch.uint8)
    del big
    peak = PeakMemory(CPU)
    before = peak.rss_bytes()
    held = host_buffer(32 << 20).fill_(1)  # pages of its own: torch may be given what a test before left behind
    del held
    assert (24 << 20) < peak.rss_bytes() - before < (60 << 20) and peak.vram_bytes() is None


def test_floors_are_bytes_read_and_operations_done_over_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "seconds", lambda action: (action(), 0.5)[1])
    assert floors.MemoryFloor().dram_read_gbs() == pytest.approx((1 << 20) / 0.5e9)
    assert floors.MatmulFloor(CPU).gflops() == pytest.approx(floors.MATMUL_COPIES * 2 * 16 * 64 * 64 / 0.5e9)


def test_a_spread_is_shown_in_three_digits_and_never_in_powers_of_ten() -> None:
    assert str(Spread(12345, 999.6, 99999)) == "12300 (1000 to 100000)"
    assert str(Spread(5.0, 0.00123, 999.4)) == "5 (0.00123 to 999)"
