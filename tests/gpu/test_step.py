"""A whole decoder by the GPU's kernels, in Triton's interpreter, beside torch's operators on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm import hub
from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.engine.runner import Ahead, ModelRunner
from localllm.engine.sampler import PlainDraw
from localllm.engine.step_types import Chunk
from localllm.layers import gpu_block
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch, Draw
from localllm.layers.moe import MoE
from localllm.models.decoder import Decoder
from localllm.models.gpu_capabilities import is_ours
from localllm.models.gpu_program import Drawn, GpuProgram
from localllm.settings import EngineConfig
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.gguf_support import mixed, write_gguf
from tests.kv_support import check_pages
from tests.thinning import every_other, thinned

EXACT = 2e-5  # of the norm, in fp32


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_kernels(model: Decoder) -> ModelRunner:
    runner = ModelRunner(model)
    runner.cpu_program, runner.gpu_program = None, GpuProgram(model)
    return runner


def by_operators(model: Decoder) -> ModelRunner:
    runner = ModelRunner(model)
    runner.cpu_program = None
    return runner


def logits(engine: Engine, runner: ModelRunner, token_ids: list[int], chunk_sizes: list[int]) -> Tensor:
    """Of every token, fed in chunks."""
    kv = engine.residency.new_kv(len(token_ids))
    found = [runner.forward([Chunk(token_ids, kv, size, all_logits=True)]) for size in chunk_sizes]
    kv.close()
    return torch.cat(found)


def behind(engine: Engine, token_ids: list[int], past: int, chunk_sizes: list[int]) -> Tensor:
    """By our kernels, of the tokens behind the first `past`, which operators read."""
    kv = engine.residency.new_kv(len(token_ids))
    by_operators(engine.model).forward([Chunk(token_ids, kv, past)])
    runner = by_kernels(engine.model)
    found = [runner.forward([Chunk(token_ids, kv, size, all_logits=True)]) for size in chunk_sizes]
    kv.close()
    return torch.cat(found)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# Of a layer whose kernels others compare: in the interpreter each row and head takes a millisecond or more.
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", layers=2, **SMALL)
    return folder


@pytest.fixture
def engine(llama: Path) -> Iterator[Engine]:
    """In fp32, which computes by our kernels."""
    loaded = Engine.load(llama, EngineConfig(device="cpu", weights="fp32"))
    loaded.runner.gpu_program = GpuProgram(loaded.model)
    yield loaded
    loaded.close()


# Others differ from these in what comes before the kernels: the frequencies of RoPE, or which layers have windows.
OF_ONE_LAYER = {"phi3-partial-rotary", "llama-one-kv-head-odd-sizes", "ministral3", "arcee"}
OF_THEIR_OWN = OF_ONE_LAYER | {"gemma3-scaled-and-capped"}


@pytest.mark.parametrize("family", thinned(FAMILIES, OF_THEIR_OWN.__contains__))
def test_every_family_is_computed_as_operators_do(family, tmp_path):
    # Every sixth layer of Gemma 3 has no window, and files that name their layers' kinds have all of them.
    write_checkpoint(tmp_path, family, layers=1 if family in OF_ONE_LAYER else None)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32"))
    assert family not in OF_ONE_LAYER or all(is_ours(block, block.device) for block in engine.model.blocks)
    token_ids = ids(19)
    expected = logits(engine, by_operators(engine.model), token_ids, [19])
    found = logits(engine, by_kernels(engine.model), token_ids, [17, 2])
    assert error(found, expected) < EXACT


@pytest.mark.parametrize(("weights", "kv"), every_other([("int4-g32", "int4"), ("int8", "int8")]))
def test_packed_weights_and_coded_pages_are_computed_as_the_cpu_does(weights, kv, tmp_path):
    """Behind a coded page. The CPU multiplies by the same INT8 activations; in fp32 nothing else differs."""
    write_checkpoint(tmp_path, "qwen3", layers=1)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32", weights=weights, kv=kv))
    token_ids = ids(131)
    expected = logits(engine, by_operators(engine.model), token_ids, [126, 5])[126:]
    assert error(behind(engine, token_ids, 126, [4, 1]), expected) < 0.02  # a code falls on a step's other side


# By the names that families have for the width of an expert. Norms of means are left to operators.
EXPERT_WIDTH = {"moe_intermediate_size": 48, "intermediate_size": 96}
LEFT_TO_OPERATORS = {"phimoe", "phimoe-jitter"}
OF_FOUR = ("dots1-groups-windowed", "qwen3_5_moe", "gpt_oss-square", "lfm2_moe", "lfm2_moe-odd")
ENDS = ("moe", "mixtral", "dots1", "minimax_m2", "gpt_oss")
MIXTURES = [name for name, (kind, _) in FAMILIES.items() if kind.endswith(ENDS)]
QUICK_MIXTURES = {("qwen2_moe", "int4-g32"), ("glm4_moe-groups", "int8"), ("mixtral", "int8"), ("phimoe", "int4-g32")}
QUICK_MIXTURES.add(("gpt_oss", "int4-g32"))


@pytest.mark.parametrize(
    ("family", "weights"), thinned([*product(MIXTURES, ["int4-g32", "int8"])], QUICK_MIXTURES.__contains__)
)
def test_a_packed_mixture_is_computed_by_our_kernels_as_the_cpu_does(family, weights, tmp_path):
    """The first layer of some families has none."""
    # A hybrid's last of four attends, and some files name the kinds of all four.
    layers = 4 if family in OF_FOUR else 2
    write_checkpoint(tmp_path, family, layers=layers, **EXPERT_WIDTH)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32", weights=weights))
    mixtures = [block for block in engine.model.blocks if isinstance(block.body, MoE)]
    assert mixtures and all(is_ours(block, block.device) == (family not in LEFT_TO_OPERATORS) for block in mixtures)
    assert engine.model.config.model_type != "gpt_oss" or GpuProgram(engine.model).is_whole
    token_ids = ids(19)
    expected = logits(engine, by_operators(engine.model), token_ids, [19])
    assert error(logits(engine, by_kernels(engine.model), token_ids, [17, 2]), expected) < 0.02


@pytest.mark.parametrize("family", ["llama-biases-tied", "qwen3_moe"])
def test_a_model_of_many_formats_is_computed_by_our_kernels_as_the_cpu_does(family, tmp_path):
    """Parts of one matrix in formats of their own, an embedding in groups, experts in two formats."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    write_checkpoint(tmp_path / "checkpoint", family, layers=2, **wide)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", mixed())
    engine = Engine.load(hub.locate(str(tmp_path / "model.gguf")), EngineConfig(device="cpu", dtype="fp32"))
    assert engine.weights.startswith("kept-")
    assert all(is_ours(block, block.device) for block in engine.model.blocks)
    token_ids = ids(19)
    expected = logits(engine, by_operators(engine.model), token_ids, [19])
    assert error(logits(engine, by_kernels(engine.model), token_ids, [17, 2]), expected) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_model_in_bf16_is_computed_as_operators_do(weights, llama):
    """Also a prompt whose matrices the library multiplies, in bf16. The interpreter rounds bf16 towards zero."""
    engine = Engine.load(llama, EngineConfig(device="cpu", dtype="bf16", weights=weights))
    assert engine.model.dtype is torch.bfloat16
    token_ids = ids(72)
    expected = logits(engine, by_operators(engine.model), token_ids, [72])
    assert error(logits(engine, by_kernels(engine.model), token_ids, [66, 5, 1]), expected) < 0.06


