"""`run --schema`, `--regex`, `--grammar` and `--strict`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli_support import Result, run_cli

pytestmark = pytest.mark.usefixtures("own_folders", "tried_here")
OWL = {"type": "object", "properties": {"name": {"enum": ["owl", "fox"]}}, "required": ["name"]}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "owl.json"
    path.write_text(json.dumps({**OWL, "additionalProperties": False}))
    return path


def run(model: Path, *arguments: str | Path, **more: bytes) -> Result:
    return run_cli("run", model, "-p", "An owl?", "--seed", "1", *arguments, **more)


def is_cut(result: Result) -> bool:
    """The answer is refused as one that is not whole."""
    return result.code == 7 and result.error_lines[0].startswith("error: the answer is not whole")


def test_an_answer_has_the_form_of_a_schema(model: Path, schema: Path) -> None:
    result = run(model, "--schema", schema, "--strict", "--json")
    assert result.code == 0 and json.loads(result.json["text"])["name"] in ("owl", "fox")
    assert (result.json["complete"], result.json["finish_reason"]) == (True, "stop")


@pytest.mark.parametrize(
    ("name", "source"),
    [("a.gbnf", 'root ::= "yes" | "no"'), ("a.lark", 'start: "yes" | "no"'), ("a.txt", 'root ::= "yes" | "no"\n')],
)
def test_a_grammar_is_told_by_its_ending_or_its_rules(model: Path, tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).write_text(source)
    result = run(model, "--grammar", tmp_path / name, "--strict", "--raw")
    assert result.code == 0 and result.out.strip() in (b"yes", b"no")


def test_a_regular_expression_matches_the_whole_answer(model: Path) -> None:
    result = run(model, "--regex", "[0-9]{2,3}")
    assert result.code == 0 and re.fullmatch(rb"[0-9]{2,3}\n", result.out)


def test_strict_ends_with_7_where_the_answer_was_cut_and_else_that_is_a_warning(model: Path, schema: Path) -> None:
    result = run(model, "--schema", schema, "--strict", "--max-tokens", "3")
    assert is_cut(result) and len(result.out) > 0
    assert "cut after 3 tokens" in result.error_lines[1] and "--max-tokens 512" in result.error_lines[2]
    result = run(model, "--schema", schema, "--max-tokens", "3", "--json")
    assert result.code == 0 and result.json["complete"] is False
    assert result.err.startswith("warning: the answer is not whole")


SEVERAL = ("--n", "6", "--temperature", "1", "--regex", "a|b{40}", "--max-tokens", "4")


def test_strict_insists_on_the_form_of_every_answer_that_is_printed(model: Path) -> None:
    complete = [answer["complete"] for answer in run(model, *SEVERAL, "--json").json["answers"]]
    cut = [str(place) for place, is_whole in enumerate(complete, start=1) if not is_whole]
    assert complete[0] and 1 < len(cut) < 6
    result = run(model, *SEVERAL, "--strict")
    assert result.code == 7 and result.out.count(b"---") == 5
    what, why, fix, *_ = result.error_lines
    assert what == f"error: {len(cut)} of 6 answers are not whole, and do not have the form that was asked for"
    named = f"answers {', '.join(cut[:-1])} and {cut[-1]}"
    assert why.endswith(f"{named} were cut after 4 tokens: the most that one may have")
    assert fix.endswith("--max-tokens 512")
    loose = run(model, *SEVERAL)
    assert loose.code == 0 and f"{len(cut)} of 6 answers are not whole" in loose.err and "answers " in loose.err


def test_each_reason_for_which_answers_were_cut_is_told_with_what_helps(model: Path) -> None:
    several = ("--n", "6", "--temperature", "1", "--regex", "a|b{40}|c{40}", "--max-tokens", "4", "--stop", "c")
    result = run(model, *several, "--strict")
    assert result.code == 7 and "were cut after 4 tokens" in result.error_lines[1]
    assert "ended by the stop string 'c' after" in result.error_lines[1]
    assert "--stop c --strict --max-tokens 512\n" in result.err and "--max-tokens 4 --strict\n" in result.err


@pytest.mark.parametrize("how", [("--best-of", "2", "--temperature", "1"), ("--beams", "2")])
def test_strict_insists_on_the_form_of_an_answer_that_is_chosen(model: Path, how: tuple[str, ...]) -> None:
    whole = run_cli("run", model, "-p", "An owl?", *how, "--regex", "b{3}", "--max-tokens", "4", "--strict")
    assert (whole.code, whole.out) == (0, b"bbb\n")
    assert is_cut(run_cli("run", model, "-p", "An owl?", *how, "--regex", "b{40}", "--max-tokens", "4", "--strict"))


def test_a_whole_answer_goes_before_likelier_ones_that_were_cut(model: Path) -> None:
    several = ("--temperature", "1", "--regex", "c|d{40}", "--max-tokens", "4", "--best-of", "6", "--n")
    answers = run(model, *several, "5", "--json").json["answers"]
    complete = [answer["complete"] for answer in answers]
    assert complete == sorted(complete, reverse=True) and 0 < sum(complete) < 5
    assert max(answers, key=lambda answer: answer["mean_logprob"])["complete"] is False
    for is_whole in (True, False):
        likelihoods = [answer["mean_logprob"] for answer in answers if answer["complete"] is is_whole]
        assert likelihoods == sorted(likelihoods, reverse=True)
    assert run(model, *several, "1", "--strict").code == 0


def test_a_search_that_prints_several_insists_on_all(model: Path) -> None:
    searched = ("--beams", "3", "--n", "3", "--regex", "[ab]{40}", "--max-tokens", "3", "--strict")
    result = run_cli("run", model, "-p", "An owl?", *searched)
    assert result.code == 7 and result.error_lines[0].startswith("error: 3 of 3 answers are not whole")


def test_a_batch_has_one_form_for_all_lines(model: Path, schema: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"An owl?"\n{"prompt": "A fox?", "max_tokens": 2}\n')
    command = ("run", model, "--batch", prompts, "--seed", "1", "--schema", schema)
    loose = run_cli(*command)
    lines = [json.loads(line) for line in loose.out.splitlines()]
    assert [line["complete"] for line in lines] == [True, False]
    assert loose.code == 0 and "1 of 2 answers do not have the form" in loose.err
    strict = run_cli(*command, "--strict")
    texts = [json.loads(line)["text"] for line in strict.out.splitlines()]
    assert strict.code == 7 and texts == [line["text"] for line in lines]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--schema", "SCHEMA", "--regex", "a"], "--schema and --regex cannot go together"),
        (["--regex", "a", "--grammar", "SCHEMA"], "--regex and --grammar cannot go together"),
        (["--strict"], "--strict needs --schema, --regex or --grammar"),
        (["--show-prompt", "--regex", "a"], "--show-prompt and --regex cannot go together"),
        (["--schema", "nothing.json"], "--schema cannot read 'nothing.json'"),
        (["--regex", "(a"], "--regex: the regular expression cannot be used"),
        (["--regex", ""], "--regex is empty"),
        (["--schema", '{"type": "a"}'], """--schema takes a file, and '{"type": "a"}' reads like a JSON Schema"""),
        (["--schema", f'{{"enum": ["{"a" * 400}"]}}'], '--schema takes a file, and \'{"enum": ["aaaa'),
        (["--grammar", 'root ::= "a"'], "--grammar takes a file, and 'root ::= \"a\"' reads like a grammar"),
        (["--grammar", 'start: "a"'], "--grammar takes a file, and 'start: \"a\"' reads like a grammar"),
        (["--grammar", "nothing.gbnf"], "--grammar cannot read 'nothing.gbnf'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(model: Path, schema: Path, flags: list[str], says: str) -> None:
    result = run(model, *(str(schema) if each == "SCHEMA" else each for each in flags))
    assert (result.code, result.out) == (2, b"") and says in result.error_lines[0]


def test_a_form_that_is_typed_in_place_of_its_file_is_told_where_it_can_stand(model: Path) -> None:
    result = run(model, "--schema", '{"type": "object"}')
    assert "write it into a file, or pipe it in (--schema -)" in result.error_lines[1]
    assert result.error_lines[2].endswith("-p 'An owl?' --seed 1 --schema FILE")


@pytest.mark.parametrize("flag", ["--schema", "--grammar"])
def test_a_form_is_read_from_standard_input(model: Path, flag: str) -> None:
    source = {"--schema": b'{"enum": ["yes", "no"]}', "--grammar": b'root ::= "\\"yes\\"" | "\\"no\\""'}[flag]
    result = run_cli("run", model, "-p", "An owl?", flag, "-", "--strict", stdin=source)
    assert result.code == 0 and json.loads(result.out) in ("yes", "no")


@pytest.mark.parametrize("flag", ["--schema", "--grammar"])
def test_a_form_of_nothing_is_told_so(model: Path, tmp_path: Path, flag: str) -> None:
    (tmp_path / "blank").write_text(" \n")
    piped = run_cli("run", model, "-p", "An owl?", flag, "-", stdin=b"")
    assert piped.code == 2 and f"{flag} - is empty" in piped.error_lines[0] and "piped in" in piped.error_lines[1]
    read = run_cli("run", model, "-p", "An owl?", flag, tmp_path / "blank")
    assert read.code == 2 and "blank is empty" in read.error_lines[0] and read.error_lines[2].endswith(f"{flag} FILE")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(
            (["--schema", "-", it, "-"], [f"--schema - and {it} - cannot go together", "", f"{it} - --schema FILE"])
            for it in ("--file", "--messages", "--batch")
        ),
        (["--schema", "-"], ["there is no prompt", "what is piped in is the answer's form", "--schema - -p TEXT"]),
        (["--batch", "prompts.jsonl", "--strict"], ["--strict needs", "", "prompts.jsonl --strict --schema FILE"]),
    ],
)
def test_what_is_missing_beside_a_form_is_told_with_a_command(
    model: Path, arguments: list[str], says: list[str]
) -> None:
    result = run_cli("run", model, *arguments, stdin=b"{}")
    assert result.code == 2 and all(said in line for said, line in zip(says, result.error_lines[:3], strict=True))
    assert result.error_lines[2].endswith(says[2])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('{"a": 1,\n  "b": }', "line 2, column 8"),
        ('{"items": {"contains": {}, "if": {}}}', "'contains' is not supported (#/items/contains); 'if'"),
    ],
)
def test_a_bad_schema_is_refused_by_its_file_and_place(model: Path, tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "bad.json").write_text(source)
    result = run(model, "--schema", tmp_path / "bad.json")
    assert result.code == 2 and f"--schema {tmp_path / 'bad.json'}" in result.error_lines[0]
    assert says in result.error_lines[1]
