"""What steps take, as they were measured; what was not measured is taken from its neighbours."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

_LAST = 9  # steps whose median counts
_ROW_SHARE = 0.06  # by which a row more makes a step longer, where nobody knows: 8 rows of INT4 cost 1.4 x one


def unknown_growth(sequences: int, rows: int) -> float:
    return 1 + _ROW_SHARE * (rows - sequences)


class StepTimes:
    """Of steps of a number of sequences and of rows: as many where nothing was guessed."""

    def __init__(self, growth: Callable[[int, int], float] = unknown_growth) -> None:
        """growth: by what a step of these sequences and rows is thought to be longer than one without guesses."""
        self._growth = growth
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._known: dict[int, tuple[list[int], list[float]]] = {}  # rows, ascending, and their medians, once asked
        self._begun: set[tuple[int, int]] = set()

    def learn(self, sequences: int, rows: int, seconds: float) -> bool:
        """Whether it was counted: the first step of a kind also prepares what all others find ready."""
        if (sequences, rows) not in self._begun:
            self._begun.add((sequences, rows))
            return False
        own = self._seconds.setdefault(sequences, {})
        own.setdefault(rows, deque(maxlen=_LAST)).append(seconds)
        self._known.pop(sequences, None)
        return True

    def plain_s(self, sequences: int) -> float | None:
        """Of a step without guesses; None where none was measured yet."""
        if not self._seconds.get(sequences, {}).get(sequences):
            return None
        return self.step_s(sequences, sequences)

    def step_s(self, sequences: int, rows: int) -> float:
        """There must have been one without guesses."""
        if sequences not in self._known:
            own = self._seconds[sequences]
            rows_known = sorted(own)
            self._known[sequences] = rows_known, [statistics.median(own[count]) for count in rows_known]
        known, medians = self._known[sequences]
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return medians[at]
        before, before_s = known[at - 1], medians[at - 1]
        if at < len(known):
            share = (rows - before) / (known[at] - before)
            return before_s + share * (medians[at] - before_s)
        return before_s * self._growth(sequences, rows) / self._growth(sequences, before)