@pytest.mark.usefixtures("products_row_by_row")
def test_a_row_has_the_same_bits_alone_verified_with_others_and_in_a_batch(tmp_path):
    write_checkpoint(tmp_path, "qwen3", layers=1)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32", weights="int4-g32", kv="int8"))
    token_ids = ids(131)
    alone = behind(engine, token_ids, 126, [1] * 3)
    assert torch.equal(behind(engine, token_ids, 126, [3]), alone)
    others = [engine.residency.new_kv(127) for _ in range(3)]
    by_operators(engine.model).forward([Chunk(token_ids, kv, 126) for kv in others])
    together = by_kernels(engine.model).forward([Chunk(token_ids, kv, 1) for kv in others])
    assert torch.equal(together, alone[:1].expand(3, -1))


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize(
    ("family", "weights", "kv", "sizes"),
    every_other(
        [
            ("llama", "int8", "bf16", [64, 17, 13, 2, 1]),
            ("qwen3", "int4-g64", "int8", [64, 40, 17, 13, 2, 1]),  # behind a coded page
            ("gpt_oss", "int4-g32", "bf16", [64, 17, 2, 1]),  # by experts, behind a sink
        ]
    ),
)
def test_a_prompts_rows_have_a_steps_bits_in_chunks_of_any_size(family, weights, kv, sizes, tmp_path):
    """So a prefix that is found equals one that is computed, whatever is left of a prompt."""
    write_checkpoint(tmp_path, family, layers=1, **SMALL)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32", weights=weights, kv=kv))
    token_ids = ids(sum(sizes))
    whole = logits(engine, by_kernels(engine.model), token_ids, [sum(sizes)])
    assert torch.equal(logits(engine, by_kernels(engine.model), token_ids, sizes), whole)


