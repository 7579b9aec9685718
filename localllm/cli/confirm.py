"""Asks before something is deleted."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import typer

from localllm.cli.context import CliContext
from localllm.errors import UsageError


def ask_to_delete(front: CliContext, what: str, unasked: str, shown: Iterable[str] = ()) -> None:
    """Leaves where the answer is no. unasked: the command that does not ask. shown: lines that tell what it is. Raises
    UsageError where nobody can be asked."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"nobody can be asked whether to delete {what}", why="standard input is no terminal", fix=unasked
        )
    for line in shown:
        front.output.note(line)
    front.output.prompt(f"Delete {what}? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        front.output.note("nothing was deleted")
        raise typer.Exit(1)
