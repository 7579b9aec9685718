"""The recent speed of a transfer."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0


class Pace:
    """The speed of the last seconds. Bytes on disk are verified, not fetched, which is faster: an average over all
    would promise too much."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (time, done), the oldest first

    def after(self, now_s: float, done: int) -> float:
        """Return the amount per second, with `done` of it there at `now_s`."""
        self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > _WINDOW_S:
            self._samples.popleft()
        began_s, base = self._samples[0]
        return (done - base) / max(now_s - began_s, 1e-3)
