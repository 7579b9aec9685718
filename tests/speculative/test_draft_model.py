"""A second model that drafts: what is refused, what is left out, and that it changes no token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.oracle import FixedCount
from localllm import Engine, SamplingParams, hub
from localllm.engine import loader, planner
from localllm.engine.loader import Watcher
from localllm.engine.speculative.speculator import Speculation
from localllm.errors import ModelNotFoundError, UsageError
from localllm.offload.planner.machine import Memory
from localllm.settings import EngineConfig
from tests.cli_support import run_cli
from tests.engine_support import generated
from tests.speculative.support import swap_two_words

PROMPT = tuple(range(40, 90))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model in a folder of its own."""
    folder = tmp_path_factory.mktemp("twin")
    shutil.copytree(hub.locate("tiny").directory, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "why_left_out", lambda *_: "")


def text(engine: Engine, **sampling: object) -> list[int]:
    return generated(engine, PROMPT, 40, **sampling)


def engine(who: str, notes: list[str] | None = None, ctx: int | None = None) -> Engine:
    heard: Callable[[str], None] = (lambda _text: None) if notes is None else notes.append
    engine = Engine.load("tiny", EngineConfig(device="cpu", ctx=ctx, speculate=who), watcher=Watcher(noting=heard))
    engine.speculation = Speculation(engine.residency, None, engine.speculation._drafters, 5, FixedCount)
    return engine


def test_it_drafts_and_changes_nothing(twin: Path, always_worth_it: None) -> None:
    plain, drafting = engine("off"), engine(f"model:{twin}")
    assert drafting.plan is not None and drafting.plan.ledger["ram"]["draft"] > 5e6
    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 4}):
        expected = text(plain, **sampling)
        assert text(drafting, **sampling) == expected
    events = list(drafting.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    told = events[-1].speculation  # type: ignore[union-attr]
    assert told.drafter == f"model:{twin}" and told.accepted > 0.6 * told.drafted  # the same model, other roundings
    assert told.tokens_per_pass > 3
    (drafter,) = drafting.speculation._drafters
    assert not drafter._kvs  # type: ignore[attr-defined]
    plain.close()
    drafting.close()


def test_one_that_reads_a_shorter_context_stops_drafting_there(
    twin: Path, tmp_path: Path, always_worth_it: None
) -> None:
    short = tmp_path / "short"
    shutil.copytree(twin, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 70}))
    plain, drafting = engine("off"), engine(f"model:{short}")
    assert text(drafting) == text(plain)
    plain.close()
    drafting.close()


def test_another_tokenizer_is_refused_with_the_difference(twin: Path, tmp_path: Path, model: Path) -> None:
    with pytest.raises(UsageError) as caught:
        engine(f"model:{model}")
    assert "another tokenizer" in caught.value.what and "tokens" in caught.value.why
    other = Path(shutil.copytree(twin, tmp_path / "other"))
    words = swap_two_words(other)
    with pytest.raises(UsageError) as caught:
        engine(f"model:{other}")
    assert repr(min(words, key=repr)) in caught.value.why and "600" in caught.value.why


def test_a_model_that_is_not_here_is_named() -> None:
    with pytest.raises(ModelNotFoundError):
        engine("model:no-such-model")


def test_one_that_would_not_pay_is_left_out_and_that_is_said(twin: Path) -> None:
    notes: list[str] = []
    drafting = engine(f"model:{twin}", notes)  # as large as the model that it would draft for
    assert len(notes) == 1 and "does not draft" in notes[0] and "tok/s" in notes[0]
    assert not drafting.speculation.is_on
    drafting.close()


def test_one_that_does_not_fit_is_left_out_and_that_is_said(twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = engine("off", ctx=256)
    assert roomy.plan is not None
    taken = roomy.plan.total_bytes("ram") - roomy.plan.ledger["ram"]["program"]
    roomy.close()
    monkeypatch.setattr(planner, "process_memory", lambda *_, **__: Memory(taken + (1 << 20), 0, taken + (1 << 20)))
    monkeypatch.setattr(planner.DraftShape, "num_bytes", lambda *_: taken)
    notes: list[str] = []
    drafting = engine(f"model:{twin}", notes, ctx=256)
    assert len(notes) == 1 and "for which there is no room" in notes[0]
    drafting.close()


def test_memory_that_ends_while_it_is_loaded_leaves_it_out(twin: Path, always_worth_it: None) -> None:
    notes: list[str] = []
    with mock.patch.object(loader, "Residency", side_effect=MemoryError):
        drafting = engine(f"model:{twin}", notes)
    assert len(notes) == 1 and "too little memory" in notes[0]
    assert len(text(drafting)) == 40
    drafting.close()


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--speculate", "eagle", "auto, off, ngram, skip, mtp, or model:NAME"),
        ("--speculate", "model:", "or model:NAME"),
        ("--speculate", "model: ", "or model:NAME"),
        ("--draft-tokens", "16", "from 0 to 15"),
        ("--draft-tokens", "-1", "from 0 to 15"),
        ("--speculate", "model:no-such-model", "--speculate model:no-such-model: there is no model"),
    ],
)
def test_the_command_line_refuses_what_cannot_draft(own_folders: None, flag: str, value: str, said: str) -> None:
    result = run_cli("run", "tiny", "-p", "x", flag, value)
    assert result.code != 0 and said in result.err and "Traceback" not in result.err


def test_a_second_model_from_the_environment_is_named_there(own_folders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_SPECULATE", "model:no-such-model")
    result = run_cli("run", "tiny", "-p", "x")
    assert result.code == 3 and "the setting speculate is from LOCALLLM_SPECULATE" in result.err


def test_a_second_model_with_a_torn_tokenizer_names_its_folder(own_folders: None, twin: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(twin, torn)
    (torn / "tokenizer.json").write_text("{")
    result = run_cli("run", "tiny", "-p", "x", "--speculate", f"model:{torn}")
    assert result.code != 0 and f"copy the model's files into {torn} anew" in result.err


@pytest.mark.parametrize("who", ["off", "ngram", "skip", "auto"])
def test_the_command_line_says_what_came_of_it(own_folders: None, who: str) -> None:
    flags = ("--temperature", "0", "--max-tokens", "12", "--json", "--private")
    told = json.loads(run_cli("run", "tiny", "-p", "a a a a a a", *flags, "--speculate", who).out)["speculation"]
    if who == "off":
        assert told is None
        return
    assert told["drafter"] == {"auto": "ngram+skip"}.get(who, who)
    assert 0 <= told["accepted"] <= told["drafted"] and told["tokens_per_pass"] >= 1
