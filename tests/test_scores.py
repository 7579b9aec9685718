"""Predictions learn from what came true of the plan that they were made from, and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from localllm import Engine, SamplingParams
from localllm.engine.events import FinishedEvent, Timings, Usage
from localllm.engine.runner import ModelRunner
from localllm.engine.scores import Scores
from localllm.offload.planner.calibration import Term
from localllm.offload.planner.machine import Card, CardMemory, CardRates, Machine, Memory
from localllm.offload.planner.plan import Plan
from localllm.offload.planner.profile import FormatRates, keep, kept_profile
from localllm.offload.planner.search import Search
from localllm.settings import EngineConfig
from tests.packed_support import small_checkpoint
from tests.test_plan import RATES, search, shape

IT = replace(shape(layers=8, mlp=400), batch_rows=(64, 16, 8))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))


def answer(plan: Plan | None, times_slower: float, prompt: int = 10, cached: int = 0) -> FinishedEvent:
    """That took so many times as long as was predicted, its prompt too."""
    step_s, prompt_s = (0.1, 1.0) if plan is None else (plan.costs.decode_s(prompt + 10), plan.costs.prompt_s(prompt))
    timings = Timings(decode_tok_s=1 / (times_slower * step_s), prefill_tok_s=prompt / (times_slower * prompt_s))
    return FinishedEvent(0, "length", Usage(prompt, cached, 20), timings)


def with_machine(search: Search, **changes: Any) -> Search:
    return replace(search, machine=replace(search.machine, **changes))


def learned(plan: Plan | None, times_slower: float = 2.0, **usage: int) -> dict[Term, float]:
    """The corrections after such an answer."""
    scores = Scores()
    scores.take(answer(plan, times_slower, **usage), plan)
    scores.keep()
    return dict(kept_profile().corrections(IT.weights).factors)


def on_a_card(cached_share: float, ram_bytes: int) -> Plan:
    """Of a link that is slower than anything else."""
    card = CardMemory(8 << 20, 0, 0, 1 << 40, 1 << 40)
    rates = CardRates(400.0, 40_000.0, 0.01, 0.0, 0.0)
    slow = replace(RATES, cached_share=cached_share, matrix_gbs=0.005, disk_gbs=100.0)
    return Search(IT, Machine(Memory(ram_bytes, 1000, 1 << 40), slow, Card(card, rates)), 128).best()


def test_a_step_that_waits_for_the_link_corrects_the_link_also_where_the_files_are_cached() -> None:
    plan = on_a_card(1.0, 1 << 30)
    assert plan.bound_by == "link" and not plan.streamed_bytes
    assert learned(plan)[Term("both", "step", "link")] > 1.2


def test_what_comes_from_the_disk_says_nothing_where_the_page_cache_has_it() -> None:
    cold = search(IT, IT.num_bytes // 2, 128).best()
    assert cold.streamed_bytes
    cached = with_machine(search(IT, IT.num_bytes // 2, 128), rates=replace(RATES, cached_share=0.5)).best()
    assert learned(cached) == {}
    assert learned(cold)[Term("cpu", "step", "disk")] > 1.2


def test_an_answer_under_no_plan_and_estimated_rates_teach_nothing() -> None:
    estimated = with_machine(search(IT, 1 << 30), rates=replace(RATES, is_measured=False)).best()
    assert learned(None) == learned(estimated) == {}
    assert set(learned(search(IT, 1 << 30).best())) == {Term("cpu", "step", "memory")}


def test_keys_and_values_that_are_brought_from_elsewhere_teach_nothing() -> None:
    plan = search(IT, 1 << 30).best()
    elsewhere = replace(plan, costs=replace(plan.costs, shape=replace(plan.costs.shape, resident_tokens=8)))
    assert elsewhere.costs.brought_bytes(20)
    assert learned(elsewhere) == {} != learned(plan)


def test_a_prompt_corrects_the_time_to_a_first_token_where_it_is_long_and_all_of_it_was_read() -> None:
    whole, term = search(IT, 1 << 30).best(), Term("cpu", "prompt", "compute")
    assert term not in learned(whole, prompt=100) and term not in learned(whole, prompt=600, cached=500)
    for _ in range(4):
        corrections = learned(whole, prompt=600)
    assert corrections[term] == pytest.approx(2.0)
    corrected = search(IT, 1 << 30)
    corrected = with_machine(corrected, corrections=kept_profile().corrections(IT.weights))
    assert corrected.best().costs.prompt_s(600) == pytest.approx(2 * whole.costs.prompt_s(600), rel=0.1, abs=1e-3)
    learned(corrected.best(), times_slower=1.0, prompt=600)  # what came true as it was predicted changes nothing
    assert kept_profile().corrections(IT.weights).of(term) == pytest.approx(2.0)
    streams = search(IT, IT.num_bytes // 2, 256).best()
    assert learned(streams, prompt=200)[Term("cpu", "prompt", "disk")] > 1.2


def test_of_the_answers_of_one_engine_one_that_was_disturbed_counts_for_nothing() -> None:
    plan, scores = search(IT, 1 << 30).best(), Scores()
    for times_slower in (1.1, 1.1, 300.0, 1.1, 40.0):
        scores.take(answer(plan, times_slower), plan)
    scores.keep()
    assert 1.0 < kept_profile().corrections(IT.weights).of(Term("cpu", "step", "memory")) <= 1.11


def test_what_a_plan_of_one_format_taught_is_nothing_to_another_nor_to_a_gpu() -> None:
    plan = on_a_card(1.0, 1 << 30)
    learned(plan)
    assert kept_profile().corrections("int8").factors == {}
    assert all(term.where != "cpu" for term in kept_profile().corrections(IT.weights).factors)


def test_an_answer_for_which_memory_was_given_up_is_not_counted_and_the_next_whole_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the engine. On a CPU the model is planned anew after it, and what was given up comes back."""
    rates = {"int4-g32": FormatRates(20.0, 500.0)}
    keep(replace(kept_profile(), dram_read_gbs=40.0, disk_read_gbs=1.0, formats=rates))
    directory = small_checkpoint(tmp_path / "model", "llama")
    right, left_to_fail = ModelRunner.forward, 0

    def forward(runner: ModelRunner, *arguments: Any, **named: Any) -> Tensor:
        nonlocal left_to_fail
        if left_to_fail:
            left_to_fail -= 1
            raise MemoryError("none left")
        return right(runner, *arguments, **named)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    monkeypatch.setattr("localllm.engine.scores._LEAST_PROMPT", 16)

    def counted(failures: int) -> tuple[set[Term], bool]:
        """What the answer was counted for, and whether it gave blocks up."""
        nonlocal left_to_fail
        engine = Engine.load(directory, EngineConfig(device="cpu", weights="int4-g32", ctx=128))
        placed = engine.residency.placed
        assert placed is not None
        start, left_to_fail = placed.blocks, failures
        *_, finished = engine.generate(tuple(range(3, 23)), SamplingParams(max_tokens=12, ignore_eos=True))
        assert isinstance(finished, FinishedEvent) and finished.error is None and not left_to_fail
        gave_up = placed.blocks != start
        before = kept_profile().scores
        if failures:
            *_, finished = engine.generate(tuple(range(3, 8)), SamplingParams(max_tokens=2, ignore_eos=True))
            assert placed.blocks == start and engine.residency.plan is not None
        engine.close()
        after = kept_profile().scores
        return {Term(*name.split()[1:]) for name in after if after[name] != before.get(name)}, gave_up  # type: ignore[arg-type]

    assert counted(failures=1) == (set(), False)
    assert counted(failures=4) == (set(), True)
    assert counted(failures=0) == ({Term("cpu", "step", "memory"), Term("cpu", "prompt", "compute")}, False)
