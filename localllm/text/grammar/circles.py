"""What holds itself, of schemas and of rules of a grammar."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

K = TypeVar("K")


def holding_themselves(held: Mapping[K, Collection[K]]) -> set[K]:
    """Those that hold themselves, or one that does: what is left where those are taken away that hold none that is
    left. held: by each the others, each once."""
    num_held = {each: len(others) for each, others in held.items()}
    holders: dict[K, list[K]] = {each: [] for each in held}
    for holder, others in held.items():
        for each in others:
            holders[each].append(holder)
    ready = [each for each, count in num_held.items() if not count]
    while ready:
        each = ready.pop()
        del num_held[each]
        for holder in holders[each]:
            num_held[holder] -= 1
            if not num_held[holder]:
                ready.append(holder)
    return set(num_held)
