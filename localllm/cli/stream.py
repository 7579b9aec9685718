"""Follows one request to its end: events in order, a signal stops the answer.

Knows events and signals. Knows no model and no terminal.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from localllm.chat.answer import Heard, Stream
from localllm.cli.interrupts import Interrupts
from localllm.engine.events import Event, FinishedEvent, Timings, Usage

ABORT_GRACE_S = 1.0  # how long a stopped request may take to say so: a step that is being computed ends first


class _Stop:
    """The user has had enough."""


class StreamedAnswer(Protocol):
    """An answer that collects events; complete once `finished` is set."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finished(self) -> FinishedEvent | None: ...

    def take(self, event: Event) -> Heard:
        """Takes an event in and returns what it adds."""
        ...


def follow(stream: Stream, answer: StreamedAnswer, interrupts: Interrupts) -> Iterator[tuple[Event, Heard]]:
    """Each event with what it adds, the last one a FinishedEvent; `answer` collects them.

    The first signal aborts the request and the events go on to its end. Leaving the loop early aborts as well.
    """
    # A thread reads the stream so that a signal can be one more thing in the queue that the main thread waits for:
    # SimpleQueue.put may be called by a signal handler, an exception out of the stream's own wait could lose an event.
    inbox: queue.SimpleQueue[Event | BaseException | _Stop] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(stream, inbox), name="events", daemon=True).start()
    deadline: float | None = None
    try:
        with interrupts.stopping(lambda: inbox.put(_Stop())):
            while answer.finished is None:
                item = _next(inbox, deadline, answer)
                if isinstance(item, _Stop):
                    stream.abort()
                    deadline = time.monotonic() + ABORT_GRACE_S
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item, answer.take(item)
    finally:
        if answer.finished is None:
            stream.abort()


def _pump(stream: Stream, inbox: queue.SimpleQueue[Event | BaseException | _Stop]) -> None:
    try:
        for event in stream:
            inbox.put(event)
    except BaseException as error:  # handed to the main thread, which raises it
        inbox.put(error)


def _next(
    inbox: queue.SimpleQueue[Event | BaseException | _Stop], deadline: float | None, answer: StreamedAnswer
) -> Event | BaseException | _Stop:
    if deadline is None:
        return inbox.get()
    try:
        return inbox.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        usage = Usage(answer.num_prompt_tokens, 0, len(answer.token_ids))
        return FinishedEvent(-1, "cancelled", usage, Timings())
