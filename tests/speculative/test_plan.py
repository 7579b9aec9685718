"""What drafts are expected to give, and blocks that are placed for them: by the formula, and by what trials found."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm import hub
from localllm.engine import model_plan, planner
from localllm.engine.placement import model_shape
from localllm.engine.speculative.choice import Speculate
from localllm.models.families import parse_config
from localllm.models.shapes import shipped_shapes
from localllm.offload.planner.costs import Costs
from localllm.offload.planner.machine import Card, CardMemory, CardRates, Machine, Memory, Rates
from localllm.offload.planner.plan import GIB, Plan
from localllm.offload.planner.profile import FormatRates, Profile
from localllm.offload.planner.search import Search
from localllm.offload.planner.speculation_gain import gain, skipped, skipping, slow, staging_s, usual_harm
from localllm.quant.recipe import RECIPES
from tests.cli_support import run_cli
from tests.speculative.support import swap_two_words

RATES = Rates(matrix_gbs=40.0, compute_gops=1200.0, disk_gbs=1.5)
CARD = CardRates(matrix_gbs=400.0, compute_gops=40_000.0, link_gbs=24.0, launch_s=5e-6, hop_s=60e-6)
CONFIG = parse_config(shipped_shapes()["mistral-7b"], "mistral-7b")
MISTRAL = model_shape(CONFIG, RECIPES["int4-g64"], "bf16", "mistral-7b")


@dataclass(frozen=True)
class _Steps:
    """So long for one row, and so much longer for each row more."""

    first_s: float
    row_s: float

    def decode_s(self, _depth: int, rows: int = 1) -> float:
        return self.first_s + (rows - 1) * self.row_s


def steps(row_s: float) -> Costs:
    """The first row takes a second."""
    return cast(Costs, _Steps(1.0, row_s))


@given(alpha=st.floats(0, 0.99), draft=st.floats(0, 1), row=st.floats(0, 0.5), most=st.integers(1, 15))
def test_the_gain_is_that_of_the_best_number_of_drafts(alpha: float, draft: float, row: float, most: int) -> None:
    """By the closed form of the expectation, which the code sums up."""
    found = gain(steps(row), 0, alpha, draft, most=most)
    speedups = [(1 - alpha ** (k + 1)) / (1 - alpha) / (k * draft + 1 + k * row) for k in range(1, most + 1)]
    assert found.speedup == pytest.approx(max(speedups)) == pytest.approx(found.tok_s)
    assert speedups[found.count - 1] == pytest.approx(max(speedups))


def test_what_is_fetched_while_drafting_shortens_the_step_as_far_as_there_is_a_place_for_it() -> None:
    apart = gain(steps(0.0), 0, 1.0, 0.1, most=4)
    assert gain(steps(0.0), 0, 1.0, 0.1, staging_s=9.0, most=4).tok_s == pytest.approx(5.0)
    assert apart.tok_s == pytest.approx(5 / 1.4)
    assert gain(steps(0.0), 0, 1.0, 0.1, staging_s=0.1, most=4).tok_s == pytest.approx(5 / 1.3)


def on_a_cpu(ram: float) -> Plan:
    memory = Memory(int(ram * GIB), GIB // 2, 64 * GIB, 64 * GIB)
    return Search(MISTRAL, Machine(memory, RATES), 2048).best()


def on_a_card(vram: float) -> Plan:
    memory = CardMemory(int(vram * GIB), GIB // 2, 64 << 20, 80 * GIB, 80 * GIB)
    rates = replace(RATES, compute_gops=1.0)  # the host had better compute nothing
    machine = Machine(Memory(32 * GIB, GIB, 64 * GIB, 64 * GIB), rates, Card(memory, CARD))
    return Search(MISTRAL, machine, 2048).best()


@pytest.mark.parametrize(("planned", "room"), [(on_a_cpu, 3.0), (on_a_cpu, 4.0), (on_a_card, 4.0)])
def test_what_is_slow_is_left_out_while_drafting(planned: Any, room: float) -> None:
    plan = planned(room)
    left_out, harm = skipped(plan), usual_harm([block.name for block in MISTRAL.blocks])
    assert left_out == slow(plan) and left_out < harm.keys() and staging_s(plan) > 0
    assert skipping(plan, dict.fromkeys(harm, 0.0), 8)[0] == 1.0 > skipping(plan, harm, 8)[0] > 0
    gains = [skipping(plan, dict.fromkeys(harm, 0.0), most)[1].tok_s for most in (1, 8, 15)]
    assert gains == sorted(gains) and gains[0] > plan.decode_tok_s


def planned(*options: str) -> list[dict[str, Any]]:
    result = run_cli("plan", "mistral-7b", "--ram", "3GiB", "--json", *options)
    found: list[dict[str, Any]] = result.json["speculation"]
    return found


def test_the_plan_tells_what_each_who_drafts_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = dict.fromkeys(RECIPES, FormatRates(RATES.matrix_gbs, RATES.compute_gops, 0))  # of no busy machine
    profile = Profile("this machine", dram_read_gbs=RATES.matrix_gbs, disk_read_gbs=RATES.disk_gbs, formats=rates)
    for module in (planner, model_plan):
        monkeypatch.setattr(module, "kept_profile", lambda: profile)
    # What the tests before have left in this process is not part of what a program holds.
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=400 << 20, vms=1 << 30))
    usual = planned()
    assert [row["drafter"] for row in usual] == ["ngram", "ngram", "skip"]
    assert usual[0]["tok_s"] > usual[1]["tok_s"] > 0 and usual[2]["skipped_blocks"] > 0
    assert [row["drafter"] for row in planned("--speculate", "ngram")] == ["ngram", "ngram"]
    assert [row["drafter"] for row in planned("--speculate", "skip")] == ["skip"]
    second = planned("--speculate", "model:qwen3-0.6b")
    assert [row["drafter"] for row in second] == ["model:qwen3-0.6b"] * 2 and not second[0]["why_not"]
    few = planned("--draft-tokens", "2")
    assert all(1 <= row["draft_tokens"] <= 2 for row in few) and few[0]["tok_s"] < usual[0]["tok_s"]
    assert planned("--speculate", "off") == planned("--draft-tokens", "0") == []


def test_a_plan_leaves_out_a_second_model_as_a_run_would(tmp_path: Path, own_folders: None) -> None:
    """One that would cost more than it gives; with another tokenizer; and one whose tokenizer nobody can read yet."""
    (row,) = run_cli("plan", "tiny", "--speculate", "model:tiny", "--json").json["speculation"]
    assert row["why_not"].startswith("left out, as it takes") and row["tok_s"] is row["alpha"] is None
    other = Path(shutil.copytree(hub.locate("tiny").directory, tmp_path / "other"))
    swap_two_words(other)
    for command in (("plan", "tiny"), ("run", "tiny", "-p", "x")):
        refused = run_cli(*command, "--speculate", f"model:{other}")
        assert refused.code == 2 and "it cannot draft for tiny" in refused.err
        assert refused.error_lines[2].endswith("--speculate auto")
    (other / "tokenizer.json").unlink()
    found = run_cli("plan", "tiny", "--speculate", f"model:{other}", "--json").json
    assert any("no tokenizer.json of" in draft for draft in found["estimates"])


def test_an_embedding_that_is_looked_up_on_the_disk_is_no_block_to_leave_out() -> None:
    """Every block is near, though not all of the model is."""
    plan = on_a_cpu(4.5)
    looked_up = replace(plan, blocks=(replace(plan.blocks[0], tier="disk"), *plan.blocks[1:]))
    assert not looked_up.is_whole and not slow(looked_up) and not skipped(looked_up)
    (told,) = model_plan._drafting(looked_up, None, "", Speculate("skip"))
    assert told.why_not.startswith("every block is in fast memory")
    near, streamed = plan.blocks, on_a_cpu(3.0)
    assert slow(streamed) == skipped(streamed) == set(streamed.streamed)
    assert slow(replace(plan, blocks=(*near[:-1], replace(near[-1], tier="disk")))) == {"head"}
    assert not skipped(replace(plan, blocks=(*near[:-1], replace(near[-1], tier="disk"))))


def test_skip_says_where_nothing_is_left_out(own_folders: None) -> None:
    (row,) = run_cli("plan", "tiny", "--speculate", "skip", "--json").json["speculation"]
    assert (
        row["drafter"] == "skip"
        and row["why_not"].startswith("every block is in fast memory")
        and row["draft_tokens"] is None
    )


def test_attention_is_left_out_first_and_the_ends_stay() -> None:
    names = [f"layers.{layer}.{kind}" for layer in range(8) for kind in ("attention", "mlp")]
    harm = usual_harm(names)
    assert max(harm, key=lambda name: harm[name]) in (names[1], names[-1])
    least = sorted(names, key=lambda name: harm[name])[:4]
    assert all(name.endswith("attention") for name in least) and not {*least} & {names[0], names[-2]}


def test_only_a_second_model_takes_memory_for_drafts() -> None:
    usual, second = (
        run_cli("plan", "qwen3-8b", "--ram", "8GiB", "--speculate", who, "--json").json["ledger"]["ram"]
        for who in ("auto", "model:qwen3-0.6b")
    )
    assert "draft" not in usual and second["draft"] > 0
