"""Writes docs/cli.md from the commands themselves: `python -m tools.generate_cli_docs`.

A test keeps the file equal to what this would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.cli.app import COMMANDS, load_command
from localllm.settings import SETTINGS

PREFACE = Path(__file__).parent / "cli_preface.md"
TARGET = Path(__file__).parent.parent / "docs" / "cli.md"


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
    positionals = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    flags = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    words = [f"{p.metavar}" if p.required else f"[{p.metavar}]" for p in positionals]
    yield f"### {' '.join([path, *words])}"
    yield ""
    yield " ".join(command.help.split())
    yield ""
    if positionals or flags:
        yield "| | |"
        yield "|---|---|"
    for parameter in positionals:
        yield f"| `{parameter.metavar}` | {_cell(parameter.help)} |"
    for parameter in flags:
        spelled = ", ".join(f"`{name}`" for name in parameter.opts)
        value = f" `{_cell(parameter.metavar)}`" if parameter.metavar else ""
        yield f"| {spelled}{value} | {_cell(parameter.help)} |"
    yield ""
    if command.epilog:
        yield "```"
        yield from (line.strip() for line in command.epilog.split("\b")[1].split("\n\n")[0].strip().splitlines())
        yield "```"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
    sys.stderr.write(f"wrote {TARGET}\n")
