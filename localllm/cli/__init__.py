"""The `localllm` command. One handler for signals, one for errors; everything else is imported inside a command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line of this process and ends it with the exit code of docs/errors.md."""
    try:
        from localllm.cli.interrupts import Interrupts

        interrupts = Interrupts()
        interrupts.install()
    except KeyboardInterrupt:
        os._exit(130)
    try:
        from localllm.cli.dispatch import dispatch, end_process

        code = dispatch(sys.argv[1:], interrupts)
    except KeyboardInterrupt:  # before `dispatch` could see to it, or behind it
        interrupts.farewell = interrupts.farewell or "interrupted"
        interrupts.leave()
    end_process(code)
