"""The context of a command: the streams and the signals of this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from localllm.cli.interrupts import Interrupts
from localllm.cli.output import Output

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


def cli_context(context: typer.Context) -> CliContext:
    """The CliContext that `dispatch` has put into the context."""
    front = context.obj
    assert isinstance(front, CliContext)
    return front
