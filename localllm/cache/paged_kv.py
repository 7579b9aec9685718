"""What is kept of one sequence: block tables over pages that it may share with others, and its recurrent states.

A page is *open* while its tokens are being written: dense, private, and written over after a rejected draft. In a coded
format every token is written twice, into the open page and in its coded form, so that nothing happens when a page is
full but that it may be sealed: hashed, shared, never written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from localllm.cache.extents import Extent
from localllm.cache.kv_eviction import FORWARD_TOKENS
from localllm.cache.kv_pages import KVPages
from localllm.cache.layer_group import LayerGroup
from localllm.cache.page_ring import PageRing
from localllm.cache.pages import Page, PagePool
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout, pages_of
from localllm.kernels.page_choice import PageChoice, PageSketches
from localllm.kernels.paged_attention import LayerPages
from localllm.layers.low_rank import AppliedAdapter


class PagedKV:
    """One sequence's pages. It holds `length` tokens; a forward writes behind them, and `advance` makes those part of
    the sequence once every layer has written, so that one that fails or is cancelled leaves it as it was."""

    def __init__(self, pages: KVPages, capacity: int, borrowed: Sequence[Sequence[Page | None]] = ()) -> None:
        """Reserve room for so many tokens; raises what torch does where there is no memory. borrowed: the first pages,
        in each group, of a sequence that outlives this one: its full ones."""
        self.pages = pages
        self.capacity = capacity
        self.length = 0
        self.adapters: Sequence[AppliedAdapter] = ()  # that its tokens are computed with
        self.tables: list[list[Page | None]] = [[None] * pages_of(capacity) for _ in pages.groups]
        self.num_sealed = 0  # pages from the first on
        self.moved: set[int] = set()  # pages that are not computed: what they hold was taken from another place
        self.exact_tokens = capacity  # what is behind these saw less than all before it: no other prompt takes it
        self.attend_from: int | None = None  # tokens from there on choose the pages that they attend to
        self._open: list[dict[int, Page]] = [{} for _ in pages.groups]  # by their number; coded formats only
        self._scratch: list[dict[int, Page]] = [{} for _ in pages.groups]
        # Resting elsewhere, of each group that has such: the pages behind the first one, up to those in memory.
        self.extents: dict[int, list[Extent]] = {index: [] for index in pages.stores}
        self._addresses = [
            {device: torch.zeros(pages_of(capacity), dtype=torch.int64) for device in group.sealed.devices}
            for group in pages.groups
        ]
        num_borrowed = len(borrowed[0]) if borrowed else 0
        # Of tokens that do not see all pages: what they do see, by group, number of their page, and device.
        self._views: dict[tuple[int, int, torch.device], Tensor] = {}
        self._left: set[int] = set()  # pages that got too little attention
        self.masses = pages.new_masses(capacity)
        self.state, self._sketches = pages.new_state(), pages.new_sketches(capacity)
        self._reserve(num_borrowed)
        self._borrowed = {page for table in borrowed for page in table if page is not None}
        for index, table in enumerate(borrowed):
            for number, page in enumerate(table):
                if page is not None:
                    page.owners += 1
                    self._set(index, number, page)
        self.num_sealed, self.length = num_borrowed, num_borrowed * PAGE_TOKENS
        pages.sequences.add(self)

    def branch(self, capacity: int) -> PagedKV:
        """Return another sequence with all tokens of this one: full pages are shared, the last one is copied.

        It ends before this one does. Raises what torch does where there is no memory.
        """
        number = self.length // PAGE_TOKENS
        unseen = [group.unseen(number * PAGE_TOKENS) for group in self.pages.groups]
        pairs = zip(self.tables, unseen, strict=True)
        full = [[None if n in gone else page for n, page in enumerate(table[:number])] for table, gone in pairs]
        other = PagedKV(self.pages, capacity, full)
        other.adapters, other.attend_from = self.adapters, self.attend_from
        if self.exact_tokens < self.capacity:
            other.exact_tokens = self.exact_tokens
        other._left = set(self._left)
        other.moved = set(self.moved)
        other.extents = {index: self.pages.stores[index].share(own) for index, own in self.extents.items()}
        if self.masses is not None and other.masses is not None:
            self.masses.settle(self.length)
            other.masses.take_from(self.masses)
        try:
            for index, group in enumerate(self.pages.groups) if self.length % PAGE_TOKENS else ():
                page = self.tables[index][number]
                assert page is not None
                own = other._take(page.pool)
                own.copy_from(page)
                other._set(index, number, own)
                if (opened := self._open[index].get(number)) is not None:
                    other._open[index][number] = other._take(group.dense)
                    other._open[index][number].copy_from(opened)
        except BaseException:
            other.close()
            raise
        other.length = self.length
        if other.state is not None and self.state is not None:
            other.state.take_from(self.state)
        return other

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        return self.pages.places

    @property
    def homes(self) -> Sequence[tuple[torch.device, int]]:
        return self.pages.homes

    @property
    def is_on_host(self) -> bool:
        return self.pages.is_on_host

    @property
    def choice(self) -> PageChoice | None:
        """Return by what tokens choose the pages that they attend to; None where they attend to all."""
        if self.attend_from is None or not self._sketches or self.pages.chosen_pages is None:
            return None
        return PageChoice(self.pages.chosen_pages, self.attend_from)

    @property
    def chosen_pages(self) -> int:
        """Return how many pages a token chooses where it does not attend to all; 0 where each attends to all."""
        return self.pages.chosen_pages or 0

    def sketches(self, index: int) -> PageSketches:
        """Return the sketches of a group's pages, by which tokens choose."""
        return self._sketches[index]

    @property
    def nbytes(self) -> int:
        """The bytes of its states and of its pages' sketches."""
        states = 0 if self.state is None else self.state.nbytes
        return states + sum(each.nbytes for each in self._sketches.values())

    def move_states(self, devices: Sequence[torch.device]) -> None:
        if self.state is not None:
            self.state.move(devices)

    @property
    def layouts(self) -> tuple[PageLayout, PageLayout | None]:
        return self._layouts(self.pages.groups[0])

    def layouts_of(self, layer: int) -> tuple[PageLayout, PageLayout | None]:
        return self._layouts(self.pages.groups[self.pages.places[layer][0]])

    def _layouts(self, group: LayerGroup) -> tuple[PageLayout, PageLayout | None]:
        return group.dense.layout, None if group.coded is None else group.coded.layout

    # What is reserved and given back

    def _reserve(self, num_borrowed: int) -> None:
        reserved: list[tuple[PagePool, int]] = []
        try:
            for group in self.pages.groups:
                num_own = min(group.num_pages(self.capacity), pages_of(self.capacity) - num_borrowed)
                for pool, count in ((group.sealed, num_own), (group.dense, group.num_dense)):
                    pool.reserve(count)
                    reserved.append((pool, count))
        except BaseException:
            for pool, count in reserved:
                pool.release(count)
            raise
        self._promised = dict.fromkeys((pool for group in self.pages.groups for pool in group.pools), 0)
        for pool, count in reserved:
            self._promised[pool] += count

    def close(self) -> None:
        """Give its pages back, the last ones first: sealed ones are kept in that order."""
        if self not in self.pages.sequences:
            return
        self.pages.sequences.remove(self)
        self.state = None
        self._end_forward()
        self._drop_extents(0)
        for index, group in enumerate(self.pages.groups):
            for page in self._open[index].values():
                group.dense.drop(page)
            self._open[index].clear()
            for number in reversed(range(len(self.tables[index]))):
                if (held := self.tables[index][number]) is not None:
                    held.pool.drop(held)
                    self.tables[index][number] = None
        for pool, count in self._promised.items():
            pool.release(count)
            self._promised[pool] = 0

    def _claim(self, pool: PagePool) -> PagePool:
        """Spend one page of the reservation."""
        if self._promised[pool]:
            self._promised[pool] -= 1
        else:  # a longer forward than a window's pages were reserved for
            pool.reserve(1)
        return pool

    def _take(self, pool: PagePool) -> Page:
        return self._claim(pool).take()

    def give_back(self, page: Page) -> None:
        """Let go of a page. Where there is no memory for another one that it may need, raises what torch does, and
        still has it."""
        is_own = page not in self._borrowed
        page.pool.drop(page, keeps_promise=is_own)
        self._borrowed.discard(page)
        self._promised[page.pool] += is_own

    # What rests elsewhere

    def spilled_pages(self, index: int) -> int:
        """Return how many pages of a group rest elsewhere, behind the first one."""
        return len(self.extents[index]) * self.pages.stores[index].extent_pages if index in self.extents else 0

    @property
    def num_spilled(self) -> int:
        """Pages that rest elsewhere, in each group that has such."""
        return max(map(self.spilled_pages, self.extents), default=0)

    @property
    def most_extents(self) -> int:
        """Return how many it has at most, in each group."""
        spills = [spill for group in self.pages.groups if (spill := group.spill) is not None]
        missing = (max(0, pages_of(self.capacity) - spill.resident_pages) for spill in spills)
        return max((-(-count // spill.extent_pages) for count, spill in zip(missing, spills, strict=True)), default=0)

    @property
    def num_sketched(self) -> int:
        """Pages from the first on of which every layer has sketches."""
        return min((each.num_made for each in self._sketches.values()), default=0)

    @property
    def ring(self) -> PageRing | None:
        """Return what brings its pages from where they rest; None where all are in memory."""
        return self.pages.ring if self.num_spilled else None

    def rests_elsewhere(self, end: int) -> bool:
        """Return whether some of its pages rest elsewhere once a forward is prepared that ends there."""
        return self.num_spilled > 0 or any(self._leaves(index, pages_of(end)) for index in self.extents)

    def room_for(self, num_pages: int) -> int:
        """Return how many of so many pages it can take before others must leave memory; 1 at least."""
        promised = [self._promised[self.pages.groups[index].sealed] for index in self.extents]
        return max(1, min([num_pages, *promised]))

    def _leaves(self, index: int, num_pages: int) -> range:
        """Return the pages of a group that are to leave memory next where there are to be so many; none where memory
        has room. A forward may be longer than what is to stay: what it has not written yet stays as well."""
        begin, store, spill = 1 + self.spilled_pages(index), self.pages.stores[index], self.pages.groups[index].spill
        assert spill is not None
        end = begin + store.extent_pages
        is_due = 1 + num_pages - begin > spill.resident_pages and end <= self.length // PAGE_TOKENS
        return range(begin, end) if is_due else range(0)

    def _spill(self, num_pages: int) -> None:
        """Let the oldest pages leave memory where it is to have so many, and memory is for fewer. Raises LocalLLMError
        where the disk takes none, and what torch does where the host has no memory."""
        for index, extents in self.extents.items():
            table = self.tables[index]
            while numbers := self._leaves(index, num_pages):
                pages = [page for page in table[numbers.start : numbers.stop] if page is not None]
                extents.append(self.pages.stores[index].write(pages))
                assert self.pages.ring is not None
                self.pages.ring.forget(index, extents[-1])
                for number, page in zip(numbers, pages, strict=True):
                    self._leave(page)
                    table[number] = None

    def _leave(self, page: Page) -> None:
        """Let go of a page that has been written elsewhere. Where there is no memory for another one that it may need,
        that is claimed once it does."""
        try:
            self.give_back(page)
        except (MemoryError, torch.OutOfMemoryError):
            page.pool.drop(page)
            self._borrowed.discard(page)

    def _drop_extents(self, num_pages: int) -> int:
        """Forget extents that reach beyond so many pages; return how many pages are left of those."""
        has_dropped = False
        for index, extents in self.extents.items():
            store = self.pages.stores[index]
            if num_pages < 1 + len(extents) * store.extent_pages:
                num_kept = max(0, num_pages - 1) // store.extent_pages
                has_dropped = has_dropped or num_kept < len(extents)
                store.release(extents[num_kept:])
                del extents[num_kept:]
                num_pages = min(num_pages, 1 + num_kept * store.extent_pages)
        if has_dropped:
            self.pages.end_spill()
        return num_pages

    # A forward

    def prepare(self, end: int) -> None:
        """Make room for a forward that writes the tokens from `length` to `end`, and let go of pages that no token from
        here on sees."""
        assert self.length <= end <= self.capacity, "the scheduler admits no token beyond what was reserved"
        self._end_forward()
        self._trim_sketches()
        self._evict()
        first, last = self.length // PAGE_TOKENS, (end - 1) // PAGE_TOKENS
        self._spill(last + 1)
        for index, group in enumerate(self.pages.groups):
            table, opened = self.tables[index], self._open[index]
            for number in group.unseen(self.length):
                if (gone := table[number]) is not None:
                    self.give_back(gone)
                    table[number] = None
                    self._views.clear()
            for number in [number for number in opened if number < first]:
                self.give_back(opened.pop(number))
            for number in range(first, last + 1):
                if number in self.moved:
                    continue
                if table[number] is None:
                    pool = group.dense if number == 0 else group.sealed
                    self._set(index, number, self._take(pool))
                if group.coded is None or number == 0 or number in opened:
                    continue
                if number == last:
                    opened[number] = self._take(group.dense)
                else:
                    group.scratch.reserve(1)
                    self._scratch[index][number] = group.scratch.take()
        if self.masses is not None:
            self.masses.watch(self.length, end, [n for n in range(last + 1) if n not in self._left])
        if self.state is not None:
            self.state.prepare(self.length, end)

    def _evict(self) -> None:
        """Let go of full pages that got least attention, as long as there are more than may stay."""
        eviction = self.pages.eviction
        if self.masses is None or eviction is None:
            return
        self.masses.settle(self.length)
        held = [n for n in range(self.length // PAGE_TOKENS) if n not in self._left]
        while self.masses.are_known and len(held) > eviction.pages:
            gone = self.masses.least(held[1 : len(held) - eviction.newest])
            for index, group in enumerate(self.pages.groups):
                if group.eviction is not None and (page := self.tables[index][gone]) is not None:
                    self.give_back(page)
                    self.tables[index][gone] = None
            held.remove(gone)
            self._left.add(gone)
            self._views.clear()
            self.exact_tokens = min(self.exact_tokens, self.length)

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        if self.state is not None:
            self.state.advance(self.length)
        self._end_forward()

    def recover(self) -> None:
        """Begin anew where a forward has failed in which states were changed in place."""
        if self.state is not None and self.state.is_torn:
            self.trim(0)

    def _end_forward(self) -> None:
        for scratch in self._scratch:
            for page in scratch.values():
                page.pool.drop(page)
            scratch.clear()

    def trim(self, length: int) -> int:
        """Forget all but the first `length` tokens, or a few more of the last page where what its own tokens must read
        densely is gone, or all where a recurrent state cannot be cut back. Returns how many are held."""
        assert 0 <= length <= self.length
        number = length // PAGE_TOKENS
        is_coded = self.pages.groups[0].coded is not None
        is_lost = number in self.moved or (is_coded and number and number not in self._open[0])
        if length % PAGE_TOKENS and is_lost:
            length = number * PAGE_TOKENS
        if (num_left := self._drop_extents(number)) < number:
            number, length = num_left, num_left * PAGE_TOKENS
        firsts = [group.unseen(length).stop for group in self.pages.groups]
        seen = [table[first] for table, first in zip(self.tables, firsts, strict=True) if first < pages_of(length)]
        # It has left already: everything is computed again.
        if None in seen or (length % PAGE_TOKENS and number in self._left):
            number = length = 0
        if self.state is not None and self.state.trim(length) != length:
            number = length = 0
        for index in range(len(self.pages.groups)):
            table, opened = self.tables[index], self._open[index]
            for later in [n for n in opened if n > number or (n == number and not length % PAGE_TOKENS)]:
                self.give_back(opened.pop(later))
            for later in reversed(range(number + (length % PAGE_TOKENS > 0), len(table))):  # its tail goes first
                if (gone := table[later]) is not None:
                    self.give_back(gone)
                    table[later] = None
            if length % PAGE_TOKENS and number < self.num_sealed:  # it is written again: in a copy of its own
                page = table[number]
                assert page is not None
                own = self._take(page.pool)
                own.copy_from(page)
                self.give_back(page)
                self._set(index, number, own)
        self.num_sealed = min(self.num_sealed, number)
        self.moved = {moved for moved in self.moved if moved < number}
        self.length = length
        self._trim_sketches()
        if self.masses is not None:
            self.masses.trim(length)
            self._left = {each for each in self._left if each < number}
            self.exact_tokens = min(self.exact_tokens, length) if self._left else self.capacity
        return length

    def _trim_sketches(self) -> None:
        """Forget sketches of pages that may be written again."""
        for sketches in self._sketches.values():
            sketches.trim(self.length // PAGE_TOKENS)

    @property
    def num_evicted(self) -> int:
        """The tokens whose keys and values have left, in layers without a window of their own."""
        tables = [t for t, group in zip(self.tables, self.pages.groups, strict=True) if group.eviction is not None]
        return PAGE_TOKENS * max((table[: self.length // PAGE_TOKENS].count(None) for table in tables), default=0)

    # What is not computed

    def computed_runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the tokens [begin, end) without those of moved pages, which need not be computed: as runs."""
        moved = [number for number in sorted(self.moved) if begin <= number * PAGE_TOKENS < end]
        begins = [begin, *((number + 1) * PAGE_TOKENS for number in moved)]
        ends = [*(number * PAGE_TOKENS for number in moved), end]
        return [(first, last) for first, last in zip(begins, ends, strict=True) if first < last]

    def reach(self, num_tokens: int, moved: Collection[int]) -> int:
        """Return how many tokens a forward takes in that computes so many: those of moved pages are free. It ends with
        one that is computed. moved: as the sequence will have it."""
        end = self.length
        if not moved:
            return num_tokens
        is_bound = any(group.window is not None or group.spill is not None for group in self.pages.groups)
        most = end + (FORWARD_TOKENS if is_bound else self.capacity)  # of such pages no more than that is reserved
        while num_tokens > 0 and end < most:
            while end // PAGE_TOKENS in moved and not end % PAGE_TOKENS:
                end += PAGE_TOKENS
            count = min(num_tokens, PAGE_TOKENS - end % PAGE_TOKENS)
            num_tokens, end = num_tokens - count, end + count
        return end - self.length

    def make_room(self, end: int) -> None:
        """Bring pages to the disk that memory has no room for beside those before token `end`. Raises LocalLLMError
        where the disk takes none."""
        self._spill(pages_of(end))

    def move_in(self, number: int, parts: Mapping[int, Page]) -> None:
        """Have a page behind `length`, in each group, that holds already what the prompt has there."""
        assert number * PAGE_TOKENS >= self.length and len(parts) == len(self.pages.groups)
        for index, page in parts.items():
            assert self.tables[index][number] is None
            self._set(index, number, page)
        self.moved.add(number)

    # Sealed pages

    @property
    def num_sealable(self) -> int:
        """Pages from the first on that are full, and computed as any prompt's would be."""
        return max(self.num_sealed, min(self.length, self.exact_tokens) // PAGE_TOKENS)

    def seal(self) -> Iterator[tuple[int, list[Page | None]]]:
        """Yield each page that has become full since the last time, with its part in every group; None: let go
        already."""
        for number in range(self.num_sealed, self.num_sealable):
            yield number, [table[number] for table in self.tables]
        self.num_sealed = self.num_sealable

    def share(self, index: int, number: int, page: Page) -> Page:
        """Take a sealed page of other sequences in the place of one that was reserved. Where it may leave while others
        still have it, another page is spared for the sequence that leaves it first."""
        is_spared = self.pages.groups[index].may_let_go(number) and page.owners > 0
        self._claim(page.pool).share(page)
        if is_spared:
            page.pool.reserve(1)  # needs no memory: it is the page that sharing has just saved
            page.spares += 1
        return page

    def take_for(self, index: int, number: int) -> Page:
        """Take a page of this sequence's reservation, into which a stored one is to be read."""
        group = self.pages.groups[index]
        return self._take(group.dense if number == 0 else group.sealed)

    def place(self, number: int, parts: Mapping[int, Page]) -> None:
        """Append a full page: its part in each group whose window sees it."""
        assert number == self.num_sealed == self.length // PAGE_TOKENS and not self.length % PAGE_TOKENS
        for index, page in parts.items():
            self._set(index, number, page)
        self.num_sealed += 1
        self.length += PAGE_TOKENS
        self._spill(number + 1)

    # Where its bytes are

    def _set(self, index: int, number: int, page: Page) -> None:
        self._views.clear()
        self.tables[index][number] = page
        for device, part in page.parts.items():
            self._addresses[index][device][number] = part.data_ptr()

    def readdress(self) -> None:
        for index, sketches in self._sketches.items():
            sketches.move(self.pages.groups[index].homes)
        for index, table in enumerate(self.tables):
            devices = self.pages.groups[index].sealed.devices
            self._addresses[index] = {device: torch.zeros(len(table), dtype=torch.int64) for device in devices}
            for number, page in enumerate(table):
                if page is not None:
                    self._set(index, number, page)

    def addresses(self, index: int, device: torch.device) -> Tensor:
        """Return the addresses of the parts of a group's pages on this device: int64 [pages], on the host."""
        return self._addresses[index][device]

    def view(self, index: int, number: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the addresses of the pages that the tokens of one page see, their own the last of them: int64, on the
        host, until a page comes or leaves; and which of these that is. It stands there as if it had that number."""
        addresses = self._addresses[index][device]
        if not self._has_gaps(index, number):
            return addresses, number
        key = index, number, device
        if key not in self._views:
            self._views[key] = addresses[torch.tensor(self._numbers(index, number))]
        return self._views[key], len(self._views[key]) - 1

    @property
    def evicts(self) -> bool:
        """Return whether pages leave before its end, so that tokens of one page may see others than those of another
        do."""
        return self.pages.eviction is not None

    def _has_gaps(self, index: int, number: int) -> bool:
        """Return whether pages have left that the tokens of one page would see; what a window has left is not read."""
        group = self.pages.groups[index]
        return group.eviction is not None and bool(group.eviction.unseen(number) or self._left)

    def _numbers(self, index: int, number: int) -> Sequence[int]:
        """Return the pages of a group that the tokens of one page see."""
        eviction = self.pages.groups[index].eviction
        unseen = range(0) if eviction is None else eviction.unseen(number)
        return [n for n in range(number + 1) if n not in unseen and n not in self._left]

    def own_page(self, index: int, number: int, device: torch.device) -> tuple[int, int]:
        """Return the address of a page as its own tokens read it, and the bytes from one layer's part to the next
        one's."""
        page = self._own(index, number)
        return page.parts[device].data_ptr(), 0 if page.pool.is_shared else page.pool.layout.layer_bytes

    def _own(self, index: int, number: int) -> Page:
        page = self._scratch[index].get(number) or self._open[index].get(number) or self.tables[index][number]
        assert page is not None, "a page is prepared before it is written"
        return page

    def layer(self, layer: int, past: int, num_tokens: int) -> LayerPages:
        """Return the pages of a layer for queries at [past, past + num_tokens), where these see all of them, or all
        from one on."""
        group = self.pages.groups[self.pages.places[layer][0]]
        first = group.unseen(past).stop if group.eviction is None else 0
        return self._part(layer, range(first, (past + num_tokens - 1) // PAGE_TOKENS + 1), past // PAGE_TOKENS)

    def runs(self, layer: int, past: int, num_tokens: int) -> Iterator[tuple[int, int, LayerPages]]:
        """Yield how many of the tokens behind the first `past` see the same pages of a layer, the position of the first
        of them as if these pages were all there are, and the pages."""
        index, _ = self.pages.places[layer]
        end = past + num_tokens
        if not self._has_gaps(index, (end - 1) // PAGE_TOKENS):
            yield num_tokens, past, self.layer(layer, past, num_tokens)
            return
        while past < end:
            number, stop = past // PAGE_TOKENS, min(end, (past // PAGE_TOKENS + 1) * PAGE_TOKENS)
            numbers = self._numbers(index, number)
            left = number + 1 - len(numbers)
            yield stop - past, past - left * PAGE_TOKENS, self._part(layer, numbers, number)
            past = stop

    def _part(self, layer: int, numbers: Sequence[int], first: int) -> LayerPages:
        """Return a layer's part of these pages, from number `first` on as their own tokens read them too."""
        index, row = self.pages.places[layer]
        group, table = self.pages.groups[index], self.tables[index]
        pages = [page.layer(row) for n in numbers if (page := table[n]) is not None]
        if self.extents.get(index):
            assert self.pages.ring is not None
            pages[1:1] = self.pages.ring.parts(self, layer)
        return LayerPages(
            dense=group.dense.layout,
            coded=None if group.coded is None else group.coded.layout,
            first=numbers[0],
            pages=pages,
            own=[self._own(index, number).layer(row) for number in range(first, numbers[-1] + 1)],
        )

    def owned(self, index: int) -> list[Page]:
        """Every page of a group that it has."""
        held = [page for page in self.tables[index] if page is not None]
        return [*held, *self._open[index].values(), *self._scratch[index].values()]


def shared_tokens(sequences: Iterable[PagedKV]) -> int:
    """Return the tokens of room that these sequences save together: pages that several have are there once. It is the
    figure of the group of layers that saves least."""
    kvs = list(sequences)

    def num_saved(index: int) -> int:
        counts = Counter(page for kv in kvs for page in kv.tables[index] if page is not None)
        return sum(max(0, count - 1 - page.spares) for page, count in counts.items())

    return PAGE_TOKENS * min((num_saved(index) for index in range(len(kvs[0].tables))), default=0) if kvs else 0
