"""The plan: nothing beyond its limits, nothing faster left undone, and predictions that learn."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.chat import plan_text
from localllm.chat.plan_text import hybrid
from localllm.config import format_bytes, format_figure
from localllm.engine import model_plan, planner
from localllm.engine.model_plan import consider
from localllm.engine.placement import model_shape
from localllm.errors import DoesNotFitError, Fix, UsageError
from localllm.models.families import parse_config
from localllm.models.shapes import Shape, find_shape, shipped_shapes
from localllm.offload.planner.advice import advise, fixes_for_context, other_model
from localllm.offload.planner.calibration import Corrections, Term
from localllm.offload.planner.costs import POOLED_BLOCK_S, RUN_S, Costs, Work
from localllm.offload.planner.hit_curve import HitCurve
from localllm.offload.planner.host_placements import LOGIT_ROWS
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.model_shape import BlockShape, ModelShape, Packing
from localllm.offload.planner.plan import GIB, JobShape, Plan, cap
from localllm.offload.planner.profile import UNKNOWN_DISK_GBS, FormatRates, Profile, Taken, keep, kept_profile
from localllm.offload.planner.search import RESIDENT_STEP, Search
from localllm.offload.streaming.expert_uses import BINS
from localllm.offload.streaming.ring import ALIGN_BYTES, ring_bytes
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig, parse_bytes
from tests.cli_support import run_cli

RATES = Rates(matrix_gbs=40.0, compute_gops=1200.0, disk_gbs=1.5)
PAGE = 4096


def shape(layers: int = 4, attention: int = 2, mlp: int = 7, head: int = 9, embed: int = 9) -> ModelShape:
    """Sizes in pages."""
    kinds = itertools.cycle((("attention", attention), ("mlp", mlp)))
    blocks = [
        BlockShape(f"layers.{index // 2}.{name}", pages * PAGE, pages * 10_000)
        for index, (name, pages) in zip(range(2 * layers), kinds, strict=False)
    ]
    return ModelShape(
        name="it",
        weights="int4-g64",
        kv="bf16",
        embed=BlockShape("embed", embed * PAGE, 0),
        blocks=tuple(blocks),
        head=BlockShape("head", head * PAGE, 90_000),
        kv_bytes_per_token=64,
        default_ctx=1024,
        row_bytes=100,
        state_bytes=16,
        logits_bytes=128,
        batch_rows=(64, 8),
    )


def search(it: ModelShape, ram_bytes: int, ctx: int | None = None, job: JobShape | None = None) -> Search:
    return Search(it, Machine(Memory(ram_bytes, 1000, 1 << 40, 1 << 40), RATES), ctx, job)


def large(**changes: Any) -> ModelShape:
    return replace(shape(layers=20, mlp=400), **changes)


def costs(
    it: ModelShape, rates: Rates, disk_bytes: int, runs: int, pass_tokens: int, corrections: Corrections | None = None
) -> Costs:
    work = Work(it.block_bytes + it.lm_head.num_bytes, disk_bytes, runs)
    return Costs(it, rates, None, work, pass_tokens, corrections or Corrections())


shapes = st.builds(
    shape,
    st.integers(1, 7),
    attention=st.integers(1, 9),
    mlp=st.integers(1, 9),
    head=st.integers(1, 20),
    embed=st.integers(1, 20),
)


def check(plan: Plan, ram_bytes: int) -> None:
    names = [plan.shape.embed.name, *(block.name for block in plan.shape.blocks), plan.shape.head.name]
    assert [block.name for block in plan.blocks] == names
    assert plan.total_bytes("ram") <= ram_bytes == plan.limits["ram"]
    kept = sum(block.num_bytes if block.tier == "ram" else block.held_bytes for block in plan.blocks)
    assert plan.ledger["ram"].get("weights", 0) + plan.ledger["ram"].get("experts", 0) == kept
    assert plan.total_bytes("disk") == plan.shape.num_bytes - kept
    assert plan.ledger["ram"]["kv"] == plan.shape.kv_bytes(plan.kv_tokens, plan.sequences)
    sizes = [block.num_bytes for block in plan.blocks[1:] if block.tier == "disk" and not block.held_bytes]
    assert plan.ring_bytes == ring_bytes(sizes, ALIGN_BYTES) == plan.ledger["ram"].get("staging", 0)
    waiting = plan.pass_tokens * plan.shape.state_bytes if plan.is_streamed else 0
    logits = max(LOGIT_ROWS, 2 * plan.sequences) * plan.shape.logits_bytes
    rows = min(plan.batch_rows, max(plan.kv_tokens, plan.sequences))
    looked_up = 4 * rows * plan.shape.state_bytes if plan.blocks[0].tier == "disk" else 0
    assert plan.ledger["ram"]["activations"] == rows * plan.shape.row_bytes + waiting + logits + looked_up


@given(shapes, st.integers(0, 1_200_000), st.none() | st.integers(1, 1024))
def test_a_plan_stays_within_its_memory_and_there_is_one_from_the_least_on(
    it: ModelShape, ram_bytes: int, ctx: int | None
) -> None:
    wanted = search(it, ram_bytes, ctx)
    try:
        plan = wanted.best()
    except DoesNotFitError as error:
        assert ram_bytes < wanted.least_ram_bytes()
        assert error.fix.split(", or ")[0] == f"--ram {cap(wanted.least_ram_bytes())}"
        return
    assert ram_bytes >= wanted.least_ram_bytes()
    check(plan, ram_bytes)
    assert ctx is None or plan.ctx == ctx


@given(shapes)
def test_at_the_least_as_many_tokens_pass_at_once_as_have_room(it: ModelShape) -> None:
    least = search(it, 0, 1024).least_ram_bytes()
    plan = search(it, least, 1024).best()
    check(plan, least)
    assert not plan.streamed or plan.pass_tokens == plan.batch_rows == 8


@given(shapes, st.integers(0, 1_200_000))
def test_no_other_choice_of_whole_kinds_would_stream_less(it: ModelShape, extra_bytes: int) -> None:
    """Against every count of attention and MLP blocks, with and without the head."""
    wanted = search(it, 0, 128)
    ram_bytes = wanted.least_ram_bytes() + extra_bytes
    plan = search(it, ram_bytes, 128).best()
    fixed = plan.total_bytes("ram") - plan.ledger["ram"].get("weights", 0) - plan.ring_bytes
    attention, mlp = it.blocks[::2], it.blocks[1::2]
    least, embed = plan.streamed_bytes, it.embed.num_bytes if plan.blocks[0].tier == "ram" else 0
    for kept_head, a, m in itertools.product((0, 1), range(len(attention) + 1), range(len(mlp) + 1)):
        kept = a * attention[0].num_bytes + m * mlp[0].num_bytes + kept_head * it.head.num_bytes
        streamed = it.num_bytes - it.embed.num_bytes - kept
        # A ring takes two blocks at most, whatever the order is.
        room = ram_bytes - fixed - embed - kept
        if room >= 2 * max(block.num_bytes for block in (*it.blocks, it.head)) or streamed == 0 <= room:
            assert least <= streamed


def test_what_fits_stays_and_costs_no_reading() -> None:
    plan = search(shape(), 1 << 30).best()
    assert not plan.streamed and plan.ring_bytes == 0 and plan.bound_by == "memory"
    assert plan.ctx == 1024


def test_a_context_that_was_asked_for_is_kept_and_one_that_was_not_gives_way_to_speed() -> None:
    it = large(kv_bytes_per_token=3000, default_ctx=8192)
    ram_bytes = it.num_bytes + 8 * (1 << 20)
    assert search(it, ram_bytes, 8192).best().streamed
    free = search(it, ram_bytes).best()
    assert not free.streamed and free.ctx == 2048


def test_a_conversation_has_room_before_weights_have() -> None:
    it = large(kv_bytes_per_token=3000, default_ctx=8192)
    least = search(it, 0, 2048).least_ram_bytes()
    tight = search(it, least).best()
    assert tight.ctx == 2048 and tight.streamed
    assert search(it, least - 1).best().ctx < 2048


def test_a_job_answers_as_many_at_once_as_give_the_most_tokens() -> None:
    it, job = large(kv_bytes_per_token=3000), JobShape(sequences=32, tokens=100, longest=300)
    ram_bytes = search(it, 0, 300).least_ram_bytes() + (4 << 20)
    plan = search(it, ram_bytes, None, job).best()
    check(plan, ram_bytes)
    alone = search(it, ram_bytes, 300).best()
    assert plan.sequences > 4 and plan.kv_tokens >= plan.sequences * 100
    assert plan.decode_tok_s > 4 * alone.decode_tok_s and plan.ctx >= 300


def test_every_model_of_the_registry_is_planned_in_milliseconds() -> None:
    for name, raw in shipped_shapes().items():
        it = model_shape(parse_config(raw, name), RECIPES["int4-g64"], "bf16", name)
        for gib in (1, 4, 16):
            started = time.process_time()
            try:
                plan = Search(it, Machine(Memory(gib * GIB, 300 << 20, 1 << 40), RATES)).best()
                check(plan, gib * GIB)
            except DoesNotFitError:
                continue
            assert time.process_time() - started < 0.5  # 50 ms on a machine that does nothing else


def test_of_other_models_that_fit_the_largest_is_named_and_of_those_about_as_large_the_fastest() -> None:
    names = ("llama-3.3-70b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-0.6b")
    configs = {name: parse_config(shipped_shapes()[name], name) for name in names}
    too_large, *others = (model_shape(of, RECIPES["int4-g64"], "bf16", name) for name, of in configs.items())
    for gib, largest in ((24, "qwen3-30b-a3b"), (4, "qwen3-0.6b")):
        it = Search(too_large, Machine(Memory(gib * GIB, 300 << 20, 1 << 40), RATES))
        assert other_model(it, others)[0].split()[:3] == ["localllm", "plan", largest]


def test_a_step_takes_the_longest_of_what_goes_on_side_by_side() -> None:
    it = shape()
    read = costs(it, RATES, 3_000_000_000, 50, 2048)
    assert read.decode_s(0) == pytest.approx(2.0 + 50 * RUN_S) and read.bound_by() == "disk"
    slower = Corrections({Term("cpu", "step", "disk"): 1.5})
    assert costs(it, RATES, 3_000_000_000, 0, 2048, slower).decode_s(0) == pytest.approx(3.0)
    assert costs(it, RATES, 3_000_000_000, 0, 2048, slower).prompt_s(8) == pytest.approx(3.0, rel=0.01)
    assert costs(it, RATES, 0, 0, 512).bound_by() == "memory"
    assert costs(it, replace(RATES, compute_gops=1e-3), 0, 0, 512).bound_by(rows=64) == "compute"
    assert replace(read, pass_tokens=8).prompt_s(512) == pytest.approx(
        32 * replace(read, pass_tokens=256).prompt_s(512), rel=0.01
    )
    cached = costs(it, replace(RATES, cached_share=1.0), 3_000_000_000, 50, 2048)
    assert cached.decode_s(0) == costs(it, RATES, 0, 0, 2048).decode_s(0)


@pytest.mark.parametrize("missing", [0.02, 0.3, 1.0])
def test_each_block_waits_for_its_own_missing_experts_and_for_no_others(missing: float) -> None:
    """Simulated: of 8 experts a block each is missing by chance, and read while the others are computed."""
    it = model_shape(parse_config(shipped_shapes()["qwen3-30b-a3b"], "it"), RECIPES["int4-g64"], "bf16", "it")
    rates, size, rng = replace(RATES, matrix_gbs=48.0, disk_gbs=3.7), it.mixtures[0][1].num_bytes, random.Random(0)
    work = Work(it.block_bytes + it.lm_head.num_bytes, missed_bytes=round(missing * it.active_expert_bytes))
    whole, some = (Costs(it, rates, None, each, 64) for each in (replace(work, missed_bytes=0), work))
    some = replace(some, work=replace(work, absent_bytes=it.expert_bytes))
    waits = list[float]()
    for _ in range(40 * 48):
        absent = sum(rng.random() < missing for _ in range(8))
        computed_s = (8 - absent) * size / rates.matrix_gbs / 1e9
        waits.append(max(0.0, absent * size / rates.disk_gbs / 1e9 - computed_s))
    expected = whole.decode_s(0) + sum(waits) / 40 + 48 * POOLED_BLOCK_S
    assert some.decode_s(0) == pytest.approx(expected, rel=0.05)


def test_a_tied_embedding_is_read_and_multiplied_as_a_head_of_its_own_would_be() -> None:
    config = parse_config(shipped_shapes()["llama-3.2-3b"], "it")
    configs = (replace(config, tie_word_embeddings=is_tied) for is_tied in (True, False))
    shapes = (model_shape(config, RECIPES["int8"], "bf16", "it") for config in configs)
    one, other = (costs(it, RATES, 0, 0, 2048) for it in shapes)
    assert one.decode_s(0) == pytest.approx(other.decode_s(0), rel=0.01)
    assert one.prompt_s(1) == pytest.approx(other.prompt_s(1), rel=0.01)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "16MiB"), (1, "16MiB"), ((16 << 20) + 1, "32MiB"), (1 << 30, "1024MiB"), ((1 << 31) + 1, "2.1GiB")],
)
def test_a_cap_is_the_next_round_amount(num_bytes: int, text: str) -> None:
    assert cap(num_bytes) == text


@pytest.mark.parametrize("room", [4000, 31_000, 60_000])
def test_keys_and_values_that_rest_elsewhere_leave_no_extent_of_memory_idle(room: int) -> None:
    it, ctx = large(kv_layers=20), 100_000
    spilling = replace(search(it, 0, ctx), spills=True)
    kept = replace(it, resident_tokens=room)
    ram_bytes = search(kept, 1 << 40, ctx).best().total_bytes("ram")
    plan = spilling.with_ram(ram_bytes).best()
    assert plan.is_whole and plan.batch_rows == it.batch_rows[0]
    assert plan.shape.resident_tokens is not None and room - RESIDENT_STEP < plan.shape.resident_tokens <= room


# What would be better


def test_advice_names_what_keeps_everything_and_nothing_where_all_is_well() -> None:
    it = large()
    tight = search(it, search(it, 0, 1024).least_ram_bytes() + (3 << 20), 1024)
    texts = advise(tight, tight.best(), None, [])
    assert any(text.startswith("--ram ") and "stays in memory" in text for text in texts)
    whole = search(it, 1 << 30)
    assert advise(whole, whole.best(), None, []) == []


def test_advice_is_of_keys_and_values_that_rest_elsewhere_and_of_the_least_cap_where_they_do() -> None:
    it, ctx = large(kv_layers=20, kv_bytes_per_token=600), 60_000
    few = search(replace(it, resident_tokens=2048), 1 << 40, ctx).best().total_bytes("ram")
    tight = search(it, few, ctx)
    (text,) = (text for text in advise(tight, tight.best(), None, []) if text.startswith("--kv-offload auto: "))
    assert "behind 60,000 tokens a step takes" in text and " instead of " in text
    spilling = replace(tight.with_ram(few * 3 // 4), spills=True)
    (ram, *other) = (text for text in advise(spilling, spilling.best(), None, []) if not text.startswith("--ctx"))
    assert ram.startswith(f"--ram {cap(few)}") and not other
    assert replace(tight, job=JobShape(1, ctx, ctx)).spilling() is None
    for idle in ({"held_tokens": 512}, {"windowed_bytes_per_token": 600}):
        assert replace(tight, shape=replace(it, **idle)).spilling() is None


def test_memory_to_be_freed_is_named_with_the_cap_and_the_context_with_which_everything_stays() -> None:
    it = large(kv_bytes_per_token=6000, default_ctx=8192)
    room = search(it, 0, 2048).least_ram_bytes()
    wanted = replace(search(it, room), machine=Machine(Memory(room, 1000, room + (1 << 20), 1 << 40), RATES))
    texts = advise(wanted, wanted.best(), None, [])
    flags, freed = next(text.split(":")[0].split(", once ") for text in texts if "close other programs" in text)
    _, ram, _, ctx = flags.split()
    ram_bytes = parse_bytes(ram)
    assert ram_bytes is not None and search(it, ram_bytes, int(ctx)).best().is_whole
    assert freed.endswith(" more of memory are free (close other programs)")


def test_advice_is_of_a_smaller_model_that_fits_and_of_int4() -> None:
    big, small = replace(shape(layers=20, mlp=900), weights="bf16"), replace(shape(layers=2), name="small")
    int4 = shape(layers=20, mlp=225)
    tight = search(big, search(big, 0, 1024).least_ram_bytes() + (1 << 20), 1024)
    texts = advise(tight, tight.best(), lambda: replace(tight, shape=int4), [small, big])
    assert any(text.startswith("localllm plan small --ram ") and ": fits" in text for text in texts)
    assert any(text.startswith("--weights int4: ") for text in texts)


def test_another_format_is_advised_at_the_speed_that_was_measured_of_it() -> None:
    big, int4 = replace(shape(layers=20, mlp=900), weights="bf16"), shape(layers=20, mlp=225)
    tight = search(big, search(big, 0, 1024).least_ram_bytes() + (1 << 20), 1024)
    whole = search(int4, 1 << 30, 1024)
    slow = replace(whole, machine=replace(whole.machine, rates=replace(RATES, matrix_gbs=RATES.matrix_gbs / 8)))
    (text,) = (text for text in advise(tight, tight.best(), lambda: slow, []) if text.startswith("--weights int4"))
    assert f"about {format_figure(slow.best().decode_tok_s)} tok/s" in text


@pytest.mark.usefixtures("small_process")
@pytest.mark.parametrize("bf16_gbs, is_slow", [(5.0, True), (40.0, False)])
def test_int8_is_advised_where_a_cpu_has_no_instructions_for_bf16(bf16_gbs: float, is_slow: bool) -> None:
    keep(replace(kept_profile(), formats={**kept_profile().formats, "bf16": FormatRates(bf16_gbs, 300.0)}))
    _, plan = planned("qwen2.5-0.5b", "--weights", "bf16")
    assert any(text.startswith("--weights int8: ") for text in plan["advice"]) == is_slow


def test_what_must_be_packed_first_is_part_of_the_least_memory() -> None:
    it = large()
    packed = search(it, 0, 1024).least_ram_bytes()
    packing = Packing(20_000_000, "localllm quantize it")
    unpacked = replace(it, packing=packing)
    assert packed < search(unpacked, 0, 1024).least_ram_bytes() == 1000 + packing.num_bytes
    with pytest.raises(DoesNotFitError, match="it cannot be packed in") as caught:
        search(unpacked, packed, 1024).best()
    assert caught.value.fix == "--ram 32MiB, or localllm quantize it"
    check(search(unpacked, 1000 + packing.num_bytes, 1024).best(), 1000 + packing.num_bytes)


@given(shapes, st.integers(0, 1_200_000), st.integers(0, 1_200_000))
def test_weights_that_are_read_as_they_are_need_packing_only_where_they_are_streamed(
    it: ModelShape, ram_bytes: int, packing_bytes: int
) -> None:
    wanted = search(replace(it, packing=Packing(packing_bytes, is_for_streaming=True)), ram_bytes, 256)
    try:
        plan = wanted.best()
    except DoesNotFitError:
        assert ram_bytes < wanted.least_ram_bytes()
        return
    assert ram_bytes >= wanted.least_ram_bytes()
    assert plan.is_whole or 1000 + packing_bytes <= ram_bytes


def test_what_fits_whole_where_it_cannot_be_packed_is_said_to_need_that() -> None:
    wanted = search(replace(shape(), packing=Packing(1 << 30, is_for_streaming=True)), 0, 256)
    with pytest.raises(DoesNotFitError, match="it does not fit into") as caught:
        wanted.best()
    assert "with everything in memory; to pack it, so that less would do, needs 1.00 GiB" in caught.value.why
    assert caught.value.fix == "--ram 16MiB"


def test_a_refusal_names_the_context_and_a_shorter_one_that_fits() -> None:
    it = large(kv_bytes_per_token=30_000, default_ctx=8192)
    room = search(it, 0, 2048).least_ram_bytes()
    with pytest.raises(DoesNotFitError) as caught:
        search(it, room, 100_000).best()
    assert "100000 tokens of context 2.79 GiB" in caught.value.why and "the program" not in caught.value.why
    more, shorter = caught.value.fix.split(", or ")
    assert shorter == "--ctx 2048" and more == f"--ram {cap(search(it, 0, 100_000).least_ram_bytes())}"
    check(search(it, room, 2048).best(), room)
    assert fixes_for_context(search(it, room), 2048) == [Fix.flag("--ctx", 2048)]
    assert [str(fix) for fix in fixes_for_context(search(it, room), 100_000)] == [f"--ctx 100000 {more}"]
    small_machine = replace(search(it, room), machine=Machine(Memory(room, 1000, room, room), RATES))
    assert fixes_for_context(small_machine, 100_000) == []


def test_the_cap_that_keeps_everything_keeps_it_with_the_context_that_is_named_with_it() -> None:
    it = large(kv_bytes_per_token=6000, default_ctx=8192)
    tight = search(it, search(it, 0, 2048).least_ram_bytes())
    texts = advise(tight, tight.best(), None, [])
    flags = next(text.split(":")[0].split() for text in texts if text.startswith("--ram "))
    assert flags[::2] == ["--ram", "--ctx"]
    ram_bytes = parse_bytes(flags[1])
    assert ram_bytes is not None and search(it, ram_bytes, int(flags[3])).best().is_whole


# The command


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_machine: Callable[[Path], None]) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    known_machine(tmp_path)
    return tmp_path


@pytest.fixture
def small_process(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap of the command line, in a process that holds 300 MiB, not what a test run holds."""

    def memory(ram_bytes: int | None, *_: object, **__: object) -> Memory:
        return Memory(ram_bytes or 20 * GIB, 300 << 20, 20 * GIB, 24 * GIB)

    monkeypatch.setattr(planner, "process_memory", memory)


