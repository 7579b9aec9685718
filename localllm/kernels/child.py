"""Runs a program that may hang, and gives it up by what it has used of the processor."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO

import psutil

_LOOK_S = 0.5


def run_within(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    cpu_s: float,
    wait_s: float,
    hear: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a process within a time limit; return what it printed, and how it ended.

    cpu_s: for which it may use the processor, with all that it starts. wait_s: for which it is waited for in any case.
    hear: is given each line of its stdout as it comes; both limits begin anew then.
    Raises TimeoutError, which says how long that was, and what `hear` raises; the program and what it has started are
    killed then.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace") as child:
        assert child.stdout is not None and child.stderr is not None
        out, err, news = list[str](), list[str](), SimpleQueue[str | None]()
        Thread(target=_read, args=(child.stdout, out, news, hear is not None), daemon=True).start()
        Thread(target=_read, args=(child.stderr, err, news, False), daemon=True).start()
        watched, waited_s, used_before_s, num_ended = psutil.Process(child.pid), 0.0, 0.0, 0
        try:
            while num_ended < 2:
                try:
                    line = news.get(timeout=_LOOK_S)
                except Empty:
                    waited_s += _LOOK_S
                    if _used_s(watched) - used_before_s > cpu_s:
                        raise TimeoutError(f"{cpu_s:.0f} seconds of the processor") from None
                    if waited_s > wait_s:
                        raise TimeoutError(f"{wait_s:.0f} seconds; this machine may be very busy") from None
                    continue
                if line is None:
                    num_ended += 1
                elif hear is not None:
                    hear(line.rstrip("\n"))
                    waited_s, used_before_s = 0.0, _used_s(watched)
        except BaseException:
            with suppress(psutil.NoSuchProcess):
                for each in (*watched.children(recursive=True), watched):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            raise
        return subprocess.CompletedProcess(command, child.wait(), "".join(out), "".join(err))


def _read(stream: IO[str], lines: list[str], news: SimpleQueue[str | None], tells: bool) -> None:
    """Read to the end, which is told by None. tells: each line is news as well."""
    for line in stream:
        lines.append(line)
        if tells:
            news.put(line)
    news.put(None)


def _used_s(watched: psutil.Process) -> float:
    """Return the seconds of the processor that a process and all that it has started have used."""
    used_s = 0.0
    with suppress(psutil.Error):
        for each in (watched, *watched.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                used_s += times.user + times.system + times.children_user + times.children_system
    return used_s
