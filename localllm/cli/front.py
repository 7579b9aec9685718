"""What every command is given: the streams and the signals of this process."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from localllm.cli.interrupts import Interrupts
from localllm.cli.output import Output


@dataclass(frozen=True)
class Front:
    output: Output
    interrupts: Interrupts


def front_of(context: typer.Context) -> Front:
    """The Front that `dispatch` has put into the context."""
    front = context.obj
    assert isinstance(front, Front)
    return front
