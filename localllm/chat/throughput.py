"""The recent speed of something that goes on."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0


class Pace:
    """The speed of the last moments alone: bytes that were there before are verified, not fetched, and go by faster,
    so that an average would foretell too much."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (time, done), the oldest first

    def after(self, now_s: float, done: int) -> float:
        """A second's share, with `done` of it there at `now_s`."""
        self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > _WINDOW_S:
            self._samples.popleft()
        began_s, base = self._samples[0]
        return (done - base) / max(now_s - began_s, 1e-3)
