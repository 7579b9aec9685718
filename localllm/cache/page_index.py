"""An index of the pages: how they hang on one another, and which of them go first. It knows names and opens no file.

Pages of a root are a forest: each hangs on the one before it, the first ones on the root. What is behind a missing page
is of no use, so only the tails of chains are ever given up.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from localllm.cache.page_folder import PageFile, Place

_SAME_TIME_NS = 2_000_000_000  # file systems round times, to 2 s at most


class PageIndex:
    """Pages in the order of their use. Held by one thread at a time; who shares it locks it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._files: dict[Place, PageFile] = {}
        self._turns: dict[Place, int] = {}  # of use: a clock that jumps has no part in it
        self._children: defaultdict[Place, set[Place]] = defaultdict(set)
        self._next_turn = 0

    def __contains__(self, place: Place) -> bool:
        return place in self._files

    def __iter__(self) -> Iterator[PageFile]:
        return iter(self._files.values())

    def get(self, place: Place) -> PageFile | None:
        return self._files.get(place)

    def children(self, parent: Place) -> list[PageFile]:
        """Return the pages behind `parent`, those that were used last first."""
        return self.last_used(self._files[place] for place in self._children.get(parent, ()))

    def last_used(self, files: Iterable[PageFile]) -> list[PageFile]:
        """Return these pages, those that were used last first."""
        return sorted(files, key=lambda file: self._turns[file.place], reverse=True)

    def add(self, file: PageFile) -> None:
        """Add a page as the last used one, in the place of what was there under its name."""
        self.remove(file.place)
        self._files[file.place] = file
        self._children[file.behind].add(file.place)
        self.num_bytes += file.num_bytes
        self.touch(file.place)

    def remove(self, place: Place) -> None:
        if (file := self._files.pop(place, None)) is not None:
            del self._turns[place]
            self._children[file.behind].remove(place)
            self.num_bytes -= file.num_bytes

    def remove_with_descendants(self, place: Place) -> None:
        ends = [place]
        while ends:
            end = ends.pop()
            ends += self._children.get(end, ())
            self.remove(end)

    def touch(self, place: Place) -> None:
        """Move the page to the end of the order."""
        self._turns[place] = self._next_turn
        self._next_turn += 1

    def stamp(self, place: Place, used_ns: int) -> None:
        """Note the time of use that the page's file has now."""
        if place in self._files:
            self._files[place] = replace(self._files[place], used_ns=used_ns)

    def merge(self, files: Iterable[PageFile], now_ns: int) -> None:
        """Take over what is there now. Pages that are new, or that another process has used since, come in the order
        of their times, those of the future as the oldest; the others keep their turns."""
        found = {file.place: file for file in files}
        for place in self._files.keys() - found.keys():
            self.remove(place)
        fresh = [
            file
            for place, file in found.items()
            if place not in self._files or file.used_ns > self._files[place].used_ns + _SAME_TIME_NS
        ]
        for file in sorted(fresh, key=lambda file: (file.used_ns <= now_ns, file.used_ns)):
            self.add(file)

    def reaches_root(self, place: Place) -> bool:
        """Return whether the page and all before it are there; the root itself is."""
        seen: set[Place] = set()
        while place[0] != place[1]:
            file = self._files.get(place)
            if file is None or place in seen:
                return False
            seen.add(place)
            place = file.behind
        return True

    def orphans(self) -> list[PageFile]:
        """Return the pages behind one that is missing, or in a circle that no honest names make."""
        ends: list[Place] = [(root, root) for root in {root for root, _ in self._files}]
        reached = set(ends)
        while ends:
            further = self._children.get(ends.pop(), set()) - reached
            reached |= further
            ends += further
        return [file for place, file in self._files.items() if place not in reached]

    def victims(self, excess_bytes: int, keep: Place) -> list[PageFile]:
        """Return what to delete, in order, so that as many bytes become free, or all that can: orphans, then the
        tail that was used longest ago, and so on. `keep` and what it hangs on stay."""
        if excess_bytes <= 0:
            return []
        chosen = self.orphans()
        gone, freed = {file.place for file in chosen}, sum(file.num_bytes for file in chosen)
        left = {place: len(pages) for place, pages in self._children.items()}
        tails = [(turn, place) for place, turn in self._turns.items() if not left.get(place) and place not in gone]
        heapq.heapify(tails)
        while tails and freed < excess_bytes:
            _, place = heapq.heappop(tails)
            if place == keep:
                continue
            file = self._files[place]
            chosen.append(file)
            freed += file.num_bytes
            left[file.behind] -= 1
            if not left[file.behind] and file.behind in self._files:
                heapq.heappush(tails, (self._turns[file.behind], file.behind))
        return chosen
