"""What drafts are expected to give, and blocks that are placed for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm import hub
from localllm.engine import planning
from localllm.engine.placement import model_shape
from localllm.models.families import parse_config
from localllm.models.shapes import shipped_shapes
from localllm.offload.planner.device_costs import CardRates
from localllm.offload.planner.device_search import CardMemory, DeviceSearch
from localllm.offload.planner.format_rates import FormatRates
from localllm.offload.planner.plan import GIB, Costs, Memory, Plan, Rates
from localllm.offload.planner.profile import Profile
from localllm.offload.planner.search import Search
from localllm.offload.planner.speculation_gain import gain, rate, skipped, slow, staging_s, usual_harm
from localllm.quant.recipe import RECIPES
from tests.cli_support import run_cli

RATES = Rates(matrix_gbs=40.0, compute_gops=1200.0, disk_gbs=1.5)
CARD = CardRates(matrix_gbs=400.0, compute_gops=40_000.0, link_gbs=24.0, launch_s=5e-6, hop_s=60e-6)
MISTRAL = model_shape(
    parse_config(shipped_shapes()["mistral-7b"], "mistral-7b"), RECIPES["int4-g64"], torch.bfloat16, "mistral-7b"
)
# Every third layer is one without which nearly every guess is wrong; the others are hardly needed.
HARM = {block.name: 2.0 if index // 2 % 3 == 0 else 0.001 for index, block in enumerate(MISTRAL.blocks)}


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


@given(alpha=st.floats(0, 0.99), guess=st.floats(0, 1), row=st.floats(0, 0.5), most=st.integers(1, 15))
def test_the_gain_is_that_of_the_best_number_of_guesses(alpha: float, guess: float, row: float, most: int) -> None:
    """By the closed form of the expectation, which the code sums up."""
    found = gain(steps(row), 0, alpha, guess, most=most)
    speedups = [(1 - alpha ** (k + 1)) / (1 - alpha) / (k * guess + 1 + k * row) for k in range(1, most + 1)]
    assert found.speedup == pytest.approx(max(speedups)) == pytest.approx(found.tok_s)
    assert speedups[found.count - 1] == pytest.approx(max(speedups))


def test_what_is_fetched_while_guessing_shortens_the_step_as_far_as_there_is_a_place_for_it() -> None:
    apart = gain(steps(0.0), 0, 1.0, 0.1, most=4)
    assert gain(steps(0.0), 0, 1.0, 0.1, staging_s=9.0, most=4).tok_s == pytest.approx(5.0)
    assert apart.tok_s == pytest.approx(5 / 1.4)
    assert gain(steps(0.0), 0, 1.0, 0.1, staging_s=0.1, most=4).tok_s == pytest.approx(5 / 1.3)


def search(ram: float, harm: Mapping[str, float], draft_tokens: int = 8) -> Search:
    memory = Memory(int(ram * GIB), GIB // 2, 64 * GIB, 64 * GIB)
    return Search(MISTRAL, memory, RATES, 2048, harm=harm, draft_tokens=draft_tokens)


def on_a_cpu(ram: float, harm: Mapping[str, float], draft_tokens: int = 8) -> Plan:
    return search(ram, harm, draft_tokens).best()


def on_a_card(vram: float, harm: Mapping[str, float], draft_tokens: int = 8) -> Plan:
    card = CardMemory(int(vram * GIB), GIB // 2, 64 << 20, 80 * GIB, 80 * GIB)
    memory = Memory(32 * GIB, GIB, 64 * GIB, 64 * GIB)
    rates = replace(RATES, compute_gops=1.0)  # the host had better compute nothing
    return DeviceSearch(MISTRAL, memory, card, rates, CARD, 2048, harm=harm, draft_tokens=draft_tokens).best()


@pytest.mark.parametrize(("planned", "room"), [(on_a_cpu, 3.0), (on_a_cpu, 4.0), (on_a_card, 4.0)])
def test_blocks_that_guesses_need_stay_near(planned: Any, room: float) -> None:
    """A little less is kept without them, and all that leaves is of blocks that are hardly needed."""
    plain, guessing = planned(room, {}), planned(room, HARM)
    left_out = skipped(guessing)
    assert skipped(plain) and left_out
    assert sum(HARM[name] for name in left_out) < 0.2 < 2 <= sum(HARM[name] for name in skipped(plain))
    assert rate(guessing, HARM, 8) > 1.5 * rate(plain, HARM, 8)
    assert 0.9 * plain.decode_tok_s <= guessing.decode_tok_s
    assert staging_s(guessing) > 0


@pytest.mark.parametrize("planned", [on_a_cpu, on_a_card])
def test_as_many_guesses_count_as_may_be_made(planned: Any) -> None:
    for room in (2.5, 3.0, 3.5):
        plans = {most: planned(room, HARM, most) for most in (0, 1, 8, 15)}
        rates = [rate(plan, HARM, most) for most, plan in plans.items()]
        assert rates == sorted(rates)
        assert plans[0].decode_tok_s > 0.999 * planned(room, {}).decode_tok_s
        for most, plan in plans.items():  # plans for other numbers are no better for this one
            others = [other for other in plans.values() if other.decode_tok_s >= plan.decode_tok_s]
            assert rate(plan, HARM, most) >= 0.999 * max(rate(other, HARM, most) for other in others)
    few, many = on_a_cpu(3.0, HARM, 1), on_a_cpu(3.0, HARM, 8)
    assert skipped(few) != skipped(many) and few.decode_tok_s > many.decode_tok_s


def planned(*options: str) -> list[dict[str, Any]]:
    result = run_cli("plan", "mistral-7b", "--ram", "3GiB", "--json", *options)
    found: list[dict[str, Any]] = result.json["speculation"]
    return found


def test_the_plan_tells_what_each_who_guesses_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = dict.fromkeys(RECIPES, FormatRates(RATES.matrix_gbs, RATES.compute_gops, 0))  # of no busy machine
    profile = Profile("this machine", dram_read_gbs=RATES.matrix_gbs, disk_read_gbs=RATES.disk_gbs, formats=rates)
    monkeypatch.setattr(planning, "kept_profile", lambda: profile)
    # What the tests before have left in this process is no part of what a program holds.
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
    other = tmp_path / "other"
    shutil.copytree(hub.locate("tiny").directory, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = [word for word, index in words.items() if index in (600, 601)]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for command in (("plan", "tiny"), ("run", "tiny", "-p", "x")):
        refused = run_cli(*command, "--speculate", f"model:{other}")
        assert refused.code == 2 and "it cannot guess for tiny" in refused.err
        assert refused.error_lines[2].endswith("--speculate auto")
    (other / "tokenizer.json").unlink()
    found = run_cli("plan", "tiny", "--speculate", f"model:{other}", "--json").json
    assert any("no tokenizer.json of" in guess for guess in found["guesses"])


def test_an_embedding_that_is_looked_up_on_the_disk_is_no_block_to_leave_out() -> None:
    """Every block is near, though not all of the model is."""
    plan = on_a_cpu(4.5, HARM)
    looked_up = replace(plan, blocks=(replace(plan.blocks[0], tier="disk"), *plan.blocks[1:]))
    assert not looked_up.is_whole and not slow(looked_up) and not skipped(looked_up)
    wishes, cpu = planning.Wishes(speculate="skip"), torch.device("cpu")
    (told,) = planning._speculation(looked_up, search(4.5, HARM), wishes, torch.bfloat16, cpu)
    assert told.why_not.startswith("every block is near")
    near, streamed = plan.blocks, on_a_cpu(3.0, HARM)
    assert slow(streamed) == skipped(streamed) == set(streamed.streamed)
    assert slow(replace(plan, blocks=(*near[:-1], replace(near[-1], tier="disk")))) == {"head"}
    assert not skipped(replace(plan, blocks=(*near[:-1], replace(near[-1], tier="disk"))))


def test_skip_says_where_nothing_is_left_out(own_folders: None) -> None:
    (row,) = run_cli("plan", "tiny", "--speculate", "skip", "--json").json["speculation"]
    assert row["drafter"] == "skip" and row["why_not"].startswith("every block is near") and row["draft_tokens"] is None


def test_attention_is_left_out_first_and_the_ends_stay() -> None:
    names = [f"layers.{layer}.{kind}" for layer in range(8) for kind in ("attention", "mlp")]
    harm = usual_harm(names)
    assert max(harm, key=lambda name: harm[name]) in (names[1], names[-1])
    least = sorted(names, key=lambda name: harm[name])[:4]
    assert all(name.endswith("attention") for name in least) and not {*least} & {names[0], names[-2]}


def test_a_job_of_many_sequences_reserves_nothing_for_guesses() -> None:
    ledgers = [
        run_cli("plan", "qwen3-8b", "--ram", "4GiB", "--goal", goal, "--json").json["ledger"]["ram"]
        for goal in ("throughput", "latency")
    ]
    assert not ledgers[0].get("draft") and ledgers[1]["draft"] > 0


def test_of_flags_that_contradict_each_other_the_idle_one_is_named(own_folders: None) -> None:
    for flags, said in (
        (("--speculate", "off", "--draft-tokens", "4"), "--draft-tokens 4 has no effect: with --speculate off"),
        (("--speculate", "skip", "--draft-tokens", "0"), "--speculate skip has no effect: with --draft-tokens 0"),
    ):
        result = run_cli("run", "-p", "x", "--max-tokens", "2", *flags)
        assert result.code == 0 and said in result.err
    assert "no effect" not in run_cli("run", "-p", "x", "--max-tokens", "2", "--draft-tokens", "0").err
