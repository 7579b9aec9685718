"""Where blocks rest changes no token: whatever stays, whatever comes from the disk, and in whatever portions."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm import Engine, EngineThread, Request, SamplingParams
from localllm.engine import placement, planner
from localllm.engine.placement import model_shape
from localllm.engine.step_types import Limits
from localllm.errors import CheckpointError, ContextOverflowError, DoesNotFitError, UsageError
from localllm.models.families import load_config
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.model_shape import ModelShape
from localllm.offload.planner.plan import Plan
from localllm.offload.planner.profile import FormatRates, Profile
from localllm.offload.planner.search import Search
from localllm.quant.dense import dense_name
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.engine_support import answered, generated, token_ids
from tests.packed_support import small_checkpoint
from tests.patience import PATIENCE_S
from tests.thinning import one_in, thinned

FAMILIES = thinned(["llama", "qwen2", "gemma2"], {"llama", "gemma2"}.__contains__)
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16, "int8": torch.float32}
PROMPT = tuple(range(3, 63))


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def with_small_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of a machine whose rates are known; what these models are packed into is nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        rates = Profile("this machine", disk_read_gbs=1.0, formats=dict.fromkeys(RECIPES, FormatRates(20.0, 500.0)))
        patch.setattr(planner, "kept_profile", lambda: rates)
        # So that what is computed at once does not outweigh these small models.
        patch.setattr(placement, "BATCH_ROWS", 8)
        yield


small_models = pytest.fixture(scope="module", autouse=True)(with_small_models)


def shape_of(directory: Path, weights: str) -> ModelShape:
    recipe = RECIPES["int4-g64" if weights == "int4" else weights]
    return model_shape(load_config(directory), recipe, dense_name(WEIGHTS[weights]), "it")


@contextmanager
def engine(
    directory: Path,
    weights: str,
    memory_bytes: int | None = None,
    most_bytes: int | None = None,
    limits: Limits | None = None,
    **options: int,
) -> Iterator[Engine]:
    """With so much memory for the model alone; as much as there is without it. most_bytes: that the machine has."""
    dtype = "fp32" if WEIGHTS[weights] is torch.float32 else "bf16"
    with pytest.MonkeyPatch.context() as patch:
        if memory_bytes is not None:
            memory = Memory(memory_bytes, 0, most_bytes or memory_bytes)
            patch.setattr(planner, "process_memory", lambda *_, **__: memory)
            # What packing takes is a thousand times what such a model does.
            patch.setattr(planner, "as_stored", lambda _files, _name, config, _weights: (config, None))
        config = EngineConfig(device="cpu", weights=weights, dtype=dtype, **options)  # type: ignore[arg-type]
        loaded = Engine.load(directory, config, limits=limits)
    try:
        yield loaded
    finally:
        loaded.close()


def tokens(engine: Engine, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> list[int]:
    return generated(engine, prompt, 8, **sampling)


@pytest.mark.parametrize("weights", one_in(3, WEIGHTS))
def test_whatever_is_streamed_the_text_is_the_same(directory: Path, weights: str) -> None:
    """Under caps from the least that the model runs in to where all of it fits."""
    shape = shape_of(directory, weights)
    least = Search(shape, Machine(Memory(1, 0, 1), Rates(1, 1, 1)), 128).least_ram_bytes()
    with engine(directory, weights, ctx=128) as whole:
        assert whole.plan is not None and not whole.plan.streamed
        expected = tokens(whole), tokens(whole, temperature=0.9, seed=7)
    amounts = set()
    for step in range(6):
        with engine(directory, weights, least + step * shape.num_bytes // 5, ctx=128) as capped:
            assert capped.plan is not None
            amounts.add(len(capped.plan.streamed))
            assert (tokens(capped), tokens(capped, temperature=0.9, seed=7)) == expected
    assert max(amounts) >= 4 and 0 in amounts and len(amounts) > 2


def least_of(directory: Path, weights: str, ctx: int = 128) -> int:
    return Search(shape_of(directory, weights), Machine(Memory(1, 0, 1), Rates(1, 1, 1)), ctx).least_ram_bytes()


def test_less_than_the_least_is_refused_with_what_would_do(directory: Path) -> None:
    least = least_of(directory, "int4")
    with pytest.raises(DoesNotFitError) as caught, engine(directory, "int4", least - 1, ctx=128):
        pytest.fail("it was loaded")
    assert "largest block" in caught.value.why
    with engine(directory, "int4", least, ctx=128) as loaded:
        assert loaded.plan is not None and loaded.plan.streamed


def test_a_prompt_that_is_too_long_is_refused_with_the_cap_that_its_context_takes(directory: Path) -> None:
    least, most = least_of(directory, "int4"), 1 << 30
    enough = r"--ctx \d+ --ram \d+MiB(, or --ctx \d+ --kv int4)?"
    for machine, fix in ((most, enough), (least, r"shorten the prompt|--ctx \d+ --kv int4")):
        with engine(directory, "int4", least, machine, ctx=128) as loaded:
            with pytest.raises(ContextOverflowError) as caught:
                loaded.check(Request((1,) * 200, SamplingParams()))
            assert re.fullmatch(fix, caught.value.fix), caught.value.fix


def test_blocks_that_were_moved_on_purpose_stay_where_they_are(directory: Path) -> None:
    with engine(directory, "int4", ctx=128) as loaded:
        assert loaded.plan is not None
        expected = tokens(loaded)
        down = [replace(block, tier="disk") for block in loaded.plan.blocks]
        down[0], down[5] = loaded.plan.blocks[0], loaded.plan.blocks[5]
        loaded.residency.move(down)
        assert tokens(loaded) == expected
        assert len(loaded.model.stream.names) == len(down) - 2  # type: ignore[attr-defined]


def test_answers_side_by_side_are_those_that_each_has_alone(directory: Path) -> None:
    prompts = [PROMPT[:n] for n in (5, 17, 1, 30)]
    least = least_of(directory, "int4") + 3 * 64 * shape_of(directory, "int4").kv_bytes_per_token
    with engine(directory, "int4", least, ctx=128, limits=Limits(max_sequences=4)) as loaded:
        alone = [tokens(loaded, prompt) for prompt in prompts]
        greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        together = answered(loaded, *(Request(prompt, greedy) for prompt in prompts))
        assert [heard.token_ids for heard in together] == alone


def test_a_request_that_is_stopped_in_the_middle_leaves_the_next_one_right(directory: Path) -> None:
    with engine(directory, "int4", ctx=128) as whole:
        expected = tokens(whole)
    with engine(directory, "int4", least_of(directory, "int4"), ctx=128) as capped:
        service = EngineThread(lambda: capped)
        for count in range(4):
            stream = service.submit(Request(PROMPT, SamplingParams(temperature=0, ignore_eos=True)))
            for seen, _event in enumerate(stream):
                if seen == count:
                    stream.abort()
        stream = service.submit(Request(PROMPT, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))
        assert token_ids(stream) == expected
        service.close()


def block_file(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(f"{name}.safetensors")
    return path


def test_a_block_that_is_damaged_ends_the_answer_with_its_file_and_the_engine_goes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    with engine(directory, "int4", ctx=128) as whole:
        expected = tokens(whole)
    path = block_file(tmp_path, "layers.0.mlp")
    whole_bytes = path.read_bytes()
    with engine(directory, "int4", least_of(directory, "int4"), ctx=128) as capped:
        assert capped.plan is not None and "layers.0.mlp" in capped.plan.streamed
        damaged = bytearray(whole_bytes)
        damaged[5000] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp") as caught:
            for _ in range(3):
                tokens(capped)
        assert caught.value.fix.startswith("localllm quantize")
    path.write_bytes(whole_bytes)
    with engine(directory, "int4", least_of(directory, "int4"), ctx=128) as capped:
        os.truncate(path, 4096)
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp"):
            for _ in range(3):
                tokens(capped)
        path.write_bytes(whole_bytes)
    with engine(directory, "int4", least_of(directory, "int4"), ctx=128) as capped:
        assert tokens(capped) == expected


def test_a_cap_for_a_gpu_is_refused_where_none_is_used(directory: Path) -> None:
    with pytest.raises(UsageError, match="--vram"), engine(directory, "int4", vram=8 << 30):
        pytest.fail("it was loaded")


def test_a_cap_beyond_the_machine_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="more than this machine has"), engine(directory, "int4", ram=1 << 50):
        pytest.fail("it was loaded")


def test_a_closed_engine_leaves_no_file_and_no_thread_behind(directory: Path) -> None:
    with engine(directory, "int4", ctx=128) as whole:
        tokens(whole)
    before = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    with engine(directory, "int4", least_of(directory, "int4"), ctx=128) as capped:
        tokens(capped)
        assert threading.active_count() > before[0]
        stream = capped.model.stream
    for reader in stream._readers:  # type: ignore[attr-defined]
        reader.join(PATIENCE_S)
    assert (threading.active_count(), len([*Path("/proc/self/fd").iterdir()])) == before


def test_the_plan_accounts_for_every_byte(directory: Path) -> None:
    with engine(directory, "int4", least_of(directory, "int4") + 30_000, ctx=128) as capped:
        plan = capped.plan
        assert isinstance(plan, Plan)
        resident = sum(block.num_bytes for block in plan.blocks if block.tier == "ram")
        assert plan.ledger["ram"]["weights"] == resident
        assert plan.total_bytes("disk") + resident == plan.shape.num_bytes
        assert plan.total_bytes("ram") <= plan.limits["ram"]
        assert plan.ledger["ram"]["kv"] == plan.shape.kv_bytes(128)
