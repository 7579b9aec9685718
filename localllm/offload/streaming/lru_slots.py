"""Which experts have slots, and which of them gives way: the one that was used longest ago. Knows no memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

Expert = tuple[str, int]  # a block's name, and a number in it


class LruSlots:
    """Numbers of slots, each of at most one expert."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._slots: OrderedDict[Expert, int] = OrderedDict()  # those used last at the end

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._slots

    def __getitem__(self, expert: Expert) -> int:
        return self._slots[expert]

    def use(self, expert: Expert) -> None:
        self._slots.move_to_end(expert)

    def give_way_next(self, expert: Expert) -> None:
        self._slots.move_to_end(expert, last=False)

    def take(self, expert: Expert, kept: Container[Expert]) -> tuple[int, Expert | None] | None:
        """Return a slot for the expert, and who lost it, if anyone did; None where all are taken by those in `kept`."""
        loser = None if self._free else next((each for each in self._slots if each not in kept), None)
        if loser is None and not self._free:
            return None
        slot = self._free.pop() if loser is None else self._slots.pop(loser)
        self._slots[expert] = slot
        return slot, loser

    def free(self, expert: Expert) -> None:
        self._free.append(self._slots.pop(expert))

    def lose(self, expert: Expert) -> None:
        """Forget an expert whose slot may never be used again."""
        del self._slots[expert]
