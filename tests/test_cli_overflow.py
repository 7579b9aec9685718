"""What `chat` and `run` do where a conversation is longer than the context, and what they tell of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli_support import Result, run_cli

ALIKE = ("--max-tokens", "4", "--seed", "1", "--ctx", "128", "--cache-disk", "off")
QUESTIONS = [f"question {number} about the fox" for number in range(8)]


@pytest.fixture
def talk(talk: Callable[..., Result]) -> Callable[..., Result]:
    return lambda *lines, flags=(): talk(*lines, flags=(*ALIKE, *flags))


def saved(tmp_path: Path) -> list[dict[str, str]]:
    return json.loads((tmp_path / "chat.json").read_text())["messages"]


def evictions(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if "left the context" in line]


def test_turns_leave_the_context_and_are_told_and_the_chat_stays_whole(talk, tmp_path: Path) -> None:
    result = talk(*QUESTIONS, "/save chat.json", flags=("--overflow", "evict", "-s", "be brief"))
    assert result.code == 0 and len(evictions(result)) >= 3
    assert re.fullmatch(r"\d turns? left the context \(\d+ of \d+ tokens\), from 'question 0 .*'", evictions(result)[0])
    messages = saved(tmp_path)
    assert [message["content"] for message in messages if message["role"] == "user"] == QUESTIONS
    exported = run_cli("sessions", "export", "last", "--format", "json")
    assert exported.out.decode().count("about the fox") >= len(QUESTIONS)


def test_what_has_left_stays_out_until_there_is_room_and_tokens_says_how_much_that_is(talk) -> None:
    flags = ("--overflow", "evict")
    result = talk(*QUESTIONS, "/tokens", *["/undo"] * 6, "again", "/tokens", flags=flags)
    first, second = (line for line in result.err.splitlines() if "of the context are used" in line)
    assert int(first.split()[0]) <= 128 and int(second.split()[0]) <= 128
    assert result.err.count("messages have left it") == 1
    again = result.err[result.err.index("removed the last") :]
    assert "left the context" not in again


def test_clear_begins_with_an_empty_context(talk) -> None:
    result = talk(*QUESTIONS, "/clear", "one", "/tokens", flags=("--overflow", "evict"))
    assert "messages have left it" not in result.err


def test_stop_says_what_is_too_much_and_what_would_help_in_the_chat(talk) -> None:
    result = talk(*QUESTIONS[:4])
    assert result.code == 5 and "the context 128" in result.error_lines[0]
    assert "without the oldest of its 4 turns it would fit" in result.error_lines[1]
    fix = "/undo, /clear, /set overflow evict, /set overflow grow, or start again with --ctx 512"
    assert result.error_lines[2] == f"fix:   {fix}"


def test_the_policy_is_changed_while_a_chat_goes_on(talk) -> None:
    result = talk(*QUESTIONS[:4], "/set overflow evict", QUESTIONS[4], "/set overflow sideways")
    assert len(evictions(result)) == 1 and "one of stop, evict, grow" in result.err


def test_a_question_that_does_not_fit_alone_is_an_error_and_the_chat_goes_on(talk, tmp_path: Path) -> None:
    result = talk("one", "x " * 150, "two", "/save chat.json", flags=("--overflow", "evict"))
    assert "even the last question alone" in result.err and not evictions(result)
    assert [message["content"] for message in saved(tmp_path) if message["role"] == "user"] == ["one", "two"]


def test_the_context_grows_in_a_chat_and_the_text_is_that_of_a_large_one(talk) -> None:
    grown = talk(*QUESTIONS, flags=("--overflow", "grow"))
    assert "the context grew from 128 to 256 tokens" in grown.err
    assert "the context grew from 256 to 512 tokens" in grown.err
    assert (grown.code, grown.out) == (0, talk(*QUESTIONS, flags=("--ctx", "512")).out)


def test_a_chat_tells_once_that_the_context_is_nearly_full_and_statistics_each_time(talk) -> None:
    result = talk(*QUESTIONS[:3], "/regen")
    notes = [line for line in result.err.splitlines() if line.startswith("the context is")]
    assert len(notes) == 1
    assert re.fullmatch(r"the context is 8\d% full \(\d+ of 128 tokens\); once .*: /undo, /clear, or /set .*", notes[0])
    assert talk("one", flags=("--stats",)).err.count("context ") == 1


def test_tokens_shows_a_bar_and_who_has_how_much(talk) -> None:
    lines = talk("one", "two", "/tokens", flags=("-s", "be brief")).err.splitlines()
    (bar,) = (line for line in lines if line.startswith("["))
    counts = {name: int(count) for name, count in re.findall(r"(system|history|question|answer|template) (\d+)", bar)}
    (total,) = (int(line.split()[0]) for line in lines if "of the context are used" in line)
    assert sum(counts.values()) == total and all(counts.values())
    assert len(bar[1 : bar.index("]")]) == 40


def messages_file(tmp_path: Path, turns: int) -> Path:
    said = []
    for number in range(turns):
        said += [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "the fox " * 4}]
    path = tmp_path / "messages.json"
    path.write_text(json.dumps([{"role": "system", "content": "be brief"}, *said[:-1]]))
    return path


def run(model: Path, *arguments: str | Path) -> Result:
    return run_cli("run", model, *ALIKE, *arguments)


def test_run_names_in_its_json_what_left_and_how_full_the_context_is(model: Path, tmp_path: Path) -> None:
    path = messages_file(tmp_path, 12)
    assert run(model, "--messages", path, "--json").code == 5
    result = run(model, "--messages", path, "--json", "--overflow", "evict")
    assert result.json["evicted_turns"] > 0 and result.json["evicted_tokens"] > 0
    assert f"{result.json['evicted_turns']} turns left the context" in result.err
    assert result.json["context"] == {"used": result.json["usage"]["prompt_tokens"] + 4, "limit": 128}
    assert result.json["usage"]["prompt_tokens"] <= 128 * 0.75


def test_run_tells_of_a_context_that_grew(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the prompt that it grew for, however long that takes."""
    monkeypatch.setattr("localllm.engine.step._REPORT_S", -1.0)
    path = messages_file(tmp_path, 12)
    result = run(model, "--messages", path, "--jsonl", "--overflow", "grow")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["type"] for line in lines][:3] == ["start", "context", "prefill"]
    assert (lines[1]["before"], lines[1]["limit"]) == (128, 512)
    for flags in ([], ["--no-stream"], ["--json"]):
        assert "the context grew from 128 to 512" in run(model, "--messages", path, "--overflow", "grow", *flags).err
    assert lines[-1]["context"]["limit"] == 512


def test_run_says_how_many_characters_are_too_many(model: Path) -> None:
    for flags in ([], ["--raw"]):
        result = run(model, "-p", "y " * 140, *flags)
        assert result.code == 5 and re.search(r"about 1\d\d of 280 characters are too many", result.error_lines[1])
        assert "--ctx 512" in result.err and "--overflow grow" in result.err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("-p x --raw --overflow evict", "--raw and --overflow evict"),
        ("-p x --show-prompt --overflow evict", "--show-prompt and --overflow"),
        ("--batch - --overflow grow", "--batch and --overflow"),
    ],
)
def test_a_policy_that_would_do_nothing_is_refused(model: Path, line: str, named: str) -> None:
    result = run_cli("run", model, *line.split())
    assert result.code == 2 and named in result.error_lines[0]


def test_the_policy_is_a_setting_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_OVERFLOW", "evict")
    assert run(model, "--messages", messages_file(tmp_path, 12), "--json").json["evicted_turns"] > 0