def planned(*arguments: str) -> tuple[int, Any]:
    result = run_cli("plan", *arguments, "--json")
    return result.code, result.json


@pytest.mark.usefixtures("small_process")
def test_the_json_of_a_plan_has_the_keys_of_the_contract() -> None:
    code, plan = planned("mistral-7b", "--ram", "1200MiB", "--weights", "int4", "--ctx", "512")
    assert code == 0
    assert plan["fits"] is True and plan["model"] == "mistral-7b" and plan["ctx"] == 512
    assert (plan["weights"], plan["kv"], plan["bound_by"]) == ("int4-g64", "int8", "disk")
    assert len(plan["blocks"]) == 66
    assert all(list(block) == ["name", "bytes", "tier", "exec"] for block in plan["blocks"])
    assert list(plan["ledger"]) == ["vram", "ram", "disk"] and sum(plan["ledger"]["ram"].values()) <= 1200 << 20
    for name in ("decode_tok_s", "ttft_s"):
        predicted = plan["predicted"][name]
        assert 0 < predicted["low"] < predicted["mid"] < predicted["high"]
    assert isinstance(plan["advice"], list) and plan["advice"]


@pytest.mark.usefixtures("small_process")
def test_the_plan_of_a_mixture_counts_its_experts_and_what_a_token_reads() -> None:
    code, plan = planned("qwen3-30b-a3b", "--ram", "4GiB", "--weights", "int4", "--ctx", "512")
    experts, read = plan["experts"], plan["token_bytes"]
    assert code == 0 and plan["parameters"] == {"total": 30_531_911_680, "active": 3_352_821_760}
    assert (experts["total"], experts["active"], experts["learnt_from_tokens"]) == (48 * 128, 48 * 8, 0)
    assert 0.1 < experts["in_memory"] / experts["total"] < 0.25 and 0.5 < experts["expected_hits"] < 0.9
    assert read["all"] == pytest.approx(1.9e9, rel=0.01)  # 1.0 GB of experts, 0.9 GB of all else
    assert read["disk"] == pytest.approx((1 - experts["expected_hits"]) * 384 * 2.7e6, rel=0.02)
    whole = planned("olmoe-1b-7b", "--weights", "int4", "--ram", "6GiB")[1]
    assert (whole["experts"]["in_memory"], whole["experts"]["expected_hits"], whole["token_bytes"]["disk"]) == (
        16 * 64,
        1.0,
        0,
    )
    assert planned("mistral-7b", "--weights", "int4", "--ram", "6GiB")[1]["experts"] is None


