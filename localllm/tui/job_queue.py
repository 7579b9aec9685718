"""A thread that does what is asked for, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]


class JobQueue:
    """Each tells itself what it fails by: what it raised would end the thread."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(name=name, daemon=True, target=self._run)
        self._first: Job | None = None

    def begin(self, first: Job | None = None) -> None:
        """Has `first` done, then what was asked for before this, and what is from now on."""
        self._first = first
        self._thread.start()

    def do(self, job: Job) -> None:
        """Returns at once."""
        self._waiting.put(job)

    def close(self, timeout_s: float) -> None:
        """Ends the thread once all is done that was asked for; of one that never began nothing is."""
        self._waiting.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        if self._first is not None:
            self._first()
        while (job := self._waiting.get()) is not None:
            job()
