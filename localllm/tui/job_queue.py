"""Threads behind the screen: jobs in order on one thread, and Textual's workers on threads that no exit waits for."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Job = Callable[[], object]
_Result = TypeVar("_Result")


class DaemonExecutor(ThreadPoolExecutor):
    """Run each submitted call on a daemon thread of its own.

    Textual's thread workers use the loop's executor. The default one has few threads, and an exit joins them: a
    measurement of seconds would hold up quitting.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=_run, args=(future, partial(fn, *args, **kwargs)), daemon=True).start()
        return future


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.running() or future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


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
        self._jobs.put(job)

    async def result(self, call: Callable[[], _Result], *, can_be_skipped: bool = False) -> _Result:
        """Queue a call and wait for its result. can_be_skipped: not made where it is cancelled before its turn."""
        future: Future[_Result] = Future()
        if not can_be_skipped:
            future.set_running_or_notify_cancel()
        self.add(partial(_run, future, call))
        return await asyncio.wrap_future(future)

    def close(self, timeout_s: float) -> None:
        """Wait until all jobs have run; no longer than `timeout_s`, and not for a queue that never began."""
        self._jobs.put(None)
        if self._is_begun:
            self._ended.wait(timeout_s)
