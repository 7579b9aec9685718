"""A check that an engine in another process moves on while a request or a call waits for it.

A slow step is not a hang, nor is a busy machine: time alone convicts nobody who speaks, computes or reads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_LOOK_S = 1.0
_LOOKS = 8  # at least, before anybody is convicted


@dataclass(frozen=True)
class Patience:
    """The longest that a request or a call waits for an engine.

    still_s: while it does nothing at all: it sends nothing, and no thread of it computes or reads
    hung_s: while it computes without coming to the next block of its model, or to the next piece of a load, as a hung
        graphics card keeps it computing; a block takes seconds
    """

    still_s: float = 60.0
    hung_s: float = 600.0


class Watchdog:
    """The watchdog of one process. Its thread sleeps as long as nothing waits."""

    def __init__(
        self,
        pid: Callable[[], int | None],
        waits: Callable[[], bool],
        convict: Callable[[str], None],
        patience: Patience,
    ) -> None:
        """
        pid: returns None while that is not known
        waits: returns whether something waits
        convict: called once, with why the process does not move on
        """
        self.patience = patience
        self._pid = pid
        self._waits = waits
        self._convict = convict
        self.num_received = 0  # messages from the process
        self._num_moves = 0
        self._still_s = self._hung_s = 0.0
        self._begun, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="localllm-watchdog", daemon=True).start()

    @property
    def is_doubtful(self) -> bool:
        """Whether half of the patience is used up."""
        return 2 * self._still_s >= self.patience.still_s or 2 * self._hung_s >= self.patience.hung_s

    def begin(self) -> None:
        """Begin to watch: something waits from now on."""
        self._begun.set()

    def received(self, *, has_moved: bool = True) -> None:
        """Count a message of the process, on one thread. has_moved: the message is progress, as the answer to a call is
        not that needs no block to be computed."""
        self.num_received += 1
        self._num_moves += has_moved

    def end(self) -> None:
        self._over.set()
        self._begun.set()

    def _run(self) -> None:
        while True:
            self._begun.wait()
            if self._over.is_set():
                return
            self._begun.clear()
            if why := self._watch():
                self._convict(why)
                return

    def _watch(self) -> str:
        """Watch as long as something waits; return why the process is convicted, or ""."""
        num_moves, effort, looked_at = self._num_moves, None, time.monotonic()
        while not self._over.wait(look_s := min(_LOOK_S, self.patience.still_s / _LOOKS)) and self._waits():
            now = time.monotonic()
            # Not more than was looked at: a machine that slept, or this process that was stopped, has seen nothing.
            passed_s, looked_at = min(now - looked_at, 2 * look_s), now
            if num_moves != self._num_moves:
                num_moves, effort = self._num_moves, None
                self._still_s = self._hung_s = 0.0
                continue
            before, effort = effort, self._effort()
            is_still = effort is not None and effort == before
            self._still_s = self._still_s + passed_s if is_still else 0.0
            self._hung_s += passed_s
            if self._still_s >= self.patience.still_s:
                return f"it said nothing for {self._still_s:.0f} s, and neither computed nor read"
            if self._hung_s >= self.patience.hung_s:
                return f"it computed for {self._hung_s:.0f} s without coming to the end of a block"
        self._still_s = self._hung_s = 0.0
        return ""

    def _effort(self) -> tuple[float, int] | None:
        """Seconds that the process, and those that it has started, have computed, and bytes that they have read from a
        disk; None where that is not known."""
        import psutil

        pid, seconds, num_bytes = self._pid(), 0.0, 0
        if pid is None:
            return None
        try:
            own = psutil.Process(pid)
            family = [own, *own.children(recursive=True)]
        except psutil.Error:
            return None
        for each in family:
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                seconds += times.user + times.system
                if hasattr(each, "io_counters"):
                    num_bytes += each.io_counters().read_bytes
        return seconds, num_bytes
