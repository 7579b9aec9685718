"""An answer to its end, posted in pieces that an eye can follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from localllm.engine.events import Event, FinishedEvent, GrownEvent, PrefillEvent, TokenEvent
from localllm.frontend.answer import Answer
from localllm.frontend.context import grown_text
from localllm.tui.messages import AnswerDelta, Noted, PrefillProgress
from localllm.tui.model_loader import Post

if TYPE_CHECKING:
    from localllm.engine.facts import AnswerStream

_SHORTEST_S = 0.07  # between two messages: what an eye follows
_LONGEST_S = 0.25
_SHARE = 0.2  # of a core, for drawing
_DEAF_S = 0.02  # to the end of an answer


class StreamThrottle:
    """How often an answer is posted: as often as the screen's thread can draw it in a fifth of its time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Before the first message."""
        self.interval_s = _SHORTEST_S
        self._spent_s: float | None = None

    def heard(self) -> None:
        """On the screen's thread, at each message: what the one before has cost is known now."""
        spent_s = time.thread_time()
        if self._spent_s is not None:
            self.interval_s = min(max(_SHORTEST_S, (spent_s - self._spent_s) / _SHARE), _LONGEST_S)
        self._spent_s = spent_s


def follow(stream: AnswerStream, answer: Answer, hear: Callable[[str], None], post: Post, pace: StreamThrottle) -> None:
    """`answer` collects what is said; `hear` is given each text before it is posted."""
    began = 0.0
    for events in _batches(stream, pace):
        words = []
        for event in events:
            text = answer.take(event).text
            hear(text)
            words.append(text)
            if isinstance(event, TokenEvent):
                began = began or time.monotonic()
        _post_progress(events, post)
        if any(words):
            elapsed_s = time.monotonic() - began if began else 0.0
            post(AnswerDelta("".join(words), len(answer.token_ids), elapsed_s))


def _post_progress(events: Sequence[Event], post: Post) -> None:
    for event in events:
        if isinstance(event, GrownEvent):
            post(Noted(grown_text(event)))
    prefilled = [event for event in events if isinstance(event, PrefillEvent)]
    if prefilled:
        post(PrefillProgress(prefilled[-1].done, prefilled[-1].total))


def _batches(stream: AnswerStream, pace: StreamThrottle) -> Iterator[list[Event]]:
    """The events as they come, those of an interval together; the first at once."""
    events, flushed_at = iter(stream), 0.0
    for event in events:
        batch = [event]
        while not isinstance(batch[-1], FinishedEvent):
            if not stream.events.empty():
                batch.append(next(events))
            elif (rest_s := flushed_at + pace.interval_s - time.monotonic()) > 0:
                time.sleep(min(rest_s, _DEAF_S))
            else:
                break
        flushed_at = time.monotonic()
        yield batch
