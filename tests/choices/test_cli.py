"""`localllm run` with --n, --best-of and --beams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.choices import SEPARATOR
from localllm.cli.interrupts import Interrupts
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams
from tests.cli_support import run_cli
from tests.engine_support import answered

pytestmark = pytest.mark.usefixtures("own_folders")
PROMPT = ("--raw", "-p", "the fox", "--max-tokens", "6")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    engine = Engine.load(model, reuse=NO_REUSE)
    yield engine
    engine.close()


def run(model: Path, *arguments: str) -> Any:
    result = run_cli("run", model, *PROMPT, *arguments)
    assert result.code == 0, result.err
    return result


def expected(engine: Engine, seed: int, **more: Any) -> Any:
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=6)
    return answered(engine, Request(tuple(engine.encode("the fox")), sampling, **more))[0]


def test_several_answers_have_a_line_between_them(model: Path, alone: Engine) -> None:
    drawn = ("--temperature", "1", "--seed", "5")
    texts = [expected(alone, seed).text for seed in (5, 6, 7)]
    for more in ((), ("--no-stream",)):
        out = run(model, "--n", "3", *drawn, *more).out.decode()
        assert out == f"\n{SEPARATOR}\n".join(texts) + "\n"


def test_as_json_they_are_an_array(model: Path, alone: Engine) -> None:
    reply = run(model, "--n", "2", "--temperature", "1", "--seed", "5", "--json", "--logprobs", "1").json
    assert [answer["index"] for answer in reply["answers"]] == [0, 1]
    assert [answer["token_ids"] for answer in reply["answers"]] == [expected(alone, seed).token_ids for seed in (5, 6)]
    assert [answer["seed"] for answer in reply["answers"]] == [5, 6]
    assert all(len(answer["logprobs"]) == 6 for answer in reply["answers"])
    assert reply["schema_version"] == 1 and "text" not in reply


def test_as_events_each_names_its_answer(model: Path, alone: Engine) -> None:
    lines = run(model, "--n", "2", "--temperature", "1", "--seed", "5", "--jsonl").out.splitlines()
    start, *events = map(json.loads, lines)
    assert start["answers"] == 2 and start["type"] == "start"
    for index in (0, 1):
        own = [event for event in events if event["index"] == index]
        assert [event["token_id"] for event in own if event["type"] == "token"] == expected(alone, 5 + index).token_ids
        assert own[-1]["type"] == "finish"


def test_the_best_of_several_is_the_likeliest(model: Path, alone: Engine) -> None:
    scored = [expected(alone, seed, is_scored=True) for seed in range(5, 10)]
    ranked = sorted(scored, key=lambda heard: heard.finished.mean_logprob, reverse=True)
    drawn = ("--temperature", "1", "--seed", "5", "--best-of", "5")
    assert run(model, *drawn).out.decode() == ranked[0].text + "\n"
    two = run(model, *drawn, "--n", "2", "--json").json["answers"]
    assert [answer["token_ids"] for answer in two] == [heard.token_ids for heard in ranked[:2]]
    one = run(model, *drawn, "--json", "--stats")
    assert one.json["token_ids"] == ranked[0].token_ids and one.json["mean_logprob"] < 0
    assert "log-probability -" in one.err


def test_beams_search_the_answer(model: Path, alone: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=6)
    request = Request(tuple(alone.encode("the fox")), sampling, beams=4, num_answers=3)
    heard = answered(alone, request)[0]
    others = ["".join(getattr(event, "text", "") for event in events) for events in heard.finished.others]
    assert run(model, "--beams", "4").out.decode() == heard.text + "\n"
    assert run(model, "--beams", "4", "--json").json["token_ids"] == heard.token_ids
    several = run(model, "--beams", "4", "--n", "3").out.decode()
    assert several == f"\n{SEPARATOR}\n".join([heard.text, *others]) + "\n"
    events = [json.loads(line) for line in run(model, "--beams", "4", "--n", "3", "--jsonl").out.splitlines()]
    assert [event["index"] for event in events if event["type"] == "finish"] == [0, 1, 2]


def test_of_several_answers_all_are_told_of_that_the_context_cut(model: Path) -> None:
    result = run_cli("run", model, "--raw", "-p", "the fox", "--n", "3", "--seed", "5", "--ctx", "64")
    assert result.code == 0 and "warning: 3 of 3 answers were cut: the context of 64 tokens is full" in result.err


@pytest.mark.parametrize("how", [("--n", "3"), ("--best-of", "3"), ("--beams", "3")])
def test_the_chat_keeps_the_answer_that_is_printed_first(model: Path, how: tuple[str, str]) -> None:
    drawn = () if how[0] == "--beams" else ("--temperature", "1", "--seed", "5")
    answer = run_cli("run", model, "-p", "the fox", "--max-tokens", "6", *how, *drawn, "--json").json
    text = answer["answers"][0]["text"] if "answers" in answer else answer["text"]
    kept = run_cli("sessions", "show", answer["session"], "--json").json
    assert [message["content"] for message in kept["messages"]][-1].strip() == text.strip()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--n 0", "--n is 0"),
        ("--n 17", "--n is 17"),
        ("--best-of 17", "--best-of is 17"),
        ("--beams 17", "--beams is 17"),
        ("--n 3 --best-of 2", "--best-of 2 is less than --n 3"),
        ("--n 3 --beams 2", "--n 3 is more than --beams 2"),
        ("--beams 2 --best-of 2", "--beams and --best-of"),
        ("--beams 2 --temperature 0.5", "--beams and --temperature 0.5"),
        ("--beams 2 --seed 1", "--beams and --seed"),
        ("--beams 2 --top-k 5", "--beams and --top-k"),
        ("--n 2 --temperature 0", "2 answers at temperature 0"),
        ("--best-of 2 --temperature 0", "2 answers at temperature 0"),
        ("--best-of 2 --jsonl", "--best-of and --jsonl"),
        ("--n 2 --show-prompt", "--n and --show-prompt"),
        ("--n 2 --continue", "--n and --continue"),
        ("--n 2 --session fox", "--n and --session"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(model: Path, flags: str, named: str) -> None:
    result = run_cli("run", model, "-p", "the fox", *flags.split())
    assert result.code == 2 and named in result.error_lines[0] and not result.out


def test_a_job_has_one_answer_a_line(model: Path) -> None:
    result = run_cli("run", model, "--batch", "-", "--n", "2", stdin=b'{"prompt": "the fox"}\n')
    assert result.code == 2 and "--n and --batch" in result.error_lines[0]


@pytest.mark.parametrize("how", [("--n", "3"), ("--best-of", "3"), ("--beams", "3"), ("--n", "2", "--json")])
def test_when_they_are_stopped_what_was_said_is_printed(
    model: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    @contextmanager
    def at_once(_interrupts: Interrupts, stop: Callable[[], None]) -> Iterator[None]:
        stop()
        yield

    monkeypatch.setattr(Interrupts, "stopping", at_once)
    drawn = () if how[0] == "--beams" else ("--temperature", "1")
    result = run_cli("run", model, "-p", "the fox", *drawn, *how)
    assert result.code == 130 and "stopped after" in result.err and "error" not in result.err


def test_an_answer_that_fails_is_told_of_when_the_others_are_printed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.engine.sampler import next_token
    from localllm.errors import LocalLLMError

    def fail_second(logits: Any, sequence: Any, token_ids: Any) -> int:
        if sequence.request_id == 1 and sequence.num_completion_tokens == 3:
            raise LocalLLMError("the second one has failed")
        return next_token(logits, sequence, token_ids)

    monkeypatch.setattr("localllm.engine.step.next_token", fail_second)
    result = run_cli("run", model, *PROMPT, "--n", "3", "--temperature", "1", "--seed", "5")
    assert result.code != 0 and "the second one has failed" in result.err
    assert result.out.decode().count(SEPARATOR) == 2
