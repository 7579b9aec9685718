"""The context of a command: the streams and the signals of this process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from localllm.cli.interrupts import Interrupts
from localllm.cli.output import Output
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.config import ResolvedSettings
    from localllm.hub import ModelFiles


@dataclass
class CliContext:
    """model, resolved: what the command works with, and its settings, once they are known."""

    output: Output
    interrupts: Interrupts
    model: ModelFiles | None = None
    resolved: ResolvedSettings | None = None

    @property
    def can_ask(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty()

    def confirms(self, question: str) -> bool:
        """Ask, and return whether the answer is yes."""
        self.output.prompt(f"{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def ask_to_delete(self, what: str, unasked: str, shown: Iterable[str] = ()) -> None:
        """Leaves where the answer is no. unasked: the command that does not ask. shown: lines that tell what it is.

        Raises UsageError where nobody can be asked.
        """
        if not self.can_ask:
            why = "standard input is not a terminal"
            raise UsageError(f"nobody can be asked whether to delete {what}", why=why, fix=unasked)
        for line in shown:
            self.output.note(line)
        if not self.confirms(f"Delete {what}?"):
            self.output.note("nothing was deleted")
            raise typer.Exit(1)


def cli_context(context: typer.Context) -> CliContext:
    """The CliContext that `dispatch` has put into the context."""
    cli = context.obj
    assert isinstance(cli, CliContext)
    return cli
