"""A thread that computes the next mask while a GPU computes the token before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Work:
    """Something to be done once, by whoever comes first: the worker, or the one who needs it."""

    def __init__(self, do: Callable[[], None]) -> None:
        """do: raises nothing."""
        self._do = do
        self._is_taken, self._is_done = threading.Lock(), threading.Lock()
        self._is_done.acquire()

    def finish(self) -> None:
        """Returns when it is done. On a machine with more to do than cores a thread may come late: nobody waits for one
        that has not begun."""
        if self._is_taken.acquire(blocking=False):
            self._do()
        else:
            self._is_done.acquire()

    def begin(self) -> None:
        """By the worker."""
        if self._is_taken.acquire(blocking=False):
            try:
                self._do()
            finally:
                self._is_done.release()


class Worker:
    """Does what it is given, one after the other. Its thread begins with the first, and ends with `close`.

    Not an executor of the library: to give it work and to learn that it is done take 10 us of the engine's thread where
    that takes 20.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="localllm-grammar", daemon=True)
            self._thread.start()
        self._given.put(work)

    def close(self) -> None:
        """What was given is done before."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            work.begin()