@pytest.mark.usefixtures("small_process")
def test_the_plan_of_a_hybrid_tells_what_its_layers_keep() -> None:
    states = planned("qwen3.5-4b", "--weights", "int4", "--ram", "8GiB")[1]["states"]
    assert states == {"layers": 24, "snapshot_bytes": 24 * 4 * (32 * 128 * 128 + 3 * (8192 + 2 * 32))}
    assert planned("mistral-7b", "--weights", "int4", "--ram", "8GiB")[1]["states"] is None


@pytest.mark.parametrize(
    ("family", "own", "told"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 16}, "all layers keep a state in place of keys and values"),
        ("falcon_h1", {"head_dim": 32, "mamba_d_ssm": 1024}, "all layers keep a state beside keys and values"),
        ("bamba", {"mamba_n_heads": 8, "attn_layer_indices": [1]}, "3 of 4 layers keep a state in place of keys"),
    ],
)
def test_a_plan_says_which_layers_keep_a_state(family: str, own: dict[str, Any], told: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = parse_config({"model_type": family, **sizes, **own}, "a test's config")
    line = plan_text.hybrid(model_shape(config, RECIPES["int4-g64"], "bf16", "a test's model"))
    assert line.startswith(told) and ("a token takes" in line) == (family != "mamba2")


@pytest.mark.parametrize(("model", "most"), [("lfm2-1.2b", 128000), ("rwkv7-1.5b", 1 << 18), ("falcon-h1-0.5b", 8192)])
def test_the_usual_context_is_long_where_few_layers_keep_keys(model: str, most: int) -> None:
    shape = model_shape(find_shape(model).config, RECIPES["int4-g64"], "bf16", model)
    assert max(shape.default_ctx, shape.cheap_ctx) == most


@pytest.mark.usefixtures("small_process")
def test_the_text_of_a_mixtures_plan_says_each_thing_once_with_its_unit() -> None:
    out = run_cli("plan", "qwen3-30b-a3b", "--ram", "4GiB", "--weights", "int4").out.decode()
    for piece in (
        "30.5B parameters, 3.4B active: a token is computed by 8 of the 128 experts in each of 48 layers",
        " of 6,144 in memory; ",
        "of those that a token wants are expected there (a usual rate)",
        "of experts are read for each token",
        " 48 in memory with some of their experts, the others on the disk",
    ):
        assert out.count(piece) == 1
    assert "read at every step" not in out and "every block" not in out
    refused = run_cli("plan", "glm-4.5-air", "--ram", "2GiB", "--weights", "int4")
    assert refused.code == 4 and "what every token reads, and a few experts" in refused.err
    whole = run_cli("plan", "olmoe-1b-7b", "--ram", "6GiB", "--weights", "int4").out.decode()
    assert "all 1,024 in memory\n" in whole and "expected there" not in whole


def test_a_few_large_experts_are_not_taken_to_be_wanted_again_as_soon_as_one_of_many() -> None:
    rates = []
    for name in ("qwen3-30b-a3b", "mixtral-8x7b"):
        it = model_shape(parse_config(shipped_shapes()[name], name), RECIPES["int4-g64"], "bf16", name)
        rates.append(search(it, it.num_bytes // 2, 512).best().hit_rate)
    assert rates[0] > 0.9 and 0.3 < rates[1] < 0.6


@pytest.mark.parametrize("gib", range(9, 25, 3))
def test_large_experts_leave_no_memory_unused_that_one_more_would_fit_into(gib: int) -> None:
    it = model_shape(parse_config(shipped_shapes()["mixtral-8x7b"], "it"), RECIPES["int4-g64"], "bf16", "it")
    plan = search(it, gib * GIB, 512).best()
    check(plan, gib * GIB)
    assert plan.limits["ram"] - plan.total_bytes("ram") < it.mixtures[0][1].num_bytes
    slots = {block.experts.slots for block in plan.blocks if block.experts is not None}
    assert max(slots) - min(slots) <= 1


def test_advice_for_a_mixture_is_the_memory_of_all_its_experts_in_this_machine_or_a_larger_one() -> None:
    it = model_shape(parse_config(shipped_shapes()["qwen3-30b-a3b"], "it"), RECIPES["int4-g64"], "bf16", "it")
    for total_gib, says in ((32, "--ram 1"), (8, " GiB more memory than is free, in a larger machine: ")):
        machine = Machine(Memory(6 * GIB, 300 << 20, total_gib * GIB, total_gib * GIB), replace(RATES, disk_gbs=0.2))
        wanted = Search(it, machine, 2048)
        text, *more = advise(wanted, wanted.best(), None, [])
        assert says in text and "all experts stay in memory, about " in text
    lacking = replace(wanted.without_limit(), ctx=wanted.best().ctx).best().total_bytes("ram") - 8 * GIB
    assert text.startswith(format_bytes(lacking))
    assert any(each.startswith("--ram up to 8.0 GiB: more experts stay in memory, about ") for each in more)
    learnt = replace(it, hit_curve=HitCurve.of([384_000, *[0] * BINS], it.hit_curve))
    plan = Search(learnt, machine, 2048).best()
    assert (plan.learnt_tokens, plan.hit_rate) == (1000, 1.0)


@pytest.mark.usefixtures("small_process")
def test_what_does_not_fit_exits_with_4_and_names_the_smallest_cap_that_would() -> None:
    code, plan = planned("mistral-7b", "--ram", "500MiB", "--weights", "int4")
    assert code == 4 and plan["fits"] is False
    flag, least = plan["advice"][0].split()
    assert flag == "--ram" and planned("mistral-7b", "--ram", least, "--weights", "int4")[0] == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--vram 8GiB", "--vram"),
        ("--vram 0", "vram"),
        ("--ram lots", "ram"),
        ("--ram 900TiB", "more than this machine has"),
        ("--ctx 100000000", "context"),
        ("--goal speed", "goal"),
    ],
)
def test_nonsense_is_refused_by_name(own_cache: Path, flags: str, named: str) -> None:
    result = run_cli("plan", "mistral-7b", "--device", "cpu", *flags.split())
    assert result.code == 2 and named in result.err and "Traceback" not in result.err


@pytest.mark.usefixtures("small_process")
def test_the_text_of_a_plan_tells_memory_blocks_speed_and_what_would_help() -> None:
    out = run_cli("plan", "mistral-7b", "--ram", "1200MiB", "--weights", "int4").out.decode()
    from_disk = "read from the disk at every step"
    for piece in ("memory ", "program", "staging", from_disk, "tok/s", "first token", "better"):
        assert piece in out


def test_wishes_are_refused_before_anything_is_measured(own_cache: Path) -> None:
    (own_cache / "profile.json").unlink()
    with pytest.raises(UsageError):
        consider(find_shape("mistral-7b"), None, EngineConfig(vram=8 << 30, device="cpu"), pytest.fail)
    assert isinstance(find_shape("mistral-7b"), Shape)
    assert not (own_cache / "profile.json").exists()


def test_a_model_that_would_make_room_is_not_counted_as_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = dict.fromkeys(RECIPES, FormatRates(45.0, 1200.0, 0))
    for module in (planner, model_plan):
        monkeypatch.setattr(module, "kept_profile", lambda: Profile("this machine", 45.0, 3.0, formats=rates))
    held = 1 << 30
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=held))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    shape, config = find_shape("tiny"), EngineConfig(device="cpu", ram=held + (1 << 30))
    beside, instead = (
        consider(shape, None, config, lambda _: None, placed_bytes=placed).planned.plan for placed in (0, held)
    )
    assert beside is not None and instead is not None
    assert instead.ledger["ram"]["program"] < beside.ledger["ram"]["program"]


