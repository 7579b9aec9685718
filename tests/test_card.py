"""A machine with a GPU from the outside, a CPU standing in for it: what is planned is what is loaded and obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from localllm import Engine, SamplingParams
from localllm.engine import card, device, loader, memory, model_options, model_plan, planner
from localllm.errors import DoesNotFitError
from localllm.offload.planner import plan as plan_module
from localllm.offload.planner.machine import CardMemory, Memory
from localllm.offload.planner.plan import GIB, Plan
from localllm.offload.planner.profile import DeviceRates, FormatRates, Profile
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.cli_support import run_cli
from tests.engine_support import token_ids
from tests.packed_support import small_checkpoint

CONTEXT = 1000
PROMPT = tuple(range(3, 45))
SAMPLING = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def stand_in(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for a card of 80 GiB, with a machine around it whose rates are known."""
    rates = dict.fromkeys(RECIPES, FormatRates(45.0, 1200.0, 0))
    fast = dict.fromkeys(RECIPES, FormatRates(400.0, 40_000.0, 1000))
    known = DeviceRates(800.0, 24.0, 24.0, 0.0, 0.0, 1e-9, CONTEXT, fast)
    profile = Profile("this machine", 45.0, 3.0, formats=rates, device=known)

    def card_memory(_device: object, vram: int | None, found: DeviceRates, workspace: int, _graphs: int) -> CardMemory:
        return CardMemory(vram or 80 * GIB, found.context_bytes, workspace, 80 * GIB, 80 * GIB)

    for module in (card, planner, model_plan):
        monkeypatch.setattr(module, "kept_profile", lambda: profile)
    for module in (device, loader, model_options, planner):
        monkeypatch.setattr(module, "has_card", lambda _device: True)
    most = 32 * GIB
    monkeypatch.setattr(planner, "process_memory", lambda cap, *_, **__: Memory(cap or most, 1000, most, most))
    monkeypatch.setattr(card, "card_memory", card_memory)
    monkeypatch.setattr(plan_module, "_CAP_STEP_BYTES", 1 << 20)  # these models are smaller than the step of a cap
    monkeypatch.setattr(loader, "cap_allocator", lambda _device, _card, _graph_bytes: None)


