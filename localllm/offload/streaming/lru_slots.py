"""Which experts have slots, and which of them is evicted: the one that was used longest ago. Knows no memory."""

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
        """Let the expert be evicted last."""
        self._slots.move_to_end(expert)

    def evict_next(self, expert: Expert) -> None:
        """Let the expert be evicted first."""
        self._slots.move_to_end(expert, last=False)

    def take(self, expert: Expert, kept: Container[Expert]) -> tuple[int, Expert | None] | None:
        """Return a slot for the expert, and who was evicted from it, if any; None where `kept` has all of them."""
        evicted = None if self._free else next((each for each in self._slots if each not in kept), None)
        if evicted is None and not self._free:
            return None
        slot = self._free.pop() if evicted is None else self._slots.pop(evicted)
        self._slots[expert] = slot
        return slot, evicted

    def free(self, expert: Expert) -> None:
        """Let another expert have the slot of this one."""
        self._free.append(self._slots.pop(expert))

    def retire(self, expert: Expert) -> None:
        """Forget an expert whose slot must never be used again."""
        del self._slots[expert]
