"""Work in a copy of this process, which may be killed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def started(work: Callable[[], object]) -> int:
    """The id of the process that does it."""
    child = os.fork()
    if child:
        return child
    try:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the pool of this process's threads is not there in its copy
        work()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def ended(child: int) -> int:
    """How it did, as the shell says it: 1 where it raised, -9 where it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    return ended(started(work))
