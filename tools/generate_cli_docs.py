"""Writes docs/using/cli.md from the commands themselves: `python -m tools.generate_cli_docs`.

A test keeps the file equal to what this would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from localllm.cli.app import COMMANDS, load_command
from localllm.cli.help_page import examples_of, grouped, has_two_pages, typed
from localllm.cli.options import ARGUMENTS, HELP
from localllm.settings import SETTINGS

PREFACE = Path(__file__).parent / "cli_preface.md"
TARGET = Path(__file__).parent.parent / "docs" / "using" / "cli.md"


def generate() -> str:
    """The whole page."""
    settings = ", ".join(f"`LOCALLLM_{name.upper()}`" for name in SETTINGS)
    lines = [PREFACE.read_text(encoding="utf-8").replace("SETTINGS", settings), "## Commands", ""]
    for name in COMMANDS:
        for path, command in _commands(f"localllm {name}", load_command(name)):
            lines += _describe(path, command)
    return "\n".join(lines).rstrip() + "\n"


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command, or those of a group."""
    for name, inner in getattr(command, "commands", {}).items():
        yield f"{path} {name}", inner
    if not hasattr(command, "commands"):
        yield path, command


def _describe(path: str, command: Any) -> Iterator[str]:
    groups = grouped(command, typer.Context(command))
    positionals = [each for each in groups.get(ARGUMENTS, ()) if each.param_type_name == "argument"]
    words = [f"{each.metavar}" if each.required else f"[{each.metavar}]" for each in positionals]
    yield f"### {' '.join([path, *words])}"
    yield ""
    yield " ".join(command.help.split())
    yield ""
    for heading, parameters in groups.items():
        rows = [each for each in parameters if each.name not in ("help", "help_all")]
        if heading == HELP or not rows:
            continue
        if has_two_pages(command):
            yield f"{heading}:"
            yield ""
        yield "| | |"
        yield "|---|---|"
        for each in rows:
            yield f"| `{_cell(typed(each))}` | {_cell(' '.join(each.help.split()))} |"
        yield ""
    examples, _ = examples_of(command)
    if examples:
        yield "```"
        yield from examples
        yield "```"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
    sys.stderr.write(f"wrote {TARGET}\n")
