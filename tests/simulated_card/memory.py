"""The memory of the simulated card: an arena of the host's, given out by the rules of torch's caching allocator.

Memory that is freed serves the next allocation of the same stream at once, whatever other streams still do with it; of
another stream never. Graphs have pools of their own. Small blocks are cut from segments of 2 MiB, larger ones from 20
MiB, and segments go back to the driver when they are asked for and nothing is left in them.
"""

from __future__ import annotations

import mmap
from bisect import insort
from collections import Counter, deque
from collections.abc import Hashable

import torch

MIB = 1 << 20
_ALIGN, _SMALL = 512, MIB  # a block's multiple; the largest of those in small segments


class FullError(Exception):
    """There is no room; the card says so in torch's words."""


class Piece:
    """A run of bytes of a segment, free or given out, between its neighbours."""

    __slots__ = ("after", "before", "begin", "is_free", "segment", "size")

    def __init__(self, segment: Segment, begin: int, size: int) -> None:
        self.segment, self.begin, self.size = segment, begin, size
        self.before: Piece | None = None
        self.after: Piece | None = None
        self.is_free = True

    def __lt__(self, other: Piece) -> bool:
        """The smallest first, and of equals the one in front: which of them is taken is no matter of chance."""
        return (self.size, self.begin) < (other.size, other.begin)


class Segment:
    def __init__(self, begin: int, size: int, owner: Hashable) -> None:
        self.begin, self.size, self.owner = begin, size, owner


class Block:
    """Memory that somebody has, until nobody does any more."""

    __slots__ = ("_memory", "begin", "piece", "size")

    def __init__(self, memory: Memory, piece: Piece) -> None:
        self._memory, self.piece, self.begin, self.size = memory, piece, piece.begin, piece.size

    def __del__(self) -> None:
        # Whenever Python collects it, in the midst of an allocation too: nothing but this, then.
        self._memory.let_go.append(self.piece)


class Memory:
    """total_bytes: of the card. taken_bytes: what others than torch have of it, by who they are."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.fraction = 1.0  # the most of it that torch may take
        self.taken_bytes: Counter[str] = Counter()
        self.kept: Counter[Hashable] = Counter()  # owners whose segments stay: the pools, by how many graphs use them
        self.let_go: deque[Piece] = deque()
        self._free: dict[tuple[Hashable, bool], list[Piece]] = {}  # by the owner, and whether they are small
        self._segments: list[Segment] = []
        # Addresses are not memory: where a segment was, another of another size need not fit.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.arena = torch.frombuffer(mmap.mmap(-1, 4 * total_bytes, flags=flags), dtype=torch.uint8)
        self.base = self.arena.data_ptr()
        self.allocated_bytes = self.most_allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def free_bytes(self) -> int:
        """What the driver would say is free."""
        return max(0, self.total_bytes - self.reserved_bytes - sum(self.taken_bytes.values()))

    def take(self, who: str, num_bytes: int) -> None:
        """Give memory to somebody else than torch, or take it back: a driver's module, another program. Raises
        FullError."""
        if num_bytes > self.free_bytes:
            raise FullError
        self.taken_bytes[who] += num_bytes

    def allocate(self, num_bytes: int, owner: Hashable, *, may_give_back: bool = True) -> Block:
        """Return a block for a stream, or a pool. may_give_back: to the driver, what torch keeps for later, where there
        is no other room. Raises FullError."""
        self._collect()
        size = max(_ALIGN, -(-num_bytes // _ALIGN) * _ALIGN)
        free = self._free.setdefault((owner, size <= _SMALL), [])
        piece = next((piece for piece in free if piece.size >= size), None)
        if piece is None:
            piece = self._segment(size, owner, may_give_back=may_give_back)
        else:
            free.remove(piece)
        least_rest = _ALIGN if size <= _SMALL else _SMALL + 1
        if piece.size - size >= least_rest:
            self._cut(piece, size)
        piece.is_free = False
        self.allocated_bytes += piece.size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return Block(self, piece)

    def give_back(self) -> None:
        """Give every segment that nobody has anything of to the driver."""
        self._collect()
        for (owner, _), free in self._free.items():
            whole = [piece for piece in free if piece.size == piece.segment.size and not self.kept[owner]]
            for piece in whole:
                free.remove(piece)
                self._segments.remove(piece.segment)

    def holds(self, address: int, num_bytes: int) -> bool:
        """Return whether these bytes are memory that torch has of the card."""
        begin = address - self.base
        return any(s.begin <= begin and begin + num_bytes <= s.begin + s.size for s in self._segments)

    def _segment(self, size: int, owner: Hashable, *, may_give_back: bool) -> Piece:
        is_small = size <= _SMALL
        num_bytes = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self._has_room(num_bytes) and may_give_back:
            self.give_back()
        if not self._has_room(num_bytes):
            raise FullError
        segment = Segment(self._address(num_bytes), num_bytes, owner)
        self._segments.append(segment)
        return Piece(segment, segment.begin, num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return num_bytes <= min(self.free_bytes, int(self.fraction * self.total_bytes) - self.reserved_bytes)

    def _address(self, num_bytes: int) -> int:
        """Return the first place in the arena that is large enough."""
        begin = 0
        for segment in sorted(self._segments, key=lambda segment: segment.begin):
            if segment.begin - begin >= num_bytes:
                break
            begin = segment.begin + segment.size
        assert begin + num_bytes <= self.arena.numel(), "there are more addresses than memory"
        return begin

    def _cut(self, piece: Piece, size: int) -> None:
        rest = Piece(piece.segment, piece.begin + size, piece.size - size)
        rest.before, rest.after, piece.size = piece, piece.after, size
        if piece.after is not None:
            piece.after.before = rest
        piece.after = rest
        insort(self._list_of(rest), rest)

    def _collect(self) -> None:
        """Take back what was let go, and join it with its neighbours."""
        while self.let_go:
            piece = self.let_go.popleft()
            self.allocated_bytes -= piece.size
            for neighbour in (piece.before, piece.after):
                if neighbour is not None and neighbour.is_free:
                    self._list_of(neighbour).remove(neighbour)
                    piece = self._joined(*sorted((piece, neighbour), key=lambda piece: piece.begin))
            piece.is_free = True
            insort(self._list_of(piece), piece)

    def _joined(self, first: Piece, second: Piece) -> Piece:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _list_of(self, piece: Piece) -> list[Piece]:
        is_small = piece.segment.size == 2 * MIB
        return self._free.setdefault((piece.segment.owner, is_small), [])
