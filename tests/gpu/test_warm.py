"""Whether the first prompts find compiled whatever they launch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from localllm.cache.kv_format import KVFormat
from localllm.cache.paged_kv import PagedKV
from localllm.engine import engine as engine_module
from localllm.engine.engine import Engine
from localllm.engine.kernel_check import scope_of
from localllm.engine.loader import Watcher
from localllm.engine.runner import ModelRunner
from localllm.engine.sampler import PlainDraw
from localllm.engine.step_types import Chunk
from localllm.kernels.gpu import product
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.sizes import RouterConfig
from localllm.models.families import load_config
from localllm.models.gpu_program import GpuProgram
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.kv_support import check_pages
from tests.thinning import every_other
from tools.check_kernels import variant


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The variants of kernels that are launched; nothing is computed."""
    variants: set[str] = set()
    monkeypatch.setattr(KernelLaunch, "run", lambda launch: variants.add(variant(launch)))
    monkeypatch.setattr(product, "dispatch_for", lambda _device: Dispatch(multiprocessors=64))
    return variants


@pytest.mark.parametrize("kv", every_other(["int8", "bf16"]))
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen2-layer-types",
        "gemma3-scaled-and-capped",
        "phi3-longrope",
        "qwen2_moe-some-dense",
        "qwen3_5",
        "kimi_linear",
    ],
)
def test_prompts_and_steps_launch_nothing_that_is_new(family: str, kv: str, tmp_path: Path, launched: set[str]) -> None:
    """Windows, of several groups of layers, RoPE by the length of a sequence, mixtures, states; dense, and INT4."""
    write_checkpoint(tmp_path, family, **({"moe_intermediate_size": 48} if "moe" in family else {}))
    weights = "int4-g32" if kv == "int8" else "bf16"
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="bf16", weights=weights, kv=kv))
    runner = ModelRunner(engine.model)
    runner.cpu_program, runner.gpu_program = None, GpuProgram(engine.model)
    runner._gpu_prefill = runner.gpu_program
    runner.warm_up(engine.residency.new_kv)
    warm = set(launched)
    assert len(warm) > 20 if kv == "int8" else len(warm) > 10
    launched.clear()
    draw = PlainDraw(1, 0.9, 0.0)
    for prompt in (1, 2, 5, 16, 17, 33, 64, 65, 130, 300):
        token_ids = [1] * (prompt + 1)
        kvs = [engine.residency.new_kv(prompt + 1) for _ in range(4)]
        for cache in kvs:
            runner.forward([Chunk(token_ids, cache, prompt)])
        for some in (kvs[:1], kvs[1:]):
            runner.draw([Chunk(token_ids, cache, 1) for cache in some], [draw] * len(some), goes_on=False)
        for cache in kvs:
            cache.close()
    assert len(launched) > 10 and launched - warm == set()
    engine.close()


def test_a_load_prepares_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3")
    prepared: list[KVFormat] = []

    def warm_up(_runner: ModelRunner, new_kv: Callable[[int], PagedKV]) -> None:
        with closing(new_kv(100)) as kv:
            prepared.append(kv.pages.format)

    monkeypatch.setattr(ModelRunner, "warm_up", warm_up)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="bf16", kv="bf16"))
    assert [kv_format.name for kv_format in prepared] == ["bf16"]
    engine.close()


def test_a_load_has_the_models_own_ways_checked_and_tells_how_far_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "qwen3")
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(engine_module, "note_device", lambda *arguments: asked.append(arguments))
    watcher = Watcher(measuring=lambda _text: None, noting=lambda _text: None)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", weights="int8", kv="int8"), watcher=watcher)
    scope = scope_of(engine.model.config, RECIPES["int8"], "int8", torch.bfloat16)
    assert asked == [(torch.device("cpu"), [scope], watcher.measuring, watcher.noting)]
    engine.close()


def test_the_routers_of_a_model_are_among_what_is_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm4_moe-groups", moe_intermediate_size=48)  # whole tiles
    config = load_config(tmp_path)
    (router,) = json.loads(scope_of(config, RECIPES["int8"], "int8", torch.bfloat16).arguments[1])["routers"]
    assert RouterConfig(**router) == config.mixtures[0].router
    assert "routers" not in json.loads(scope_of(config, RECIPES["bf16"], "int8", torch.bfloat16).arguments[1])


def test_a_load_that_finds_no_memory_to_prepare_in_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that meets a kernel that fails has operators compute, and says so."""
    write_checkpoint(tmp_path, "llama")
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", weights="fp32"))
    for error, is_given_up in ((torch.OutOfMemoryError("no memory"), False), (RuntimeError("no such kernel"), True)):
        said: list[str] = []
        runner = ModelRunner(engine.model, note=said.append)
        runner.gpu_program = GpuProgram(engine.model)

        def fails(_launch: KernelLaunch, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(KernelLaunch, "run", fails)
            runner.warm_up(engine.residency.new_kv)
        assert (runner.gpu_program is None) == is_given_up and len(said) == is_given_up
    check_pages(engine.residency.kv_pages)
    engine.close()
