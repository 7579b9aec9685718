"""Follows a request to its end: events in order, until a signal stops the answer.

Knows events and signals. Knows no model and no terminal.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from localllm.chat.answer import Piece, Stream
from localllm.cli.interrupts import Interrupts
from localllm.engine.events import Event, FinishedEvent, Timings, TokenEvent, Usage

ABORT_GRACE_S = 1.0  # how long a stopped request may take to say so: a step that is being computed ends first

_STOP = object()  # the user has stopped the answer
_END = object()  # of the stream


def follow(
    stream: Stream, take: Callable[[Event], Piece], interrupts: Interrupts, num_prompt_tokens: int
) -> Iterator[tuple[Event, Piece]]:
    """Yield each event with its piece of the answer, which `take` returns; the last event is a FinishedEvent.

    The first signal aborts the request and the events go on to its end. Leaving the loop early aborts as well.
    """
    # A thread reads the stream so that a signal can be one more thing in the queue that the main thread waits for:
    # SimpleQueue.put may be called by a signal handler, an exception out of the stream's own wait could lose an event.
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(stream, inbox), name="events", daemon=True).start()
    deadline: float | None = None
    num_tokens, has_ended = 0, False
    try:
        with interrupts.stopping(lambda: inbox.put(_STOP)):
            while not has_ended:
                item = _next(inbox, deadline)
                if item is None:
                    has_ended = True
                    item = FinishedEvent(-1, "cancelled", Usage(num_prompt_tokens, 0, num_tokens), Timings())
                if item is _STOP:
                    stream.abort()
                    deadline = time.monotonic() + ABORT_GRACE_S
                elif item is _END:
                    has_ended = True
                elif isinstance(item, BaseException):
                    raise item
                elif isinstance(item, Event):
                    num_tokens += isinstance(item, TokenEvent)
                    yield item, take(item)
    finally:
        if not has_ended:
            stream.abort()


def _pump(stream: Stream, inbox: queue.SimpleQueue[object]) -> None:
    try:
        for event in stream:
            inbox.put(event)
        inbox.put(_END)
    except BaseException as error:  # handed to the main thread, which raises it
        inbox.put(error)


def _next(inbox: queue.SimpleQueue[object], deadline: float | None) -> object | None:
    """Return the next item; None behind the deadline."""
    try:
        return inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return None