@pytest.fixture(params=["llama", "gemma2"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path, request.param)


def answer(directory: Path, **options: object) -> tuple[list[int], Engine]:
    engine = Engine.load(directory, EngineConfig(device="cpu", ctx=128, **options))  # type: ignore[arg-type]
    _, again = (token_ids(engine.generate(PROMPT, SAMPLING)) for _ in range(2))
    engine.close()
    return again, engine


@pytest.mark.parametrize("weights", ["fp32", "int4-g32", "int8"])
def test_under_any_cap_the_text_is_that_of_the_whole_model(directory: Path, weights: str) -> None:
    expected, whole = answer(directory, weights=weights, dtype="fp32")
    assert whole.plan is not None and whole.plan.is_whole and whole.plan.fast == "vram"
    least = _least(directory, weights)
    most = whole.plan.total_bytes("vram")
    kinds = set()
    for step in range(6):
        vram = least + step * (most - least) // 6
        text, engine = answer(directory, weights=weights, dtype="fp32", vram=vram)
        assert engine.plan is not None and engine.plan.total_bytes("vram") <= vram
        kinds |= {(block.tier, block.exec) for block in engine.plan.blocks[1:]}
        assert text == expected
    assert ("vram", "gpu") in kinds and len(kinds) > 1


def _least(directory: Path, weights: str) -> int:
    """The smallest cap, as the refusal of a smaller one names it."""
    with pytest.raises(DoesNotFitError) as caught:
        answer(directory, weights=weights, vram=CONTEXT)
    flag, amount = caught.value.fix.split()
    assert flag == "--vram" and amount.endswith("MiB")
    return int(amount.removesuffix("MiB")) << 20


def test_where_the_hosts_memory_is_short_too_blocks_come_from_the_disk(directory: Path) -> None:
    vram = _least(directory, "int8") + (1 << 20)  # room for keys and values, not for a block
    expected, roomy = answer(directory, weights="int8", vram=vram)
    assert roomy.plan is not None and not roomy.plan.streamed
    mlp = roomy.plan.shape.blocks[1].num_bytes
    needed = roomy.plan.total_bytes("ram") - roomy.plan.ledger["ram"]["kept pages"]
    for fewer in (1, 2):
        text, engine = answer(directory, weights="int8", vram=vram, ram=needed - fewer * mlp)
        assert engine.plan is not None and engine.plan.streamed
        assert text == expected


def test_the_plan_of_a_card_shows_both_memories_and_where_blocks_are() -> None:
    out = run_cli("plan", "llama-3.1-8b", "--vram", "4GiB", "--weights", "int4", "--ctx", "4096").out.decode()
    for piece in ("GPU memory", "4.0 GiB", "memory ", "context", "workspace", "on the GPU", "in memory,", "--vram"):
        assert piece in out, out
    plan = run_cli("plan", "llama-3.1-8b", "--vram", "4GiB", "--weights", "int4", "--ctx", "4096", "--json").json
    assert plan["fits"] and plan["bound_by"] in ("link", "memory")
    assert sum(plan["ledger"]["vram"].values()) <= plan["limits"]["vram"] == 4 * GIB
    assert {block["exec"] for block in plan["blocks"]} >= {"gpu", "cpu"}


def test_a_cap_too_small_for_two_blocks_names_the_smallest_that_would_do() -> None:
    result = run_cli("plan", "llama-3.1-8b", "--vram", "100MiB", "--weights", "int4")
    assert result.code == 4 and "the GPU's memory" in result.err
    least = result.err.split("--vram ")[1].split()[0]
    assert run_cli("plan", "llama-3.1-8b", "--vram", least, "--weights", "int4").code == 0


def test_a_device_that_is_full_is_one_error(directory: Path) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB")
    refused = pytest.raises(DoesNotFitError, match="the memory ran out")
    with mock.patch.object(card, "device_measured", side_effect=full), refused:
        answer(directory)


def test_blocks_come_and_go_as_other_programs_leave_and_take_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two answers of one engine, without a reload."""
    free_bytes = 80 * GIB

    def card_memory(_device: object, _cap: object, found: DeviceRates, workspace: int, _graphs: int) -> CardMemory:
        return CardMemory(free_bytes, found.context_bytes, workspace, free_bytes, 80 * GIB)

    least = _least(directory, "int8")
    monkeypatch.setattr(card, "card_memory", card_memory)
    monkeypatch.setattr(plan_module, "_CAP_STEP_BYTES", 1 << 20)  # these models are smaller than the step of a cap
    monkeypatch.setattr(memory, "reachable_bytes", lambda _device: free_bytes)
    monkeypatch.setattr(memory, "_MUCH_BYTES", 1)
    engine = Engine.load(directory, EngineConfig(device="cpu", ctx=128, weights="int8", dtype="fp32"))
    assert engine.plan is not None and engine.residency.placed is not None
    most = engine.plan.total_bytes("vram")
    answers, kept = [], []
    for free_bytes in (80 * GIB, least, (least + most) // 2, 80 * GIB, CONTEXT, 80 * GIB):  # noqa: B007, what is free
        answers.append(token_ids(engine.generate(PROMPT, SAMPLING)))
        kept.append(sum(block.tier == "vram" for block in engine.residency.placed.blocks))
        obeyed = engine.residency.plan
        assert obeyed is not None and list(obeyed.blocks) == list(engine.residency.placed.blocks)
        limits = engine.scheduler.limits
        assert limits.kv_tokens == obeyed.most_kv_tokens + obeyed.sequences * limits.sequence_tokens
    assert kept[1] < kept[2] < kept[0] == kept[3] == kept[4] == kept[5]  # where nothing fits it stays as it is
    assert all(answer == answers[0] for answer in answers) and len(answers[0]) == 8
    engine.close()


@dataclass
class Seen:
    """A card's memory as the engine looks at it. used_by_others: as NVML tells; None where it does not."""

    free: int = 40 * GIB
    used_by_others: int | None = None
    plans: int = 0


@pytest.fixture
def watched(
    request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Seen]]:
    """An engine, and how often it has planned anew. The parameter: what NVML tells of other programs."""
    seen = Seen(used_by_others=getattr(request, "param", None))
    monkeypatch.setattr(memory, "reachable_bytes", lambda _device: seen.free)
    monkeypatch.setattr(memory, "others_bytes", lambda _device: seen.used_by_others)
    engine = Engine.load(directory, EngineConfig(device="cpu", ctx=128, weights="int8", dtype="fp32"))
    plan_anew = engine.residency._replan
    assert plan_anew is not None

    def counted() -> Plan:
        seen.plans += 1
        return plan_anew()

    monkeypatch.setattr(engine.residency, "_replan", counted)
    yield engine, seen
    engine.close()


