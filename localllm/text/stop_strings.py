"""Find stop strings in text that arrives in pieces. Knows nothing about tokens: a piece may be any part of the text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Releases text as soon as it cannot be part of a stop string, and ends it before the first one.

    The result does not depend on how the text is cut into pieces: it ends at the smallest index at which any of the
    stops begins, as `str.find` on the whole text would say. Each character costs O(stops), amortised.

    found: the stop before which the text ends, as far as it is known; of several that begin there, the shortest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings; none at all lets everything pass."""
        self._prefixes = [_Prefix(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self._held_start = 0  # index of the first held character in the whole text
        self._match_start: int | None = None  # of the leftmost complete stop so far
        self._stopped = False
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Return (the text that is certain now, a stop was found). Behind a stop nothing more is released."""
        if self._stopped:
            return "", True
        if not self._prefixes:
            return text, False
        position = self._held_start + len(self._held)
        self._held += text
        for char in text:
            position += 1
            self._advance(char, position)
            if self._is_decided(position):
                self._stopped = True
                return self._release(self._match_start), True
        certain = position - max(prefix.length for prefix in self._prefixes)
        return self._release(certain if self._match_start is None else min(certain, self._match_start)), False

    def finish(self) -> str:
        """Return the text that was held back, up to a stop that was found in it."""
        if self._stopped:
            return ""
        self._stopped = True
        return self._release(self._match_start)

    def _advance(self, char: str, position: int) -> None:
        for prefix in self._prefixes:
            if prefix.advance(char):
                start = position - len(prefix.stop)
                if self._match_start is None or start < self._match_start:
                    self._match_start, self.found = start, prefix.stop

    def _is_decided(self, position: int) -> bool:
        """Tell if a stop is complete and no other one that began before it can still be completed."""
        start = self._match_start
        return start is not None and all(position - prefix.length >= start for prefix in self._prefixes)

    def _release(self, end: int | None) -> str:
        """Return the held text up to index `end` of the whole text; None: all of it."""
        count = len(self._held) if end is None else end - self._held_start
        text, self._held = self._held[:count], self._held[count:]
        self._held_start += count
        return text


class _Prefix:
    """Counts the characters of one stop string that the text ends with (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = [0, 0]  # longest proper border of stop[:i], as far as the text has ever matched

    def advance(self, char: str) -> bool:
        """Read one character; True if the text now ends with the whole stop string."""
        length = self.length
        while length and (length == len(self.stop) or char != self.stop[length]):
            length = self._shorter[length]
        self.length = length + (char == self.stop[length])
        if self.length == len(self._shorter):
            self._extend()
        return self.length == len(self.stop)

    def _extend(self) -> None:
        """Extend the table by one place: a client's stops may be long, and most of them are never begun."""
        char, border = self.stop[self.length - 1], self._shorter[-1]
        while border and char != self.stop[border]:
            border = self._shorter[border]
        self._shorter.append(border + (char == self.stop[border]))
