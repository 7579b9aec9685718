"""Find stop strings in text that arrives in pieces. Knows nothing about tokens: a piece may be any part of the text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Releases text as soon as it cannot be part of a stop string, and ends it before the first one.

    The result does not depend on how the text is cut into pieces: it ends at the smallest index at which any of the
    stops begins, as `str.find` on the whole text would say.

    found: the stop before which the text ends, as far as it is known; of several that begin there, the shortest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings; none at all lets everything pass."""
        self._stops = sorted(filter(None, stops), key=len)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self._stopped = False
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Return (the text that is certain now, a stop was found). Behind a stop nothing more is released."""
        if self._stopped:
            return "", True
        self._held += text
        starts = (start for start, char in enumerate(self._held) if char in self._firsts)
        end = next(filter(self._holds, starts), len(self._held))
        released, self._held = self._held[:end], self._held[end:]
        self._stopped = self.found is not None
        return released, self._stopped

    def finish(self) -> str:
        """Return the text that was held back, up to a stop that was found in it."""
        if self._stopped:
            return ""
        self._stopped = True
        starts = range(len(self._held))
        return self._held[: next(filter(self._is_stop, starts), len(self._held))]

    def _holds(self, start: int) -> bool:
        """Tell if a stop stands at this index of the held text, or may once more text has come."""
        if self._is_stop(start):
            return True
        length = len(self._held) - start
        return any(length < len(stop) and stop.startswith(self._held[start:]) for stop in self._stops)

    def _is_stop(self, start: int) -> bool:
        self.found = next((stop for stop in self._stops if self._held.startswith(stop, start)), None)
        return self.found is not None
