"""A ring of memory through which more bytes pass than it holds. Knows sizes and order, no bytes.

Every run of bytes has a place in it that never changes, lap after lap: what points at it (a kernel's arguments, a
tensor's view, a captured graph) is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """Runs pass in order, and after the last the first again.

    offsets: where each run begins, in bytes. reach: how many runs before it in that order the last one was whose bytes
    it takes; it may be written as soon as that one is no longer needed.
    """

    num_bytes: int
    offsets: tuple[int, ...]
    reach: tuple[int, ...]


def least_ring_bytes(sizes: Sequence[int]) -> int:
    """The smallest ring in which each run has a place of its own while the one before it is needed.

    That is enough where computing a run takes less time than bringing the next; where it takes longer, no ring helps.
    """
    runs = len(sizes)
    if runs < 2:
        return sum(sizes)
    least = max(sizes[run] + sizes[run - 1] for run in range(runs))
    # Runs of unequal sizes leave gaps where the ring ends; with a little more room none of them is in the way.
    candidates = range(least, sum(sizes), max(min(sizes), 1))
    return next((room for room in candidates if min(ring(sizes, room).reach) > 1), sum(sizes))


def ring(sizes: Sequence[int], num_bytes: int) -> Ring:
    """Places for runs of `sizes` bytes in a ring of `num_bytes`, which are at least those of the largest."""
    assert num_bytes >= max(sizes, default=0)
    offsets: list[int] = []
    end = 0
    for size in sizes:
        begin = end if end + size <= num_bytes else 0
        offsets.append(begin)
        end = begin + size
    return Ring(num_bytes, tuple(offsets), tuple(_reach(sizes, offsets, run) for run in range(len(sizes))))


def _reach(sizes: Sequence[int], offsets: Sequence[int], run: int) -> int:
    begin, end = offsets[run], offsets[run] + sizes[run]
    runs = len(sizes)
    for distance in range(1, runs):
        other = (run - distance) % runs
        if offsets[other] < end and begin < offsets[other] + sizes[other]:
            return distance
    return runs
