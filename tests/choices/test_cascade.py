"""`localllm run --cascade`: who answers, and what is said of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.chat.cascade import Bar, judged
from localllm.cli.interrupts import Interrupts
from localllm.engine.events import FinishedEvent, Timings, Usage
from tests.cli_support import Result, run_cli, write_checkpoint
from tests.speaker import write_speaker

pytestmark = pytest.mark.usefixtures("own_folders")
SURE = "Once upon a time."
PROMPT = ("-p", "the fox", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """sure: says the same always; unsure: of random weights; short: as sure, with room for few tokens."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "sure": write_speaker(folder / "sure", [SURE]),
        "unsure": write_checkpoint(folder / "unsure", seed=1),
        "short": write_checkpoint(folder / "short", seed=2, context=8),
    }


@pytest.fixture
def run(models: dict[str, Path]) -> Callable[..., Result]:
    """A command line with these models, by their names here."""

    def line(names: str, *arguments: str, code: int = 0) -> Result:
        cascade = ",".join(str(models.get(name, name)) for name in names.split(","))
        result = run_cli("run", "--cascade", cascade, *(arguments or PROMPT))
        assert result.code == code, result.err
        return result

    return line


def ending(mean: float | None, *, meets: bool | None = None, used: int = 9, reason: Any = "stop") -> FinishedEvent:
    usage = Usage(prompt_tokens=used - 1, completion_tokens=1)
    return FinishedEvent(0, reason, usage, Timings(), ctx=64, mean_logprob=mean, meets_grammar=meets)


@pytest.mark.parametrize(
    ("names", "accept", "answers"),
    [
        ("sure,unsure", "0.9", "sure"),
        ("unsure,sure", "0.001", "unsure"),
        ("unsure,sure", "0.9", "sure"),
        ("unsure,short,sure", "1", "sure"),
    ],
)
def test_the_first_model_that_is_sure_enough_answers(
    run: Callable[..., Result], models: dict[str, Path], names: str, accept: str, answers: str
) -> None:
    reply = run(names, *PROMPT, "--accept", accept, "--json").json
    asked = names.split(",")[: names.split(",").index(answers) + 1]
    alone = run_cli("run", models[answers], *PROMPT, "--json", "--private").json
    assert (reply["model"], reply["text"]) == (alone["model"], alone["text"])
    assert [each["model"] for each in reply["cascade"]] == [str(models[name]) for name in asked]
    assert [each["accepted"] for each in reply["cascade"]] == [name == answers for name in asked]
    kept = run_cli("sessions", "show", reply["session"], "--json").json
    assert [each["role"] for each in kept["messages"]] == ["user", "assistant"]
    assert kept["messages"][-1]["model"] == str(models[answers])


def test_the_confidence_is_the_mean_probability_of_the_tokens(run: Callable[..., Result]) -> None:
    reply = run("unsure,sure", *PROMPT, "--json", "--accept", "0.001", "--logprobs", "0").json
    mean = sum(each["logprob"] for each in reply["logprobs"]) / len(reply["logprobs"])
    assert reply["cascade"][0]["confidence"] == pytest.approx(math.exp(mean), abs=1e-3)


@pytest.mark.parametrize("names", ["sure,unsure", "unsure,sure"])
def test_events_are_those_of_the_model_that_answers(run: Callable[..., Result], names: str) -> None:
    whole = run(names, *PROMPT, "--json").json
    start, *events = map(json.loads, run(names, *PROMPT, "--jsonl").out.splitlines())
    assert start["type"] == "start" and start["model"] == whole["model"]
    assert start["cascade"] == whole["cascade"]
    assert [each["token_id"] for each in events if each["type"] == "token"] == whole["token_ids"]
    assert events[-1]["type"] == "finish" and "".join(each.get("text", "") for each in events) == whole["text"]
    assert all("index" not in each for each in events)


def test_text_alone_is_printed_and_who_said_it_is_told_with_stats(run: Callable[..., Result]) -> None:
    quiet = run("unsure,sure")
    assert quiet.out.decode() == SURE + "\n" and not quiet.err
    err = run("unsure,sure", *PROMPT, "--stats").err
    assert "unsure is not sure: confidence 0." in err and "0.7 is enough" in err
    assert "sure has answered: confidence 1.00" in run("sure,unsure", *PROMPT, "--stats").err


def test_drafts_that_agree_are_given_and_others_are_not(run: Callable[..., Result]) -> None:
    drawn = ("-p", "the fox", "--max-tokens", "6", "--temperature", "1", "--seed", "5", "--agree", "3", "--json")
    (tried,) = run("sure,unsure", *drawn).json["cascade"]
    assert tried["confidence"] == 1 and tried["accepted"]
    reply = run("unsure,sure", *drawn).json
    assert reply["cascade"][0]["confidence"] == pytest.approx(1 / 3, abs=1e-3) and reply["text"] == SURE


@given(
    st.lists(st.sampled_from(["Paris.", "paris", "  PARIS ", "Lyon", "lyon.", ""]), min_size=2, max_size=8),
    st.floats(0.01, 1),
)
def test_of_drafts_the_most_frequent_one_is_judged_by_its_share(texts: Sequence[str], accept: float) -> None:
    judgement = judged(Bar(accept, len(texts)), texts, [ending(None)] * len(texts))
    votes = [sum(text.strip(" .").lower() == city for text in texts) for city in ("paris", "lyon")]
    if not any(votes):
        assert not judgement.is_accepted and judgement.confidence is None
        return
    assert judgement.confidence == max(votes) / len(texts)
    assert judgement.is_accepted == (judgement.confidence >= accept)
    assert texts[judgement.place].strip()


