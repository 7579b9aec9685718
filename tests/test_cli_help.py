"""The help: every option in a group, the short page on a screen, what other programs call a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from localllm.cli.app import ALIASES, COMMANDS, HEADINGS, load_command
from localllm.cli.help_page import has_two_pages
from localllm.cli.options import OPTIONS
from localllm.settings import SETTINGS
from tests.cli_support import run_cli

ROWS_OF_A_SCREEN = 48


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with what is typed for it."""
    for name in COMMANDS:
        command = load_command(name)
        yield name, command
        for inner, member in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", member


ALL = dict(commands())
LARGE = [name for name, command in ALL.items() if has_two_pages(command)]


def page(*words: str) -> str:
    result = run_cli(*words)
    assert (result.code, result.err) == (0, "")
    return result.out.decode()


def options_of(text: str) -> list[str]:
    """Return the long names of the rows of a page, each as often as it has a row."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


def test_the_large_commands_are_those_with_two_pages() -> None:
    assert {"run", "chat", "serve", "plan", "bench"} <= set(LARGE)


@pytest.mark.parametrize("name", LARGE)
def test_each_option_of_a_large_command_has_a_group(name: str) -> None:
    command = ALL[name]
    assert {row.name for row in command.callback.parameters.values() if row.group in ("", OPTIONS)} == set()


def test_each_setting_with_a_flag_of_a_large_command_has_a_group() -> None:
    assert [name for name, row in SETTINGS.items() if {*row.taken_by} & {*LARGE} and not row.group] == []


@pytest.mark.parametrize("name", ALL)
def test_help_all_names_every_option_once(name: str) -> None:
    command = ALL[name]
    shown = options_of(page(*name.split(), "--help-all"))
    parameters = command.get_params(typer.Context(command))
    declared = [max(each.opts, key=len) for each in parameters if each.param_type_name == "option" and not each.hidden]
    assert sorted(shown) == sorted(declared)


@pytest.mark.parametrize("name", LARGE)
def test_the_short_help_fits_a_screen_and_names_the_long_one(name: str) -> None:
    short, long = page(*name.split(), "--help"), page(*name.split(), "--help-all")
    assert len(short.splitlines()) <= ROWS_OF_A_SCREEN < len(long.splitlines())
    assert "--help-all" in options_of(short)
    assert set(options_of(short)) < set(options_of(long))
    assert short.index("\nExamples:") < short.index("\nArguments:") < short.index("\nHelp:")


@pytest.mark.parametrize("name", [name for name in ALL if name not in LARGE])
def test_a_command_with_few_options_has_one_page(name: str) -> None:
    words = name.split()
    assert page(*words, "--help") == page(*words, "--help-all")


def test_help_of_a_command_has_all_options_where_they_are_asked_for() -> None:
    assert page("help", "run", "--all") == page("run", "--help-all") != page("help", "run")
    assert page("help", "sessions", "export") == page("sessions", "export", "--help")


def test_each_command_stands_below_one_heading() -> None:
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(COMMANDS)
    text = page("--help")
    assert all(f"\n{heading}:\n" in text for heading in HEADINGS)
    assert set(re.findall(r"^  (\w+)  ", text, re.MULTILINE)) == set(COMMANDS)


def test_an_alias_is_the_command() -> None:
    for alias, name in ALIASES.items():
        flags = ["--help"] if name in COMMANDS else []
        assert page(alias, *flags) == page(name, *flags)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (["lsit"], "localllm list"),
        (["config", "shwo", "--json"], "localllm config show --json"),
        (["models"], "localllm list"),
        (["info", "tiny"], "localllm show tiny"),
        (["server", "--port", "1"], "localllm serve --port 1"),
        (["cp", "a", "b"], "localllm serve MODEL --alias NAME"),
        (["push", "a"], "localllm pull MODEL"),
        (["A tale about an owl."], "localllm run 'A tale about an owl.'"),
        (["qqqq"], "localllm --help"),
        (["preset", "delete", "mine"], "localllm preset rm mine"),
        (["rum", "tiny"], "localllm run tiny"),  # no slip of a finger deletes
        (["rmm", "tiny"], "localllm --help"),
        (["set", "temperature", "0.7"], "localllm config set temperature 0.7"),
        (["run", "tiny", "x", "-ngl", "20"], "localllm run tiny x"),
        (["run", "tiny", "x", "--n-gpu-layers=20"], "localllm run tiny x"),
        (["run", "tiny", "x", "-n", "20"], "localllm run tiny x --max-tokens 20"),
        (["run", "tiny", "x", "--num-ctx", "512"], "localllm run tiny x --ctx 512"),
        (["run", "tiny", "x", "--lora", "a.gguf"], "localllm run tiny x --adapter a.gguf"),
        (["serve", "tiny", "--lora-scaled", "a.gguf:2"], "localllm serve tiny --adapter a.gguf:2"),
        (["run", "-m", "tiny", "-c", "512", "-p", "x"], "--ctx 512 in place of -c 512"),
        (["ls", "--jso"], "localllm ls --json"),
        (["help", "lsit"], "localllm help list"),
        (["help", "sessions", "exprt"], "localllm help sessions export"),
    ],
    ids=str,
)
def test_an_unknown_command_names_what_it_is_called_here(line: list[str], fix: str) -> None:
    result = run_cli(*line)
    assert result.code == 2
    assert f"fix:   {fix}\n" in result.err


def test_the_model_may_be_named_by_a_flag() -> None:
    asked = ["--temperature", "0", "--max-tokens", "3", "--json", "--private"]
    said = run_cli("run", "tiny", "hello", *asked).json
    assert run_cli("run", "-m", "tiny", "hello", *asked).json["text"] == said["text"]
    assert run_cli("run", "hello", "--model=tiny", *asked).json["text"] == said["text"]
    assert run_cli("tokenize", "-m", "tiny", "hello").out == run_cli("tokenize", "tiny", "hello").out


def test_a_model_that_is_named_twice_or_reads_like_a_prompt_is_refused() -> None:
    twice = run_cli("plan", "-m", "tiny", "mistral-7b")
    assert twice.code == 2 and "one word too many: 'mistral-7b'" in twice.err
    blank = run_cli("run", "-m", "no such model")
    assert blank.code == 2 and "there is no model 'no such model'" in blank.err