def test_blocks_that_the_host_computes_stand_between_ours(tmp_path):
    """Of a device that is not a device of ours, as a block on the host is to one on a card."""
    write_checkpoint(tmp_path, "llama", layers=3, **SMALL)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", weights="fp32"))
    token_ids = ids(30)
    expected = logits(engine, by_operators(engine.model), token_ids, [30])

    class Other(GpuProgram):
        def _stages(self):  # type: ignore[no-untyped-def]
            for index, run in enumerate(super()._stages()):
                yield replace(run, is_ours=run.is_ours and index not in (2, 3))

    step = Other(engine.model)
    runner = by_kernels(engine.model)
    runner.gpu_program = step
    assert [run.is_ours for run in step._runs] == [False, True, False, False, True]
    assert not step.is_whole
    assert error(logits(engine, runner, token_ids, [27, 3]), expected) < EXACT


def test_attention_whose_pages_are_elsewhere_is_left_to_operators(engine, monkeypatch):
    """In a forward of a prompt, as where the host computes some layers' steps; the other layers are ours."""
    token_ids, homes = ids(24), PagedKV.homes
    expected = logits(engine, by_operators(engine.model), token_ids, [24])
    ours: list[int] = []

    def elsewhere(kv: PagedKV) -> list[tuple[torch.device, int]]:
        there = list(homes.__get__(kv))
        return [there[0], (torch.device("meta"), there[1][1]), *there[2:]]

    def counted(body: Attention, *rest: Any) -> Tensor:
        ours.append(body.layer)
        return mixed(body, *rest)

    mixed = gpu_block._mixed
    monkeypatch.setattr(PagedKV, "homes", property(elsewhere))
    monkeypatch.setattr(gpu_block, "_mixed", counted)
    assert error(logits(engine, by_kernels(engine.model), token_ids, [20, 4]), expected) < EXACT
    layers = [layer for layer in range(engine.model.config.num_layers) if layer != 1]
    assert ours == layers * 2


def texts(engine: Engine, requests: list[SamplingParams], prompts: list[list[int]]) -> list[list[int]]:
    answers: dict[int, list[int]] = {
        engine.submit(Request(tuple(prompt), sampling)): [] for prompt, sampling in zip(prompts, requests, strict=True)
    }
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                answers[event.request_id].append(event.token_id)
            if isinstance(event, FinishedEvent):
                assert event.finish_reason == "length", event.error
    return list(answers.values())


