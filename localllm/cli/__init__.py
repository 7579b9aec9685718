"""The `localllm` command. One handler for signals, one for errors; everything else is imported inside a command."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import MutableMapping
from typing import NoReturn

__all__ = ["main"]

# Of torch's OpenMP threads, before one that waits sleeps: some 50 us. By libgomp's own 300,000 two chats with bf16
# weights on 2 cores gave 3 to 13 tok/s each instead of 300, as each spun on the core that the other waited for; by
# these 42.
# One alone loses an eighth with `tiny`, and nothing with INT4 weights, whose steps are one parallel call.
_SPINS = "4000"
# Of objects, between two looks of Python for garbage: by its own 700 an eighth of the time of importing torch goes
# into them, and nothing of what a module makes is ever garbage.
_COLLECTED_AFTER = 50_000


def share_cores(environ: MutableMapping[str, str]) -> None:
    """Has OpenMP leave the cores to other programs while it waits, unless the user has said how it is to."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ):
        environ["GOMP_SPINCOUNT"] = _SPINS


def main() -> NoReturn:
    """Runs the command line of this process and ends it with the exit code of docs/using/errors.md."""
    share_cores(os.environ)
    gc.set_threshold(_COLLECTED_AFTER, 10, 10)
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
