"""docs/using/cli.md says what the commands say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm import errors
from localllm.cli.app import COMMANDS, app, load_command
from localllm.cli.help import read_sections
from localllm.errors import LocalLLMError
from tests.cli_support import run_cli, write_checkpoint
from tests.conftest import REPOSITORY
from tools.generate_cli_docs import TARGET, generate

ENDS = {0, 129, 130, 143}  # done, and the signals


def error_classes() -> Iterator[type[LocalLLMError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, LocalLLMError):
            yield value


CODES = {error.exit_code for error in error_classes()} | ENDS


def table_codes(page: str) -> list[int]:
    """Of a page's table of exit codes."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    table = re.search(r"\| (?:exit )?code \| meaning .*?\n((?:\|.*\n)+)", text)
    assert table is not None
    return [int(cell) for cell in re.findall(r"\| (\d+) (?=\|)", table[1])]


def test_the_page_of_errors_lists_every_exit_code_once() -> None:
    codes = table_codes("docs/using/errors.md")
    assert (len(codes), set(codes)) == (len(CODES), CODES)


def test_the_help_lists_every_exit_code() -> None:
    assert {int(code) for code in re.findall(r"\d+", str(app.info.epilog))} == CODES


@pytest.mark.parametrize("error", list(error_classes()))
def test_the_section_of_an_error_names_its_exit_code(error: type[LocalLLMError]) -> None:
    assert f"\n\nExit code {error.exit_code}. " in read_sections()[error.code]


def keys(value: object) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from keys(inner if not isinstance(inner, list) else inner[0] if inner else None)


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (["plan", "MODEL", "--json"], "`plan --json`"),
        (["plan", "MODEL", "--ram", "16MiB", "--json"], "`plan --json`"),
        (["run", "MODEL", "-p", "x", "--max-tokens", "2", "--json"], "`timings"),
        (["cache", "info", "--json"], "`cache info --json`"),
    ],
)
def test_the_page_names_every_key_of_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: list[str], row: str
) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    model = str(write_checkpoint(tmp_path / "model"))
    fields = run_cli(*(model if word == "MODEL" else word for word in line)).json
    told = " ".join(text for text in TARGET.read_text("utf-8").splitlines() if text.startswith(f"| {row}"))
    owners = {owner for tier in fields.get("ledger", {}).values() for owner in tier}
    wanted = set(keys(fields.get("timings", fields))) - owners - {"schema_version"}
    assert wanted
    assert {key for key in wanted if f"`{key}`" not in told} == set()


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    assert TARGET.read_text(encoding="utf-8") == generate(), "run: python -m tools.generate_cli_docs"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_of_each_what_its_own_help_does(name: str) -> None:
    assert load_command(name).help.splitlines()[0] == COMMANDS[name][1]
