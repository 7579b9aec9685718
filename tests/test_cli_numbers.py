"""Every flag that takes a number refuses what is none in the same form, with a line that works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.cli.app import COMMANDS, load_command
from localllm.settings import Accepts
from tests.cli_support import run_cli
from tests.thinning import every_other

REQUIRED = {"quantize": ["tiny"], "perplexity": ["tiny", "--file", "x"]}


def numeric_flags() -> Iterator[tuple[list[str], str, Accepts]]:
    """Every command, the flags of it that take a number, and what they accept."""
    for name in COMMANDS:
        command = load_command(name)
        for parameter in command.params:
            if re.search(r"\b(int|float)\b", str(parameter.type_descriptor.annotation)):
                yield (
                    [name, *REQUIRED.get(name, [])],
                    parameter.opts[0],
                    command.callback.parameters[parameter.name].accepts,
                )


FLAGS = list(numeric_flags())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))


def test_the_commands_have_flags_that_take_numbers() -> None:
    assert len(FLAGS) > 40


IDS = [f"{command[0]} {flag}" for command, flag, _ in FLAGS]
TYPED = ["many", "", "-1000", "nan", "1" + "0" * 400]


@pytest.mark.parametrize(("command", "flag", "accepts"), FLAGS, ids=IDS)
@pytest.mark.parametrize("typed", every_other(TYPED))
def test_what_is_no_number_of_a_flag_is_told_with_what_is_and_an_example(
    command: list[str], flag: str, accepts: Accepts, typed: str
) -> None:
    result = run_cli(*command, f"{flag}={typed}")
    what, why, fix, more = result.error_lines
    assert (result.code, result.out, more) == (2, b"", "more:  localllm help usage")
    assert what.startswith(f"error: {flag} is ") and (typed[:30] or "''") in what and len(what) < 120
    assert why == f"why:   it must be {accepts.describe()}"
    *line, last, value = shlex.split(fix.removeprefix("fix:"))
    assert (line, last) == (["localllm", *command], flag)
    number = {"integer": int, "number": float}.get(accepts.kind, str)(value)
    assert accepts.allows(number)


@pytest.mark.parametrize(
    ("command", "flag", "proposed"),
    [("run", "--device", "auto"), ("run", "--dtype", "bf16"), ("plan", "--goal", "latency")],
)
def test_what_is_none_of_the_choices_is_told_with_all_of_them(command: str, flag: str, proposed: str) -> None:
    result = run_cli(command, flag, "bf61")
    assert (result.code, result.error_lines[0]) == (2, f"error: {flag} is 'bf61'")
    assert result.error_lines[1].startswith("why:   it must be one of ") and proposed in result.error_lines[1]
    assert result.error_lines[2] == f"fix:   localllm {command} {flag} {proposed}"


@pytest.mark.parametrize(
    ("typed", "meant"), [("8k", "8192"), ("1.5K", "1536"), ("1e3", "1000"), ("4096.0", "4096"), ("4096.5", "8192")]
)
def test_the_number_that_was_meant_is_proposed(typed: str, meant: str) -> None:
    assert run_cli("run", "--ctx", typed, "-p", "x").error_lines[2] == f"fix:   localllm run -p x --ctx {meant}"


@pytest.mark.parametrize("typed", ["13", "x=1", "13=hot", "13=2e6", "13=nan"])
def test_a_bias_that_is_none_is_told_with_one_that_is(typed: str) -> None:
    result = run_cli("run", "--logit-bias", typed, "-p", "x")
    assert (result.code, result.error_lines[0]) == (2, f"error: --logit-bias is {typed!r}")
    assert result.error_lines[2] == "fix:   localllm run -p x --logit-bias 13=-100"


def test_a_number_of_answers_without_a_job_is_repeated_in_the_line_that_has_one() -> None:
    result = run_cli("run", "--parallel", "3", "-p", "x")
    assert result.error_lines[2] == "fix:   localllm run MODEL --batch FILE --parallel 3"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_job_without_prompts_is_refused_with_a_command_that_writes_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a job.jsonl"
    file.write_text(text)
    result = run_cli("run", "--batch", file)
    assert (result.code, result.error_lines[0]) == (2, f"error: {file} has no prompts")
    assert result.error_lines[2] == f"fix:   echo '\"A tale about an owl, please.\"' >> '{file}'"


def test_a_format_that_is_none_is_refused_with_one_that_can_be_packed() -> None:
    assert run_cli("quantize", "tiny", "--weights", "bf16-x").error_lines[2].split()[-2:] == ["--weights", "bf12"]
