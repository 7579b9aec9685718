"""Pages that are found again by the tokens that they hold, and by all tokens before those.

A page's digest is a hash of the page before it and its own 64 token ids; the first one's is of a root, which names all
that decides what keys and values mean: the weights, the formats, RoPE. A request takes the longest run of known pages
that its prompt begins with, whoever computed them. They rest where they were written until the room is needed, then in
RAM, and on the disk; in each tier the tails of what was used the longest ago go first.

Where layers keep a recurrent state too, a prefix is found up to its last snapshot: a state cannot be cut back.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import Tensor

from localllm.cache.disk import DiskTier
from localllm.cache.kv_pages import KVPages
from localllm.cache.miss_reason import CacheMiss
from localllm.cache.page_file import READERS, PageKey
from localllm.cache.page_folder import name_of, snapshot_digest
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import Page, PagePool
from localllm.cache.snapshots import SnapshotCache
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.offload.streaming.disk_read import PAGE_BYTES
from localllm.offload.streaming.host_buffer import host_buffer

# Bytes that are read from the disk at once: a cancelled chat waits for them, 0.1 s for the first figure. The second is
# for pages that are copied from where they land, which takes as much memory meanwhile.
_READ_BYTES, _LANDING_BYTES = 256 << 20, 16 << 20


def page_digest(parent: bytes, token_ids: Sequence[int], *, is_moved: bool = False) -> bytes:
    """is_moved: of a page whose keys and values were not computed there, but taken from another place. No other page
    has its digest, nor has any behind it: who wants all as computed never comes upon one."""
    tokens = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    person = b"localllm-moved" if is_moved else b"localllm-page"
    return hashlib.blake2b(parent + tokens, digest_size=32, person=person).digest()


def moved_key(key: PageKey) -> PageKey:
    """Return the key that a page has if it was taken from another place."""
    return replace(key, digest=page_digest(key.parent, key.token_ids, is_moved=True))


def is_moved(key: PageKey) -> bool:
    """Return whether a page that is not a chain's first was taken from another place."""
    return key == moved_key(key)


@dataclass(eq=False)
class Entry:
    """A known page. parts: its part in the pools of each group of layers; payload: its bytes in RAM, uint8; is_put:
    whether it is on the disk, or on its way there."""

    key: PageKey
    number: int
    parts: list[Page | None]
    payload: Tensor | None = None
    is_put: bool = False

    @property
    def is_held(self) -> bool:
        return self.payload is not None or any(part is not None for part in self.parts)


@dataclass
class _WantedPage:
    """A page that a new sequence is to have. wanted: the groups that see it; held: the parts that the pools
    had, which are the sequence's already; payload: all of it, where RAM has that."""

    key: PageKey
    entry: Entry | None
    wanted: Sequence[int]
    held: dict[int, Page]
    payload: Tensor | None

    @property
    def is_in_memory(self) -> bool:
        """Return whether memory has all of it that is wanted, which may be nothing."""
        return self.payload is not None or len(self.held) == len(self.wanted)

    def hold(self, kv: PagedKV) -> None:
        for index in self.wanted:
            if self.entry is not None and (page := self.entry.parts[index]) is not None:
                self.held[index] = kv.share(index, self.entry.number, page)

    def give_back(self, kv: PagedKV) -> None:
        while self.held:
            _, page = self.held.popitem()
            kv.give_back(page)


@dataclass
class Counts:
    """Pages taken from each tier and spilled since the engine began. disk_s, disk_bytes: of reading them."""

    pool: int = 0
    ram: int = 0
    disk: int = 0
    spilled: int = 0
    disk_s: float = 0.0
    disk_bytes: int = 0


