"""Find what can end and what leads back to itself, among schemas or rules of a grammar."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TypeVar

K = TypeVar("K")


def grounded(ways: Mapping[K, Collection[Collection[K]]]) -> set[K]:
    """Return those with a way that needs nothing but grounded ones.

    ways: for each the ways to meet it, and what each of them needs. What has no entry counts as grounded.
    """
    owners: list[K] = []
    num_missing: list[int] = []
    needed_by = defaultdict[K, list[int]](list)  # numbers of ways
    ready: list[K] = []
    for key, found in ways.items():
        for way in found:
            missing = {each for each in way if each in ways}
            for each in missing:
                needed_by[each].append(len(owners))
            owners.append(key)
            num_missing.append(len(missing))
            if not missing:
                ready.append(key)
    met = set[K]()
    while ready:
        key = ready.pop()
        if key not in met:
            met.add(key)
            for way_number in needed_by[key]:
                num_missing[way_number] -= 1
                if not num_missing[way_number]:
                    ready.append(owners[way_number])
    return met


def leading_to_themselves(held: Mapping[K, Collection[K]]) -> set[K]:
    """Return those that hold themselves, or one that does. held: by each the others, all of which have an entry."""
    return held.keys() - grounded({key: [others] for key, others in held.items()})
