"""An index of the pages: how they hang on one another, and which of them go first. It knows names and opens no file.

Pages of a root are a forest: each hangs on the one before it, the first ones on the root. What is behind a missing page
is of no use, so only the tails of chains are ever given up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from localllm.cache.page_folder import PageFile

Place = tuple[str, str]  # the names of a root and a page


class PageIndex:
    """Pages in the order of their use. Held by one thread at a time; who shares it locks it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._files: dict[Place, PageFile] = {}
        self._turns: dict[Place, int] = {}  # of use: a clock that jumps has no part in it
        self._children: dict[Place, set[str]] = {}
        self._next_turn = 0

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, place: Place) -> bool:
        return place in self._files

    def __iter__(self) -> Iterator[PageFile]:
        return iter(self._files.values())

    def get(self, place: Place) -> PageFile | None:
        return self._files.get(place)

    def children(self, root: str, parent: str) -> list[PageFile]:
        """Return the pages behind `parent`, those that were used last first."""
        places = [(root, page) for page in self._children.get((root, parent), ())]
        return [self._files[place] for place in sorted(places, key=self._turns.__getitem__, reverse=True)]

    def add(self, file: PageFile) -> None:
        """Add a page as the last used one, in the place of what was there under its name."""
        place = (file.root, file.page)
        self.remove(place)
        self._files[place] = file
        self._children.setdefault((file.root, file.parent), set()).add(file.page)
        self.num_bytes += file.num_bytes
        self.touch(place)

    def remove(self, place: Place) -> None:
        file = self._files.pop(place, None)
        if file is None:
            return
        del self._turns[place]
        self.num_bytes -= file.num_bytes
        siblings = self._children[file.root, file.parent]
        siblings.remove(file.page)
        if not siblings:
            del self._children[file.root, file.parent]

    def remove_with_descendants(self, place: Place) -> None:
        ends = [place]
        while ends:
            end = ends.pop()
            ends += [(end[0], page) for page in self._children.get(end, ())]
            self.remove(end)

    def touch(self, place: Place) -> None:
        """Move the page to the end of the order."""
        self._turns[place] = self._next_turn
        self._next_turn += 1

    def stamp(self, place: Place, used_ns: int) -> None:
        """Note the time of use that the page's file has now."""
        self._files[place] = replace(self._files[place], used_ns=used_ns)

    def merge(self, files: Iterable[PageFile], now_ns: int) -> None:
        """Take over what is there now: new ones in the order of their times, those of the future as the oldest. What
        was known keeps its turn."""
        found = {(file.root, file.page): file for file in files}
        for place in [place for place in self._files if place not in found]:
            self.remove(place)
        new = [file for place, file in found.items() if place not in self._files]
        for file in sorted(new, key=lambda file: (file.used_ns <= now_ns, file.used_ns)):
            self.add(file)

    def reaches_root(self, root: str, page: str) -> bool:
        """Return whether the page and all before it are there; the root itself is."""
        seen = set()
        while page != root:
            file = self._files.get((root, page))
            if file is None or page in seen:
                return False
            seen.add(page)
            page = file.parent
        return True

    def orphans(self) -> list[PageFile]:
        """Behind a page that is missing, or in a circle that no honest names make."""
        reached: set[Place] = set()
        ends = [(root, root) for root in {root for root, _ in self._files}]
        while ends:
            root, parent = ends.pop()
            reached.add((root, parent))
            ends += [(root, page) for page in self._children.get((root, parent), ()) if (root, page) not in reached]
        return [file for place, file in self._files.items() if place not in reached]

    def victims(self, excess_bytes: int, keep: Place) -> list[PageFile]:
        """Return what to delete, in order, so that as many bytes become free, or all that can: orphans, then the
        tail that was used longest ago, and so on. `keep` and what it hangs on stay."""
        if excess_bytes <= 0:
            return []
        orphans = self.orphans()
        gone = {(file.root, file.page) for file in orphans}
        left = {place: len(pages) for place, pages in self._children.items()}
        tails = [(turn, place) for place, turn in self._turns.items() if not left.get(place) and place not in gone]
        heapq.heapify(tails)
        chosen, freed = orphans, sum(file.num_bytes for file in orphans)
        while tails and freed < excess_bytes:
            _, place = heapq.heappop(tails)
            if place == keep:
                continue
            file = self._files[place]
            chosen.append(file)
            freed += file.num_bytes
            parent = (file.root, file.parent)
            left[parent] -= 1
            if not left[parent] and parent in self._files:
                heapq.heappush(tails, (self._turns[parent], parent))
        return chosen
