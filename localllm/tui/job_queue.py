"""Threads behind the screen: jobs in order on one thread, and Textual's workers on threads that no exit waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Job = Callable[[], object]


class DaemonExecutor(ThreadPoolExecutor):
    """Run each submitted call on a daemon thread of its own.

    Textual's thread workers use the loop's executor. The default one has few threads, and an exit joins them: a
    measurement of seconds would hold up quitting.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class JobQueue:
    """Jobs that one worker runs in order. A job reports its own failures: an exception would end the worker."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_begun = False
        self._ended = threading.Event()

    def run(self, first: Job | None = None) -> None:
        """Run `first`, then all jobs, until the queue is closed. The body of a thread worker."""
        self._is_begun = True
        try:
            if first is not None:
                first()
            while (job := self._jobs.get()) is not None:
                job()
        finally:
            self._ended.set()

    def add(self, job: Job) -> None:
        """Return at once."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Wait until all jobs have run; no longer than `timeout_s`, and not for a queue that never began."""
        self._jobs.put(None)
        if self._is_begun:
            self._ended.wait(timeout_s)
