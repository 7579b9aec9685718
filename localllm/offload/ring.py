"""A ring of memory through which more bytes pass than it holds. Knows sizes and order, no bytes.

Every run of bytes has a place in it that never changes, lap after lap: what points at it (a kernel's arguments, a
tensor's view, a captured graph) is made once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """Runs pass in order, and after the last the first again; each has a place while the one before it is needed.

    That is enough where computing a run takes less time than bringing the next; where it takes longer, no ring helps.

    offsets: where each run begins, in bytes. reach: how many runs before it in that order the last one was whose bytes
    it takes; it may be written as soon as that one is no longer needed.
    """

    num_bytes: int
    offsets: tuple[int, ...]
    reach: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Ring:
        """The smallest for runs of these sizes: they lie at its beginning and at its end in turn.

        Where their number is odd the first run takes the place of the last: its reading waits until that is computed.
        """
        num_bytes = ring_bytes(sizes)
        offsets = tuple(0 if run % 2 == 0 else num_bytes - size for run, size in enumerate(sizes))
        first = 1 if len(sizes) % 2 else 2
        return cls(num_bytes, offsets, (first, *[2] * (len(sizes) - 1))[: len(sizes)])


def ring_bytes(sizes: Sequence[int]) -> int:
    """Of the ring for runs of these sizes."""
    around = [*sizes, sizes[0]] if len(sizes) % 2 == 0 and sizes else sizes
    return max((a + b for a, b in itertools.pairwise(around)), default=sum(sizes))
