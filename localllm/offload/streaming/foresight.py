"""Whether a record is worth reading before anybody wants it. Knows no disk and no memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from localllm.offload.streaming.lru_slots import Expert

# Of the first guesses of a trained mixture (`tools/train_tiny.py --experts --measure`), until a block has told.
_USUAL_RIGHT_SHARE = 0.7
_WEIGHT = 1 / 16  # of the newest in a running mean


class Foresight:
    """Judges one guess a block by what came of the earlier ones, in the order of the calls below.

    A right guess saves the time in which the disk has nothing else to do: from the end of one block's reads, as the
    host sees it, until the next block knows its experts. A wrong one keeps the disk busy for as much longer as a record
    takes than that. So it is worth a read where idle > (1 - right) * read: nearly always for records of 3 MB, never for
    one that takes ten times as long as a block computes.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: seconds."""
        self._now = now
        self._right: dict[str, float] = {}
        self._read_s: float | None = None  # the disk's for a record
        self._idle_s: float | None = None  # between the reads of two blocks
        self._busy_since = self._idle_since = 0.0
        self._guess: Expert | None = None

    def disk_is_busy(self) -> None:
        """A block's reads begin."""
        self._busy_since = self._now()

    def disk_is_idle(self, num_read: int) -> None:
        """All of them have ended."""
        self._idle_since = self._now()
        self._read_s = _mean(self._read_s, (self._idle_since - self._busy_since) / num_read)

    def guess(self, expert: Expert) -> None:
        """Take the most likely one of those that are not here, whether it is read or not."""
        self._guess = expert

    def is_worth(self, expert: Expert) -> bool:
        """Return whether to read the guess while the disk is idle."""
        if self._idle_s is None or self._read_s is None:
            return False
        return self._idle_s > (1 - self._right.get(expert[0], _USUAL_RIGHT_SHARE)) * self._read_s

    def learn(self, block: str, experts: Collection[int]) -> None:
        """Judge the last guess by what this block, which was next, wants."""
        guess, self._guess = self._guess, None
        if guess is not None and guess[0] == block:
            self._idle_s = _mean(self._idle_s, self._now() - self._idle_since)
            self._right[block] = _mean(self._right.get(block, _USUAL_RIGHT_SHARE), float(guess[1] in experts))


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
