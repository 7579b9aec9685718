"""The events of an answer in batches that an eye can follow."""

from __future__ import annotations

import time
from collections.abc import Iterator

from localllm.engine.events import Event, FinishedEvent
from localllm.runtime.engine_handle import RequestStream

_SHORTEST_S = 0.07  # between two batches: what an eye follows
_LONGEST_S = 0.25
_SHARE = 0.2  # of a core, for drawing
_POLL_S = 0.02  # the delay with which the end of an answer is noticed


class StreamThrottle:
    """The interval between two batches: as short as the screen's thread can draw them in a fifth of its time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the measured costs, before an answer."""
        self.interval_s = _SHORTEST_S
        self._spent_s: float | None = None

    def drawn(self) -> None:
        """Take the cost of the last batch; called on the screen's thread at each batch."""
        spent_s = time.thread_time()
        if self._spent_s is not None:
            self.interval_s = min(max(_SHORTEST_S, (spent_s - self._spent_s) / _SHARE), _LONGEST_S)
        self._spent_s = spent_s

    def batches(self, stream: RequestStream) -> Iterator[list[Event]]:
        """The events as they come, those of an interval together; the first at once."""
        events, flushed_at = iter(stream), 0.0
        for event in events:
            batch = [event]
            while not isinstance(batch[-1], FinishedEvent):
                if not stream.events.empty():
                    batch.append(next(events))
                elif (rest_s := flushed_at + self.interval_s - time.monotonic()) > 0:
                    time.sleep(min(rest_s, _POLL_S))
                else:
                    break
            flushed_at = time.monotonic()
            yield batch