@pytest.mark.usefixtures("small_process")
def test_the_smallest_cap_that_is_named_for_a_job_is_enough_for_it() -> None:
    flags = ("mistral-7b", "--weights", "int4", "--goal", "throughput")
    code, plan = planned(*flags, "--ram", "600MiB")
    assert code == 4 and planned(*flags, *plan["advice"][0].split())[0] == 0


@pytest.mark.usefixtures("small_process")
def test_another_model_for_a_job_is_planned_for_a_job() -> None:
    _, plan = planned("qwen3-8b", "--weights", "int4", "--goal", "throughput", "--ram", "4GiB")
    others = [line for line in plan["advice"] if line.startswith("localllm plan")]
    assert others and all("--goal throughput" in line for line in others)


@pytest.mark.usefixtures("small_process")
def test_what_each_sign_means_is_told_from_the_fastest_tier_to_the_slowest() -> None:
    out = run_cli("plan", "mistral-7b", "--ram", "1500MiB", "--weights", "int4").out.decode()
    meanings = [out.index(text) for text in ("computed by the CPU", "looked up row by row", "from the disk at every")]
    assert meanings == sorted(meanings)


@pytest.mark.usefixtures("small_process")
def test_when_the_rates_were_measured_is_told_and_whether_beside_other_work(own_cache: Path) -> None:
    arguments = ("mistral-7b", "--ram", "1200MiB", "--weights", "int4")
    planned(*arguments)
    quiet = replace(kept_profile(), taken=dict.fromkeys(("memory", "disk", "int4-g64 matrices"), Taken(1.8e9)))
    keep(quiet)
    date = datetime.fromtimestamp(1.8e9)
    assert planned(*arguments)[1]["measured"] == {"at": "2027-01-15T08:00:00+00:00", "while_busy": []}
    assert f"measured     {date:%Y-%m-%d %H:%M}\n" in run_cli("plan", *arguments).out.decode()
    keep(replace(quiet, taken={**quiet.taken, "disk": Taken(1.8e9, others=3.5, times=4)}))
    busy = planned(*arguments)[1]
    assert busy["measured"] == {"at": "2027-01-15T08:00:00+00:00", "while_busy": ["disk"]}
    assert "measured on a busy machine: disk" in str(busy["estimates"])
    told = run_cli("plan", *arguments).out.decode()
    assert f"measured     {date:%Y-%m-%d %H:%M}, while the machine was busy: disk\n" in told


