"""A ring of memory through which more bytes pass than it holds. Knows sizes and order, no bytes.

Every run of bytes has a place in it that never changes, lap after lap: what points at it (a kernel's arguments, a
tensor's view, a captured graph) is made once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096  # what O_DIRECT asks of addresses, offsets and sizes
ALIGN_BYTES = 2 << 20  # a huge page: 70 MB of a file are mapped in 1 ms where their place is so aligned, in 4 elsewhere


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
    def of(cls, sizes: Sequence[int], align_bytes: int = 1) -> Ring:
        """Return the smallest ring for runs of these sizes: they lie at its beginning and at its end in turn.

        Where their number is odd the first run takes the place of the last: its reading waits until that is computed.
        align_bytes: see `ring_bytes`.
        """
        num_bytes = ring_bytes(sizes, align_bytes)
        ends = [num_bytes - _place_bytes(size, align_bytes) for size in sizes]
        offsets = tuple(0 if run % 2 == 0 else end for run, end in enumerate(ends))
        first = 1 if len(sizes) % 2 else 2
        return cls(num_bytes, offsets, (first, *[2] * (len(sizes) - 1))[: len(sizes)])


def ring_bytes(sizes: Sequence[int], align_bytes: int = 1) -> int:
    """Return the size of the ring for runs of these sizes. align_bytes: what the places of large ones are multiples
    of."""
    places = [_place_bytes(size, align_bytes) for size in sizes]
    around = [*places, places[0]] if len(places) % 2 == 0 and places else places
    num_bytes = max((a + b for a, b in itertools.pairwise(around)), default=sum(places))
    return _place_bytes(num_bytes, align_bytes)


def _place_bytes(size: int, align_bytes: int) -> int:
    """Round the size of a large run up; small ones lie anywhere, as rounding would cost more than it brings."""
    return size if size < 4 * align_bytes else -(-size // align_bytes) * align_bytes