def sampling(temperature: float, max_tokens: int = 5, **rest: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=7, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("wish", every_other([sampling(1.5, min_p=0.05), sampling(0), sampling(0.9, top_k=5)]))
def test_an_engine_draws_the_tokens_that_the_host_would_draw(engine, llama, wish):
    host = Engine.load(llama, EngineConfig(device="cpu", weights="fp32"))
    assert texts(engine, [wish], [ids(5)]) == texts(host, [wish], [ids(5)])


@pytest.mark.slow
def test_requests_that_come_and_go_do_not_change_each_others_tokens(engine):
    """Steps that were begun ahead are dropped where a prompt, or the end of another answer, comes between."""
    wishes, prompts = [sampling(0, 2), sampling(0, 5), sampling(0.9, 3)], [ids(n, seed=n) for n in (3, 17, 6)]
    alone = [texts(engine, [wish], [prompt])[0] for wish, prompt in zip(wishes, prompts, strict=True)]
    assert texts(engine, wishes, prompts) == alone


def test_the_next_step_is_begun_before_its_token_is_known(llama, monkeypatch):
    """INT8 weights, whose embedding our kernel looks up: the host need not see a token for the next one."""
    engine = Engine.load(llama, EngineConfig(device="cpu", dtype="fp32", weights="int8", speculate="off"))
    expected = texts(engine, [sampling(0, 4)], [ids(10)])
    assert engine.runner.gpu_program is None
    engine.runner.cpu_program, engine.runner.gpu_program = None, GpuProgram(engine.model)
    assert engine.runner.gpu_program.is_whole
    begun, draw = [], GpuProgram.draw

    def counted(step: GpuProgram, batch: Batch, draws: list[Draw], previous: Tensor | None = None) -> Drawn:
        begun.append(previous is not None)
        return draw(step, batch, draws, previous)

    monkeypatch.setattr(GpuProgram, "draw", counted)
    assert texts(engine, [sampling(0, 4)], [ids(10)]) == expected
    assert begun == [False, True, True]  # the first token is drawn from the prompt's logits


def test_a_step_that_was_begun_ahead_serves_no_other(engine):
    kvs, draws = [engine.residency.new_kv(20) for _ in range(2)], [PlainDraw(1, 0.9, 0.0), PlainDraw(2, 0.9, 0.0)]
    for kv in kvs:
        kv.prepare(5)
        kv.advance(5)
    ahead = Ahead(kvs, [5, 5], draws, drawn=None, last_ids=[7, 8])  # type: ignore[arg-type]
    assert ahead.is_of(kvs, [7, 8], draws)
    assert not ahead.is_of(kvs[::-1], [7, 8], draws) and not ahead.is_of(kvs[:1], [7], draws[:1])
    assert not ahead.is_of(kvs, [7, 9], draws) and not ahead.is_of(kvs, [7, 8], draws[::-1])
    kvs[1].prepare(6)
    kvs[1].advance(1)
    assert not ahead.is_of(kvs, [7, 8], draws)


def test_a_request_that_is_aborted_leaves_the_pages_as_they_must_be(engine):
    request_id = engine.submit(Request(tuple(ids(10)), sampling(0, 50)))
    for _ in range(4):
        engine.step()
    engine.abort(request_id)
    while engine.has_work:
        engine.step()
    check_pages(engine.residency.kv_pages)


def test_logits_that_are_no_numbers_end_the_request_with_an_error(engine):
    body = engine.model.blocks[1].body
    next(iter(body.linears[0].tensors.values()))[0, 0] = torch.nan
    request_id = engine.submit(Request(tuple(ids(10)), sampling(0, 5)))
    finished = [event for event in engine.step() if isinstance(event, FinishedEvent)]
    assert finished[0].request_id == request_id and "NaN" in str(finished[0].error)


def test_a_kernel_that_fails_leaves_its_work_to_operators(llama, monkeypatch):
    """With one line that says so; the text is the same."""
    engine = Engine.load(llama, EngineConfig(device="cpu", weights="fp32"))
    expected = texts(engine, [sampling(0.9)], [ids(20)])
    for broken in ("localllm.layers.gpu_block.rope_store", "localllm.models.gpu_program.sample.sample"):
        said: list[str] = []
        engine.runner.gpu_program, engine.runner._note = GpuProgram(engine.model), said.append
        with monkeypatch.context() as patch:
            patch.setattr(broken, lambda *_: (_ for _ in ()).throw(RuntimeError("out of resource: shared memory")))
            assert texts(engine, [sampling(0.9)], [ids(20)]) == expected
        assert len(said) == 1 and "RuntimeError: out of resource: shared memory" in said[0]
        assert engine.runner.gpu_program is None