def test_a_plan_that_changes_nothing_keeps_what_runs_the_model(watched: tuple[Engine, Seen]) -> None:
    """And with it the graphs that it has captured."""
    engine, seen = watched
    expected, runner = token_ids(engine.generate(PROMPT, SAMPLING)), engine.runner
    seen.free += 4 * GIB
    assert token_ids(engine.generate(PROMPT, SAMPLING)) == expected
    assert seen.plans == 1 and engine.runner is runner


def test_what_an_engine_takes_itself_is_no_other_program(watched: tuple[Engine, Seen]) -> None:
    """Kernels that are loaded as the model is prepared, or when they are first used."""
    engine, seen = watched
    seen.free -= GIB
    engine.residency.warm_up(lambda _text: None)
    for _ in range(6):
        events = engine.generate(PROMPT, SAMPLING)
        next(events)
        seen.free -= 200 << 20
        assert list(events)
    assert seen.plans == 0
    seen.free -= GIB
    token_ids(engine.generate(PROMPT, SAMPLING))
    assert seen.plans == 1


@pytest.mark.parametrize("watched", [2 * GIB], indirect=True)
def test_the_driver_is_asked_who_has_taken_memory(watched: tuple[Engine, Seen]) -> None:
    engine, seen = watched
    assert seen.used_by_others is not None
    engine.residency.warm_up(lambda _text: None)
    for taken_by_others, plans in ((0, 0), (GIB, 1), (0, 1), (100 << 20, 1), (-GIB, 2)):
        seen.free -= GIB
        seen.used_by_others += taken_by_others
        token_ids(engine.generate(PROMPT, SAMPLING))
        assert seen.plans == plans


@pytest.mark.parametrize(("own", "expected"), [(3 * GIB, 2 * GIB), (None, None)])
def test_what_others_use_is_known_where_the_driver_tells_what_this_process_does(
    own: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not under Windows, nor in a container."""
    told = SimpleNamespace(own_bytes=own, used_by_others_bytes=2 * GIB if own else 5 * GIB)
    monkeypatch.setattr(memory, "gpu", lambda _device: told)
    assert memory.others_bytes(torch.device("cuda")) == expected
    monkeypatch.setattr(memory, "gpu", lambda _device: None)
    assert memory.others_bytes(torch.device("cuda")) is None


def test_a_plan_made_anew_does_not_count_the_hosts_blocks_twice(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process holds them while the plan is made."""
    vram = _least(directory, "int8") + (1 << 20)
    _, roomy = answer(directory, weights="int8", vram=vram)
    assert roomy.plan is not None
    engine = Engine.load(
        directory, EngineConfig(device="cpu", ctx=128, weights="int8", vram=vram, ram=roomy.plan.total_bytes("ram"))
    )
    placed = engine.residency.placed
    assert placed is not None and placed.host_bytes == roomy.plan.ledger["ram"]["weights"]
    start = placed.blocks
    held = 1000 + placed.host_bytes
    monkeypatch.setattr(planner, "process_memory", lambda cap, *_, **__: Memory(cap, held, 32 * GIB, 32 * GIB))
    monkeypatch.setattr(memory, "_MUCH_BYTES", 0)
    assert list(engine.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0)))
    assert placed.blocks == start
    engine.close()


def test_too_little_memory_beside_the_card_names_the_smallest_that_would_do() -> None:
    flags = ("plan", "llama-3.1-8b", "--vram", "3GiB", "--weights", "int4")
    result = run_cli(*flags, "--ram", "300MiB")
    assert result.code == 4 and "does not fit into 300.0 MiB of memory beside the GPU" in result.err
    least = result.err.split("--ram ")[1].split()[0]
    assert run_cli(*flags, "--ram", least).code == 0


def test_a_plan_beside_a_running_model_leaves_the_cap_on_its_allocator_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fractions = [0.25]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: fractions.append(share))
    with pytest.raises(RuntimeError), card.uncapped_allocator(torch.device("cuda")):
        raise RuntimeError("out of memory while it was measured")
    assert fractions == [0.25, 1.0, 0.25]