@pytest.mark.usefixtures("small_process")
def test_a_disk_that_could_not_be_measured_is_said_to_be_an_estimate(own_cache: Path) -> None:
    assert planned("mistral-7b", "--ram", "1200MiB")[1]["estimates"] == []
    keep(replace(kept_profile(), disk_read_gbs=UNKNOWN_DISK_GBS))
    drafts = planned("mistral-7b", "--ram", "1200MiB")[1]["estimates"]
    assert drafts == ["the disk is taken to read 0.5 GB/s: no file could be written to measure it"]
    assert drafts[0] in run_cli("plan", "mistral-7b", "--ram", "1200MiB").out.decode()


@pytest.mark.parametrize(
    "amount",
    ["50%", "-1GiB", "900000", *(pytest.param(each, marks=pytest.mark.slow) for each in ("1e3GiB", "0", "lots"))],
)
def test_the_cap_that_mends_a_bad_one_is_accepted(own_cache: Path, amount: str) -> None:
    refused = run_cli("plan", "smollm2-135m", "--ram", amount)
    assert refused.code == 2
    mended = refused.error_lines[2].split("localllm ")[1].split()
    assert run_cli(*mended).code == 0


@pytest.mark.usefixtures("small_process")
def test_too_much_memory_for_adapters_is_refused_with_as_much_as_there_is() -> None:
    refused = run_cli("plan", "smollm2-135m", "--adapter-memory", "100TiB")
    assert refused.code == 4 and "adapters 100.00 TiB" in refused.err
    assert run_cli(*refused.error_lines[2].split("localllm ")[1].split()).code == 0


@pytest.mark.usefixtures("small_process")
def test_each_fix_of_a_refusal_is_a_line_that_works() -> None:
    flags = ("mistral-7b", "--weights", "int4", "--ram", "2GiB", "--ctx", "32768")
    refused = run_cli("plan", *flags)
    assert refused.code == 4 and "32768 tokens of context 2.09 GiB" in refused.err
    lines = [line[7:] for line in refused.err.splitlines() if line.startswith(("fix:", "or:"))]
    assert len(lines) == 3
    for line in lines:
        assert run_cli(*line.split()[1:]).code == 0, line


def test_layers_that_keep_a_state_are_counted_among_all():
    qwen = {"model_type": "qwen3_5_text", "num_hidden_layers": 8, "layer_types": None}
    shapes = (
        model_shape(parse_config(raw, "it"), RECIPES["int8"], "bf16", "it") for raw in (qwen, {"model_type": "rwkv7"})
    )
    some, every = map(hybrid, shapes)
    assert some.startswith("6 of 8 layers keep a state") and some.endswith("in the others")
    assert every.startswith("all layers keep a state") and "others" not in every
