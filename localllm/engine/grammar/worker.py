"""A thread that computes the next mask while the model computes the token before it: both are native code, which lets
other threads run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Does what it is given, one after the other. Its thread begins with the first, and ends with `close`.

    Not an executor of the library: to give it work and to learn that it is done take 10 us of the engine's thread where
    that takes 20, of a step of 450.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[Callable[[], None], threading.Lock] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> Callable[[], object]:
        """Returns what waits for its end. The work raises nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="localllm-grammar", daemon=True)
            self._thread.start()
        done = threading.Lock()
        done.acquire()
        self._given.put((work, done))
        return done.acquire

    def close(self) -> None:
        """What was given is done before."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            work, done = given
            try:
                work()
            finally:
                done.release()