@pytest.mark.parametrize(
    ("finished", "fault"),
    [
        (ending(-0.01, meets=False), "answer does not have the form"),
        (ending(-0.01, meets=False, reason="length"), "cut after 1 token, and does not have the form"),
        (ending(-0.01, used=64, reason="length"), "its context of 64 tokens is full"),
        (ending(None), ""),
    ],
    ids=["grammar", "cut", "context", "nothing"],
)
def test_what_is_no_whole_answer_is_never_given(finished: FinishedEvent, fault: str) -> None:
    judgement = judged(Bar(0.001), ["Paris"], [finished])
    assert not judgement.is_accepted and fault in judgement.fault
    assert not judged(Bar(0.001), [" "], [ending(-0.01)]).is_accepted
    assert judged(Bar(0.001), [" "], [ending(-0.01)]).fault == "its answer is empty"
    assert judged(Bar(1.0), ["Paris"], [ending(0.0)]).is_accepted


def test_a_prompt_that_a_model_has_no_room_for_goes_to_the_next(run: Callable[..., Result]) -> None:
    reply = run("short,sure", "-p", "the fox found a lantern", "--overflow", "stop", "--json").json
    assert reply["text"] == SURE
    assert [(each["confidence"], each["accepted"]) for each in reply["cascade"]] == [(None, False), (None, True)]


@pytest.mark.parametrize("names", ["sure,unsure", "unsure,sure"])
def test_who_stops_the_first_answer_gets_none(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    @contextmanager
    def at_once(_interrupts: Interrupts, stop: Callable[[], None]) -> Iterator[None]:
        stop()
        yield

    monkeypatch.setattr(Interrupts, "stopping", at_once)
    result = run(names, code=130)
    assert not result.out and "stopped before the answer was judged" in result.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--cascade {sure}", "--cascade is "),
        ("--cascade {sure},", "--cascade is "),
        ("--cascade {sure},{sure}", "twice"),
        ("--cascade {sure},nobody/knows-it", "nobody/knows-it"),
        ("--cascade {sure},{unsure} --accept 0", "--accept is 0"),
        ("--cascade {sure},{unsure} --accept 1.5", "--accept is 1.5"),
        ("--cascade {sure},{unsure} --agree 1", "--agree is 1"),
        ("--cascade {sure},{unsure} --agree 3 --temperature 0", "3 answers at temperature 0"),
        ("--cascade {sure},{unsure} -m {sure}", "--cascade and the model"),
        ("--cascade {sure},{unsure} --n 2", "--cascade and --n"),
        ("--cascade {sure},{unsure} --best-of 2", "--cascade and --best-of"),
        ("--cascade {sure},{unsure} --beams 2", "--cascade and --beams"),
        ("--cascade {sure},{unsure} --adapter x", "--cascade and --adapter"),
        ("--cascade {sure},{unsure} --logit-bias 1=2", "--cascade and --logit-bias"),
        ("--cascade {sure},{unsure} --show-prompt", "--cascade and --show-prompt"),
        ("--accept 0.5", "--accept needs --cascade"),
        ("--agree 3", "--agree needs --cascade"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, flags: str, named: str
) -> None:
    def no_engine(*_: object, **__: object) -> None:
        raise AssertionError("an engine was loaded")

    monkeypatch.setattr("localllm.cli.load_progress.open_engine", no_engine)
    result = run_cli("run", "-p", "the fox", *flags.format(**models).split())
    assert result.code in (2, 3) and named in result.error_lines[0] and not result.out


@pytest.mark.parametrize(
    ("command", "cascade", "fix"),
    [
        ("run -p hi", "{sure}", "localllm run -p hi --cascade tiny,{sure}"),
        ("run -p hi", "{sure},,{unsure}", "localllm run -p hi --cascade {sure},{unsure}"),
        ("run -p hi", "{unsure},{sure},{unsure}", "localllm run -p hi --cascade {unsure},{sure}"),
        ("run -p hi", "tiny", "name two models of `localllm list`, the cheaper first: --cascade SMALL,LARGE"),
        ("run -p hi", "{sure};{unsure}", "localllm run -p hi --cascade {sure},{unsure}"),
        ("run", "{sure},{unsure}", "localllm run --cascade {sure},{unsure} -p 'Tell me a tale about a fox.'"),
        ("run --batch f --accept 0.5", "{sure},{unsure}", "localllm run --batch f"),
        ("run -p hi --n 2", "{sure},{unsure}", "localllm run -p hi --cascade {sure},{unsure}"),
        ("run tale", "{sure},{unsure}", "leave 'tale' out, or write -p tale where it is the prompt"),
        ("serve tiny", "{sure},{unsure}", "leave 'tiny' out"),
    ],
)
def test_the_fix_of_a_wrong_cascade_is_a_line_to_type_where_it_can_be_known(
    models: dict[str, Path], command: str, cascade: str, fix: str
) -> None:
    refused = run_cli(*command.split(), "--cascade", cascade.format(**models))
    assert refused.error_lines[2] == f"fix:   {fix.format(**models)}"


def test_a_job_and_a_cascade_cannot_go_together(models: dict[str, Path]) -> None:
    cascade = f"{models['sure']},{models['unsure']}"
    result = run_cli("run", "--cascade", cascade, "--batch", "-", stdin=b'{"prompt": "the fox"}\n')
    assert result.code == 2 and "--cascade and --batch" in result.error_lines[0]


def test_a_context_that_the_large_model_takes_is_no_bar_to_a_small_one(run: Callable[..., Result]) -> None:
    told = run("short,sure", *PROMPT, "--ctx", "32", "--accept", "1")
    assert "takes 8 tokens of context, not 32" in told.err and told.out.decode().strip()
    refused = run("unsure,short", *PROMPT, "--ctx", "32", "--accept", "1", code=2)  # the last one must take it
    assert "--ctx" in refused.err
