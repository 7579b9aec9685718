"""Runs a program that may hang, and gives it up by what it has used of the processor."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

_LOOK_S = 0.5


def run_within(
    command: Sequence[str], environment: Mapping[str, str], *, cpu_s: float, wait_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a process within a time limit; return what it printed, and how it ended.

    cpu_s: for which it may use the processor, with all that it starts. wait_s: for which it is waited for in any case.
    Raises TimeoutError, which says how long that was; the program and what it has started are killed then.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace") as child:
        watched = psutil.Process(child.pid)
        waited_s = 0.0
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    out, err = child.communicate(timeout=_LOOK_S)
                    return subprocess.CompletedProcess(command, child.returncode, out, err)
                waited_s += _LOOK_S
                used_s = 0.0
                with suppress(psutil.Error):
                    for each in (watched, *watched.children(recursive=True)):
                        with suppress(psutil.NoSuchProcess):
                            times = each.cpu_times()
                            used_s += times.user + times.system + times.children_user + times.children_system
                if used_s > cpu_s:
                    raise TimeoutError(f"{cpu_s:.0f} seconds of the processor")
                if waited_s > wait_s:
                    raise TimeoutError(f"{wait_s:.0f} seconds; this machine may be very busy")
        except BaseException:
            with suppress(psutil.NoSuchProcess):
                for each in (*watched.children(recursive=True), watched):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            raise
