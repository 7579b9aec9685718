"""Predictions learn from what came true of the plan that they were made from, and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.engine.events import FinishedEvent, Timings, Usage
from localllm.engine.scores import Scores
from localllm.offload.device_costs import CardRates
from localllm.offload.device_search import CardMemory, DeviceSearch
from localllm.offload.plan import Memory, Plan
from localllm.offload.profile import kept_profile
from tests.test_plan import RATES, search, shape

IT = replace(shape(layers=8, mlp=400), batch_rows=(64, 16, 8))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))


def learned(plan: Plan | None, times_slower: float = 2.0) -> dict[str, float]:
    """The corrections after an answer that took so many times as long as was predicted."""
    scores = Scores()
    predicted_s = 0.1 if plan is None else plan.costs.decode_s(10 + 20 // 2)
    timings = Timings(decode_tok_s=1 / (times_slower * predicted_s))
    scores.take(FinishedEvent(0, "length", Usage(10, 0, 20), timings), plan)
    scores.keep()
    return dict(kept_profile().corrections)


def on_a_card(cached_share: float, ram_bytes: int) -> Plan:
    """Of a link that is slower than anything else."""
    card = CardMemory(8 << 20, 0, 0, 1 << 40, 1 << 40)
    rates = CardRates(400.0, 40_000.0, 0.01, 0.0, 0.0)
    slow = replace(RATES, cached_share=cached_share, matrix_gbs=0.005, disk_gbs=100.0)
    return DeviceSearch(IT, Memory(ram_bytes, 1000, 1 << 40), card, slow, rates, 128).best()


def test_a_step_that_waits_for_the_link_corrects_the_link_also_where_the_files_are_cached() -> None:
    plan = on_a_card(1.0, 1 << 30)
    assert plan.bound_by == "link" and not plan.streamed_bytes
    assert learned(plan)["link"] > 1.2


def test_what_comes_from_the_disk_says_nothing_where_the_page_cache_has_it() -> None:
    cold = search(IT, IT.num_bytes // 2, 128).best()
    assert cold.streamed_bytes
    cached = replace(search(IT, IT.num_bytes // 2, 128), rates=replace(RATES, cached_share=0.5)).best()
    assert learned(cached) == {}
    assert learned(cold)["disk"] > 1.2


def test_an_answer_under_no_plan_and_rates_that_are_a_guess_teach_nothing() -> None:
    guessed = replace(search(IT, 1 << 30), rates=replace(RATES, is_measured=False)).best()
    assert learned(None) == learned(guessed) == {}
    assert set(learned(search(IT, 1 << 30).best())) == {"memory"}
