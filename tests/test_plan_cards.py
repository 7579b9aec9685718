"""`localllm plan --gpu`: a machine that is not here, by the data sheet of a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.placement import model_shape
from localllm.models.families import parse_config
from localllm.models.shapes import shipped_shapes
from localllm.offload.planner.card_sheets import ALL, CardSheet, OtherMachine, card_sheets, find_card
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.plan import GIB
from localllm.offload.planner.profile import FormatRates, Profile, keep, machine_key
from localllm.offload.planner.search import Search
from localllm.quant.layouts import SIZES
from tests.cli_support import run_cli

HOST = Rates(matrix_gbs=45.0, compute_gops=1200.0, disk_gbs=3.0)
CTX = 2048
TABLE_COLUMNS = 80


@pytest.fixture(autouse=True)
def known_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which all rates are known: nothing is measured."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    monkeypatch.delenv("LOCALLLM_CACHE", raising=False)
    rates = dict.fromkeys(SIZES, FormatRates(HOST.matrix_gbs, HOST.compute_gops))
    keep(Profile(machine_key(), dram_read_gbs=50.0, disk_read_gbs=HOST.disk_gbs, formats=rates))


def plans(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    result = run_cli("plan", *arguments, "--json")
    assert "Traceback" not in result.err
    found = json.loads(result.out)
    assert found["schema_version"] == 1
    return result.code, found["cards"]


def tok_s(found: dict[str, Any]) -> float:
    return float(found["predicted"]["decode_tok_s"]["mid"])


@pytest.mark.parametrize("word", ["rtx-4090", "RTX 4090", "4090", "rtx4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_is_found_by_any_of_its_spellings(word: str) -> None:
    assert find_card(word).name == "rtx-4090"


def test_every_name_finds_its_own_card() -> None:
    assert [find_card(name) for name in card_sheets()] == list(card_sheets().values())


def test_one_card_has_the_screen_of_any_plan_and_says_that_it_is_an_estimate() -> None:
    out = run_cli("plan", "llama-3.1-8b", "--gpu", "4090").out.decode()
    for piece in ("GPU memory", "65 on the GPU", "tok/s", "first token", "rtx-4090's data sheet times 0.85 (memory)"):
        assert piece in out
    assert "no kernel was timed on a card yet; CPU and disk are this machine's" in out


@pytest.mark.parametrize(
    "card, least, most",
    [
        # Published: llama.cpp 157 with Q4_0 on a 3090; HQQ with GemLite 158 on a 4090; llama.cpp 143 in INT8 on a 5090.
        ("rtx-4090", 60, 220),
        ("rtx-3090", 100, 180),
        ("rtx-5090", 143, 350),
        ("rtx-3060-12gb", 40, 80),
        ("t4", 30, 75),
        ("h100-sxm", 150, 500),
    ],
)
def test_an_8b_model_in_int4_is_predicted_near_published_speeds(card: str, least: float, most: float) -> None:
    _, (found,) = plans("llama-3.1-8b", "--weights", "int4", "--gpu", card)
    assert least < tok_s(found) < most and found["bound_by"] == "memory"


def test_a_prompt_is_predicted_near_published_speeds() -> None:
    """llama.cpp computes 10,400 tokens a second of an 8B model in 4 bits on a 4090, and 512 at once 9,300 of Q4_K."""
    _, (found,) = plans("llama-3.1-8b", "--weights", "int4", "--gpu", "rtx-4090")
    rate = found["prefill"]["prompt_tokens"] / found["predicted"]["ttft_s"]["mid"]
    assert 5_000 < rate < 15_000


@pytest.mark.parametrize("model", ["tiny", "llama-3.1-8b", "llama-3.3-70b"])
def test_every_card_plans_small_and_large_models_within_its_memory(model: str) -> None:
    code, found = plans(model, "--gpu", ALL, "--ram", "64GiB")
    assert code == 0 and [each["card"]["name"] for each in found] == list(card_sheets())
    for each in found:
        assert each["fits"] and sum(each["ledger"]["vram"].values()) <= each["limits"]["vram"]
        assert each["limits"]["vram"] < each["card"]["memory_bytes"] and tok_s(each) > 0


def test_ram_is_the_memory_of_the_machine_even_where_this_one_has_less() -> None:
    small, large = (plans("llama-3.3-70b", "--gpu", "4090", "--ram", ram)[1][0] for ram in ("16GiB", "900GiB"))
    assert 14 * GIB < small["limits"]["ram"] < 15 * GIB and 800 * GIB < large["limits"]["ram"] < 820 * GIB
    assert small["token_bytes"]["disk"] > 0 == large["token_bytes"]["disk"]


def test_vram_caps_the_card_and_none_is_the_cpu_alone() -> None:
    capped, free, cpu = (
        plans("llama-3.1-8b", "--gpu", card, *more)[1][0]
        for card, more in (("3090", ("--vram", "4GiB")), ("3090", ()), ("none", ("--ram", "32GiB")))
    )
    assert capped["limits"]["vram"] == 4 * GIB and tok_s(capped) < tok_s(free)
    assert cpu["card"] is None and "vram" not in cpu["limits"] and {b["exec"] for b in cpu["blocks"]} == {"cpu"}


def test_a_table_has_a_line_a_card_that_does_not_wrap_and_tells_the_smallest_and_the_next_step() -> None:
    result = run_cli("plan", "llama-3.1-8b", "--weights", "int4", "--gpu", ALL, "--ram", "32GiB")
    lines = result.out.decode().splitlines()
    assert max(map(len, lines)) <= TABLE_COLUMNS
    rows = [line for line in lines if line.split(" ")[0] in card_sheets()]
    assert len(rows) == len(card_sheets())
    (smallest,) = (line for line in rows if " * " in line)
    assert smallest.split()[2] == "6" and "100/0/0" in smallest
    verdict = next(line for line in lines if line.startswith("* least memory"))
    step = verdict.split("a step up: ")[1].split(",")[0]
    assert find_card(step).memory_gib > 6
    assert any("no kernel was timed on a card yet" in line for line in lines)


def test_a_small_model_has_the_type_of_each_card_and_both_are_named() -> None:
    out = run_cli("plan", "tiny", "--gpu", "t4", "--gpu", "4090").out.decode()
    assert "of fp32 or " in out and "of bf16 weights" in out and "0.5 to 0.7 (peak)" in out


def test_cards_stand_as_they_were_given_and_each_once() -> None:
    _, found = plans("qwen3-0.6b", "--gpu", "4090", "--gpu", "none", "--gpu", "3090", "--gpu", "RTX 4090")
    assert [each["card"] and each["card"]["name"] for each in found] == ["rtx-4090", None, "rtx-3090"]


def test_a_job_of_many_prompts_is_compared_by_all_its_tokens() -> None:
    flags = ("--weights", "int4", "--gpu", "4090", "--gpu", "3090")
    out = run_cli("plan", "llama-3.1-8b", *flags, "--goal", "throughput").out.decode()
    assert "tok/s of up to 32 sequences together" in out
    _, (many, _) = plans("llama-3.1-8b", *flags, "--goal", "throughput")
    _, (one, _) = plans("llama-3.1-8b", *flags)
    assert many["sequences"] == 32 and tok_s(many) > 5 * tok_s(one)


def test_no_card_that_holds_it_is_said_and_one_that_it_does_not_fit_is_a_row() -> None:
    out = run_cli("plan", "llama-3.3-70b", "--gpu", "3060-12gb", "--gpu", "4090", "--ram", "64GiB").out.decode()
    assert "None of these cards holds it all" in out and " *" not in out


def test_what_fits_on_none_is_refused_with_the_numbers() -> None:
    result = run_cli("plan", "llama-3.3-70b", "--gpu", "4090", "--ram", "2GiB")
    assert result.code == 4 and "does not fit" in result.err
    code, (found,) = plans("llama-3.3-70b", "--gpu", "4090", "--ram", "2GiB")
    assert code == 4 and not found["fits"]
    more = found["error"]["fix"].split(", or ")[0].split()
    assert more[0] == "--ram" and plans("llama-3.3-70b", "--gpu", "4090", *more)[0] == 0


def test_advice_keeps_the_other_machine() -> None:
    _, (found,) = plans("llama-3.3-70b", "--gpu", "rtx-3060-12gb", "--ram", "64GiB")
    other = next(line for line in found["advice"] if line.startswith("localllm plan "))
    assert "--gpu rtx-3060-12gb --ram 64GiB" in other
    assert run_cli(*other.split(": ")[0].split()[1:]).code == 0


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--gpu rtx-4080-it", "rtx-4080"),
        ("--gpu 4091", "rtx-4090"),
        ("--gpu gtx-1080", "compute capability 7.5"),
        ("--gpu v100", "compute capability 7.5"),
        ("--gpu 3060", "rtx-3060-12gb"),
        ("--gpu 4090 --device cpu", "--gpu none"),
        ("--gpu 4090 --vram 48GiB", "24.0 GiB"),
        ("--gpu none --vram 4GiB", "--vram"),
        ("--gpu 4090 --speculate mtp", "nobody can draft"),
    ],
)
def test_nonsense_is_refused_by_name(flags: str, named: str) -> None:
    result = run_cli("plan", "mistral-7b", *flags.split())
    assert result.code == 2 and named in result.err and "Traceback" not in result.err


SHAPES = {
    name: model_shape(parse_config(shipped_shapes()[name], name), SIZES["int4-g64"], "bf16", name, "cuda")
    for name in ("qwen3-0.6b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-30b-a3b")
}


def seconds(name: str, card: CardSheet) -> float:
    host = Machine(Memory(64 * GIB, GIB, 64 * GIB), HOST)
    machine = OtherMachine(card).of(host, "int4-g64", None)
    return Search(SHAPES[name], machine, CTX).best().decode_s


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    card=st.sampled_from(sorted(card_sheets())),
    more_memory=st.floats(1.0, 3.0),
    more_bandwidth=st.floats(1.0, 3.0),
)
def test_more_memory_or_bandwidth_never_makes_a_model_slower(
    name: str, card: str, more_memory: float, more_bandwidth: float
) -> None:
    sheet = card_sheets()[card]
    larger = replace(sheet, memory_gib=sheet.memory_gib * more_memory)
    faster = replace(sheet, memory_gbs=sheet.memory_gbs * more_bandwidth)
    own_s = seconds(name, sheet)
    assert seconds(name, larger) <= own_s * 1.001 and seconds(name, faster) <= own_s * 1.001