class PrefixCache:
    """The known pages of one model under one root. ram_bytes: the most that pages may take which left the pools."""

    def __init__(
        self,
        root: bytes,
        pages: KVPages,
        ram_bytes: int = 0,
        disk: DiskTier | None = None,
        snapshot_ram_bytes: int = 0,
    ) -> None:
        """snapshot_ram_bytes: the most that snapshots of recurrent states may take."""
        self.root = root
        num_bytes = pages.snapshot_bytes
        self.snapshots = SnapshotCache(num_bytes, snapshot_ram_bytes, disk) if num_bytes else None
        self.ram_bytes = ram_bytes
        self.disk = disk
        self.counts = Counts()
        self._entries: dict[bytes, Entry] = {}
        self._of_page: dict[Page, tuple[Entry, int]] = {}
        self._in_ram: OrderedDict[bytes, Entry] = OrderedDict()  # the least useful first
        self._ram_used = 0
        self._chains: WeakKeyDictionary[PagedKV, tuple[bytes, list[PageKey]]] = WeakKeyDictionary()
        self._pages = pages
        for group in pages.groups:
            group.dense.evict = group.sealed.evict = self._leave_pool

    @property
    def ram_used_bytes(self) -> int:
        return self._ram_used

    @property
    def holds_ram(self) -> bool:
        """Whether anything is in RAM that left the pools, or was taken beside them."""
        return self._ram_used > 0 or (self.snapshots is not None and self.snapshots.ram_used_bytes > 0)

    @property
    def num_pages(self) -> int:
        """Known in the pools or in RAM."""
        return len(self._entries)

    def keys(
        self,
        token_ids: Sequence[int],
        variant: bytes = b"",
        known: Sequence[PageKey] = (),
        moves: Callable[[int, PageKey], bool] = lambda _number, _key: False,
    ) -> list[PageKey]:
        """Return the key of every whole page of these tokens. variant: of how their positions are rotated. known:
        keys of a chain in the same variant, reused as far as the tokens are the same. moves: whether a page, of which
        it is told the key that it would have, was taken from another place."""
        keys: list[PageKey] = []
        parent = self.root
        for begin in range(0, len(token_ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
            own = tuple(token_ids[begin : begin + PAGE_TOKENS])
            number = len(keys)
            if number < len(known) and known[number].parent == parent and known[number].token_ids == own:
                keys.append(known[number])
            else:
                key = PageKey(page_digest(parent + (b"" if keys else variant), own), parent, own)
                keys.append(moved_key(key) if keys and moves(number, key) else key)
            parent = keys[-1].digest
        return keys

    def _chain(self, kv: PagedKV, token_ids: Sequence[int], variant: bytes) -> list[PageKey]:
        """Return `keys`; those that this sequence had before are not hashed again, which takes 2 ms for 8,000
        tokens."""
        of, known = self._chains.get(kv, (variant, []))
        known = known if of == variant else []
        known = known[: kv.num_sealed] if kv.moved else known  # of those behind, some were moved since
        keys = self.keys(token_ids, variant, known, lambda number, _: number in kv.moved)
        self._chains[kv] = variant, keys
        return keys

    def attach(
        self,
        kv: PagedKV,
        token_ids: Sequence[int],
        variant: bytes = b"",
        cancelled: Callable[[], bool] = lambda: False,
        *,
        takes_moved: bool = False,
    ) -> list[PageKey]:
        """Give a new sequence the pages that it need not compute; at least its last token is left. Returns the keys of
        all its whole pages.

        cancelled: asked while pages are read from the disk; what is there by then will do. takes_moved: pages behind
        others that were taken from another place will do as well. Raises what torch does where there is no memory; the
        sequence has what it was given by then, and no page is lost.
        """
        if takes_moved:
            keys = self.keys(
                token_ids, variant, moves=lambda _, key: not self.knows(key) and self.knows(moved_key(key))
            )
            self._chains[kv] = variant, keys
        else:
            keys = self._chain(kv, token_ids, variant)
        most, eviction = (len(token_ids) - 1) // PAGE_TOKENS, self._pages.eviction
        if kv.masses is not None and eviction is not None:  # nobody has counted yet which of more pages may leave
            most = min(most, eviction.pages)
        known = self._known(keys[:most])
        self._touch(known)  # first: to make room for one of them must not take another
        while not self._begin(kv, known, cancelled):
            kv.trim(0)
            known = self._known(known[:-1])  # what the disk did not give is known no longer
        if takes_moved:
            kv.moved |= {number for number in range(kv.num_sealed) if is_moved(keys[number])}
        return keys

    def knows(self, key: PageKey) -> bool:
        return self.in_memory(key) is not None or self._is_on_disk(key)

    def unlisted(self, digests: Collection[bytes]) -> Iterator[PageKey]:
        """Yield the known pages that are not among these; of those on the disk, many that were used last."""
        yield from (entry.key for digest, entry in self._entries.items() if digest not in digests)
        if self.disk is not None:
            yield from self.disk.unlisted({name_of(digest) for known in (digests, self._entries) for digest in known})

    def _begin(self, kv: PagedKV, keys: Sequence[PageKey], cancelled: Callable[[], bool]) -> bool:
        """Let the sequence begin with these pages, and the states behind them; return whether all could be had."""
        if self.snapshots is None or kv.state is None or not keys:
            return self._adopt(kv, keys, cancelled)
        snapshot = self.snapshots.get(keys[-1])
        if snapshot is None or not self._adopt(kv, keys, cancelled):
            return False
        if kv.num_sealed == len(keys):
            kv.state.begin_at(snapshot, kv.length)
        else:  # cancelled
            kv.trim(0)
        return True

    def _known(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Return the longest beginning of a chain of which every part is somewhere that a token behind it sees. Parts
        that have left by then may be missing."""
        known = list(itertools.takewhile(self.knows, keys))
        # Of each group, the pages without a part there: the first of all, and the last one of so many.
        gaps = [[-1] for _ in self._pages.groups]
        for number, key in enumerate(known):
            entry = None if self._is_on_disk(key) else self.in_memory(key)
            for index, last in enumerate(gaps):
                is_there = entry is None or entry.payload is not None or entry.parts[index] is not None
                last.append(last[-1] if is_there else number)
        firsts = [next((number for number in last if number >= 0), -1) for last in gaps]
        return next(
            known[:count]
            for count in range(len(known), -1, -1)
            if all(
                last[count] < 0 or (first in unseen and last[count] in unseen)
                for first, last, unseen in zip(firsts, gaps, self._unseen(count), strict=True)
            )
            and (self.snapshots is None or not count or self.snapshots.has(known[count - 1]))
        )

    def in_memory(self, key: PageKey) -> Entry | None:
        entry = self._entries.get(key.digest)
        return entry if entry is not None and entry.key == key else None

    def _is_on_disk(self, key: PageKey) -> bool:
        return self.disk is not None and key.digest in self.disk

    def _unseen(self, num_pages: int) -> list[range]:
        """Return the pages of each group that no token behind so many pages sees."""
        return [group.unseen(num_pages * PAGE_TOKENS) for group in self._pages.groups]

    def _adopt(self, kv: PagedKV, keys: Sequence[PageKey], cancelled: Callable[[], bool]) -> bool:
        """Give the sequence these pages; return whether all could be had, or as many as were wanted. A page that the
        disk does not give back is no longer known."""
        unseen = self._unseen(len(keys))
        pages: list[_WantedPage] = []
        try:
            # All that memory has is held first: to make room for the others would take it away.
            for number, key in enumerate(keys):
                entry = self.in_memory(key)
                payload = None if entry is None else entry.payload
                wanted = [index for index, gone in enumerate(unseen) if number not in gone]
                pages.append(_WantedPage(key, entry, wanted, {}, payload))
                pages[-1].hold(kv)
            while kv.num_sealed < len(pages):
                if pages[kv.num_sealed].is_in_memory:
                    self._place(kv, pages[kv.num_sealed])
                    continue
                if cancelled():
                    return True
                run = list(itertools.takewhile(lambda page: not page.is_in_memory, pages[kv.num_sealed :]))
                # More at once where each goes straight to its place.
                is_in_place = len(self._pages.groups) == 1 and self._pages.is_on_host
                num_bytes = _READ_BYTES if is_in_place else _LANDING_BYTES
                run = run[: kv.room_for(max(READERS, num_bytes // self.payload_bytes(1)))]
                if self._read(kv, run) < len(run):
                    return False
            return True
        finally:
            for later in reversed(pages[kv.num_sealed :]):
                later.give_back(kv)

    def _place(self, kv: PagedKV, page: _WantedPage) -> None:
        """Give the sequence a page of which memory has every wanted part."""
        entry, number = page.entry, kv.num_sealed
        missing = [index for index in page.wanted if index not in page.held]
        if missing:
            assert entry is not None and page.payload is not None
            fresh = {}
            for index in missing:
                page.held[index] = fresh[index] = kv.take_for(index, number)
            self._fill(number, fresh, page.payload)
            self._hold(entry, fresh)
            self.counts.ram += 1
        elif page.held:
            self.counts.pool += 1
        kv.place(number, page.held)

    def _read(self, kv: PagedKV, pages: Sequence[_WantedPage]) -> int:
        """Read pages from the disk into the sequence; return how many came whole."""
        if self.disk is None:
            return 0
        first = kv.num_sealed
        for n, page in enumerate(pages):  # a part that memory does have is read again with the others
            page.give_back(kv)
            for index in page.wanted:
                page.held[index] = kv.take_for(index, first + n)
        buffers = [
            _own_run(page.held) if self._lands_in_place(page.held) else host_buffer(self.payload_bytes(first + n))
            for n, page in enumerate(pages)
        ]
        started = time.perf_counter()
        count = self.disk.read([page.key for page in pages], [buffer.numpy().data for buffer in buffers])
        self.counts.disk_s += time.perf_counter() - started
        self.counts.disk_bytes += sum(buffer.nbytes for buffer in buffers[:count])
        self.counts.disk += count
        for n, (page, buffer) in enumerate(zip(pages[:count], buffers, strict=False)):
            if not self._lands_in_place(page.held):
                self._fill(first + n, page.held, buffer)
            self._hold(Entry(page.key, first + n, [None] * len(self._pages.groups), is_put=True), page.held)
            kv.place(first + n, page.held)
        return count

    def _hold(self, entry: Entry, fresh: Mapping[int, Page]) -> None:
        """Let filled pages be found again. Where the pools have a part of them already, that one stays."""
        entry = self._entries.setdefault(entry.key.digest, entry)
        for index, page in fresh.items():
            if entry.parts[index] is None:
                self._know(entry, index, page)

    def _know(self, entry: Entry, index: int, page: Page) -> None:
        entry.parts[index] = page
        page.is_sealed = True
        self._of_page[page] = entry, index

    def miss(self, keys: Sequence[PageKey], num_tokens: int, token_ids: Sequence[int]) -> CacheMiss | None:
        """Return where these tokens leave what is known, of whose pages the first `num_tokens` were found; None
        where nothing more is known of such a beginning."""
        number, snapshot = num_tokens // PAGE_TOKENS, None
        known_pages = len([*itertools.takewhile(self.knows, keys)])
        if self.snapshots is not None and known_pages > number and len(token_ids) - 1 >= (number + 1) * PAGE_TOKENS:
            number, snapshot = known_pages, num_tokens
        begin = number * PAGE_TOKENS
        here = tuple(token_ids[begin : begin + PAGE_TOKENS])
        parent = keys[number - 1].digest if number else self.root
        known = [entry.key.token_ids for entry in self._entries.values() if entry.key.parent == parent]
        if self.disk is not None:
            known += [key.token_ids for key in self.disk.children(parent) if key.digest != snapshot_digest(parent)]
        nearest = max(known, key=lambda ids: common_tokens(ids, here), default=())
        common = common_tokens(nearest, here)
        if not nearest or common == len(here):
            return None if snapshot is None else CacheMiss(begin, snapshot=snapshot)
        at = begin + common
        return CacheMiss(at, nearest[common:], tuple(token_ids[at : at + PAGE_TOKENS]), snapshot)

    # What becomes known

    def seal(self, kv: PagedKV, token_ids: Sequence[int], variant: bytes = b"") -> None:
        """Let the pages be found that have become full since the last time."""
        if kv.num_sealable == kv.num_sealed:
            return
        keys = self._chain(kv, token_ids[: kv.num_sealable * PAGE_TOKENS], variant)
        for number, parts in kv.seal():
            entry = self.in_memory(keys[number])
            if entry is None:
                entry = self._entries[keys[number].digest] = Entry(keys[number], number, [None] * len(parts))
            for index, page in enumerate(parts):
                if page is not None and entry.parts[index] is None and not page.is_sealed:
                    self._know(entry, index, page)
            self._forget_if_gone(entry)
        self._persist(keys)

    def _persist(self, keys: Sequence[PageKey]) -> None:
        """Put the pages on the disk, the first ones first: a page is of no use there without those before it."""
        if self.disk is None:
            return
        for key in keys:
            entry = self.in_memory(key)
            if entry is None or entry.is_put:
                continue
            if entry.payload is None and any(part is None for part in entry.parts):
                return
            entry.is_put = self._is_put(entry)
            if not entry.is_put:  # the disk takes nothing now, or has let go of what was before
                for each in filter(None, map(self.in_memory, keys)):
                    each.is_put = self.disk.holds(each.key.digest)
                return

    def _is_put(self, entry: Entry) -> bool:
        assert self.disk is not None
        if not self.disk.wants(entry.key, self.payload_bytes(entry.number)):
            return self.disk.holds(entry.key.digest)
        try:
            payload = self._payload(entry) if entry.payload is None else entry.payload
        except MemoryError:  # it is computed once more then
            return False
        return self.disk.put(entry.key, payload.numpy().data)

    def keep_snapshots(self, kv: PagedKV, token_ids: Sequence[int], variant: bytes = b"", *, ends: bool) -> None:
        """Let the snapshots be found that were asked for; where the sequence ends, also the last one at a border."""
        if self.snapshots is None or kv.state is None:
            return
        found = kv.state.take_snapshots(with_last=ends)
        keys = self._chain(kv, token_ids[: min(kv.length, kv.exact_tokens)], variant) if found or ends else []
        for position, snapshot in found.items():
            number = position // PAGE_TOKENS - 1
            if number < len(keys):
                self.snapshots.put(keys[number], snapshot.payload())
        if ends:
            self.snapshots.persist(keys)

    def limit_ram(self, ram_bytes: int, snapshot_ram_bytes: int = 0) -> bool:
        """Keep no more than that in RAM from now on. Returns whether anything had to go."""
        self.ram_bytes, before = ram_bytes, self._ram_used
        while self._ram_used > ram_bytes:
            self._drop_oldest()
        has_dropped = self.snapshots is not None and self.snapshots.limit_ram(snapshot_ram_bytes)
        return self._ram_used < before or has_dropped

    def close(self, timeout_s: float) -> None:
        """Wait this long for what is on its way to the disk; what is not written by then is computed again."""
        if self.disk is not None:
            self.disk.close(timeout_s)

    # What leaves

    def _leave_pool(self, page: Page) -> None:
        """Move a page whose room is taken to RAM, if there is room and no part of it is gone already."""
        entry, index = self._of_page.pop(page)
        if entry.payload is None and self.ram_bytes and all(part is not None for part in entry.parts):
            self._spill(entry)
        entry.parts[index] = None
        self._forget_if_gone(entry)

    def _forget_if_gone(self, entry: Entry) -> None:
        if not entry.is_held and self._entries.get(entry.key.digest) is entry:
            del self._entries[entry.key.digest]
            if self.snapshots is not None and not self._is_on_disk(entry.key):
                self.snapshots.forget(entry.key)

    def _spill(self, entry: Entry) -> None:
        num_bytes = self.payload_bytes(entry.number)
        while self._in_ram and self._ram_used + num_bytes > self.ram_bytes:
            self._drop_oldest()
        if self._ram_used + num_bytes > self.ram_bytes:
            return
        try:
            entry.payload = self._payload(entry)
        except MemoryError:  # it is computed, or read, once more
            return
        self._in_ram[entry.key.digest] = entry
        self._ram_used += num_bytes
        self.counts.spilled += 1

    def _drop_oldest(self) -> None:
        _, oldest = self._in_ram.popitem(last=False)
        self._ram_used -= self.payload_bytes(oldest.number)
        oldest.payload = None
        self._forget_if_gone(oldest)

    def _touch(self, keys: Sequence[PageKey]) -> None:
        """Mark pages as used. The first one is kept the longest: without it the others are of no use."""
        for key in reversed(keys):
            if key.digest in self._in_ram:
                self._in_ram.move_to_end(key.digest)
        if self.disk is not None:
            self.disk.touch(key.digest for key in reversed(keys))
        if self.snapshots is not None:
            self.snapshots.touch(keys[-1:])

    def keep_last(self, keys: Sequence[PageKey]) -> None:
        """Let these pages leave the pools and RAM behind all others."""
        for entry in filter(None, map(self.in_memory, reversed(keys))):
            for part in entry.parts:
                if part is not None and part in part.pool.idle:
                    part.pool.idle.move_to_end(part)
            if entry.payload is not None:
                self._in_ram.move_to_end(entry.key.digest)

    # Bytes

    def _pools(self, number: int) -> list[PagePool]:
        return [group.dense if number == 0 else group.sealed for group in self._pages.groups]

    def payload_bytes(self, number: int) -> int:
        """Return the bytes of all parts, one after the other, in whole blocks of the disk, of which it has one where a
        page has no content."""
        return max(-(-sum(pool.page_bytes for pool in self._pools(number)) // PAGE_BYTES), 1) * PAGE_BYTES

    def _payload(self, entry: Entry) -> Tensor:
        """Return a copy of all parts, one after the other. Raises MemoryError."""
        payload, at = host_buffer(self.payload_bytes(entry.number)), 0
        for part in entry.parts:
            assert part is not None
            at += part.write_to(payload[at:])
        return payload

    def _fill(self, number: int, parts: Mapping[int, Page], payload: Tensor) -> None:
        at = 0
        for index, pool in enumerate(self._pools(number)):
            if index in parts:
                parts[index].read_from(payload[at : at + pool.page_bytes])
            at += pool.page_bytes

    def _lands_in_place(self, parts: Mapping[int, Page]) -> bool:
        return len(self._pages.groups) == 1 and all(page.run is not None for page in parts.values())


def _own_run(parts: Mapping[int, Page]) -> Tensor:
    (page,) = parts.values()
    assert page.run is not None
    return page.run


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many of the first tokens are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
