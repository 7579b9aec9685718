"""Where the tokens of a prompt stand in pages that are known, at whatever position they were computed there.

An index of each page's own 64 tokens, whatever is before them: a rolling hash over the prompt finds them at any offset,
as rsync finds blocks of a file (Tridgell, "The rsync algorithm", 1996), and what is found is followed along the chain
of pages to both sides. Knows tokens and the names of pages, not their bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.cache.page_file import PageKey
from localllm.cache.prefix import common_tokens, is_moved, page_digest
from localllm.kernels.kv_page import PAGE_TOKENS

# Of a span, pages that are worth an own piece of the prompt's computation; of a page that stands in many chains, those
# that are followed, the last ones that came.
_LEAST_PAGES, _MOST_FOLLOWED = 2, 8
# In a span of so many tokens no other is looked for; in shorter ones a longer may begin, and a prompt that repeats
# itself costs no more than its length.
_LONG_TOKENS = 256
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)


@dataclass(frozen=True)
class Span:
    """The tokens [begin, end) of a prompt are those of a chain from position `source` on, which these pages hold."""

    begin: int
    end: int
    source: int
    pages: tuple[PageKey, ...]

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def shift(self) -> int:
        """Positions by which its keys turn further."""
        return self.begin - self.source

    def place_of(self, number: int) -> int:
        """Return where the prompt's page of this number begins in `pages`, counted in tokens."""
        return number * PAGE_TOKENS - self.shift - self.source // PAGE_TOKENS * PAGE_TOKENS

    def within(self, begin: int, end: int) -> Span:
        """Return what of it is between two tokens of the prompt."""
        begin, end = max(begin, self.begin), min(end, self.end)
        source = begin - self.shift
        return Span(begin, end, source, self.pages[source // PAGE_TOKENS - self.source // PAGE_TOKENS :])

    def whole_pages(self, end: int, share: float) -> range:
        """Return the pages of a prompt, before the page `end`, that are filled from it.

        share: of its tokens, the first ones, that are computed at least: those in front of its first whole page, and as
        many pages as are missing then. The first page of a prompt, which all tokens attend to, is always computed.
        """
        first = max(1, -(-self.begin // PAGE_TOKENS))
        while first * PAGE_TOKENS - self.begin < share * len(self):
            first += 1
        found = range(first, min(end, self.end // PAGE_TOKENS))
        return found if len(found) >= _LEAST_PAGES else range(0)


@dataclass(frozen=True)
class _Place:
    """Where a known page stands. first: of its chain."""

    key: PageKey
    number: int
    first: PageKey
    is_source: bool


class SpanIndex:
    """The pages of one root whose tokens are found. A chain's first page is none of them: in a coded format its bytes
    are others, and its first tokens are what all behind them attend to. Nor is a page that was moved itself: what
    rounding its keys has lost would add up."""

    def __init__(self, root: bytes, is_known: Callable[[PageKey], bool]) -> None:
        """is_known: whether the bytes of a page can still be had."""
        self._root, self._is_known = root, is_known
        self._places: dict[bytes, _Place] = {}  # by digest; pages that are gone stay, until there are many of them
        self._children: defaultdict[bytes, list[PageKey]] = defaultdict(list)
        self._by_hash: defaultdict[int, list[PageKey]] = defaultdict(list)

    @property
    def digests(self) -> KeysView[bytes]:
        """Of all pages that it has."""
        return self._places.keys()

    def add(self, keys: Iterable[PageKey]) -> None:
        """Add pages that are not there, in any order; those of which a page before them is unknown are left out."""
        waiting: defaultdict[bytes, list[PageKey]] = defaultdict(list)
        for key in keys:
            waiting[key.parent].append(key)
        found: list[PageKey] = []
        parents = [parent for parent in waiting if parent == self._root or parent in self._places]
        while parents:
            before = self._places.get(parent := parents.pop())
            for key in waiting.pop(parent, ()):
                number = 0 if before is None else before.number + 1
                first = key if before is None else before.first
                is_source = before is not None and not is_moved(key)
                self._places[key.digest] = _Place(key, number, first, is_source)
                parents.append(key.digest)
                if is_source:
                    self._children[parent].append(key)
                    found.append(key)
        if found:
            hashes = _page_hashes(torch.tensor([key.token_ids for key in found], dtype=torch.int64))
            for hashed, key in zip(hashes.tolist(), found, strict=True):
                self._by_hash[hashed].append(key)

    def find(self, token_ids: Sequence[int], begin: int, variant: bytes) -> list[Span]:
        """Return what is known of the tokens from `begin` on, in order and apart. variant: of the chains, as the
        prefix cache has it."""
        ids = tuple(token_ids)
        if len(ids) - begin < PAGE_TOKENS or not self._by_hash:
            return []
        hashes = _rolling_hashes(torch.tensor(ids[begin:], dtype=torch.int64))
        hits = torch.isin(hashes, torch.tensor(list(self._by_hash), dtype=torch.int64)).nonzero().flatten()
        is_alike: dict[bytes, bool] = {}

        def may_serve(key: PageKey) -> bool:
            place = self._places[key.digest]
            first = place.first
            if first.digest not in is_alike:
                is_alike[first.digest] = page_digest(self._root + variant, first.token_ids) == first.digest
            return place.is_source and is_alike[first.digest] and self._is_known(key)

        spans: list[Span] = []
        seen: set[tuple[bytes, int]] = set()  # pages, and where the prompt has them
        floor = begin
        for at, hashed in zip((hits + begin).tolist(), hashes[hits].tolist(), strict=True):
            if at < floor:
                continue
            own = ids[at : at + PAGE_TOKENS]
            candidates = [key for key in self._by_hash[hashed] if key.token_ids == own and may_serve(key)]
            for key in candidates[-_MOST_FOLLOWED:]:
                if (key.digest, at) in seen:
                    continue
                span = self._followed(ids, at, floor, key, may_serve)
                first = span.begin - span.source % PAGE_TOKENS
                seen.update((page.digest, first + PAGE_TOKENS * n) for n, page in enumerate(span.pages))
                spans.append(span)
            floor = max([floor, *(span.end for span in spans if len(span) >= _LONG_TOKENS)])
        return _apart(spans)

    def _followed(
        self, ids: tuple[int, ...], at: int, floor: int, key: PageKey, may_serve: Callable[[PageKey], bool]
    ) -> Span:
        """Return the longest span with this page where the prompt has it, from `floor` on."""
        pages, begin, end = [key], at, at + PAGE_TOKENS
        place = self._places[key.digest]
        before = self._places.get(key.parent)
        if before is not None and may_serve(before.key):
            tail = ids[max(floor, at - PAGE_TOKENS + 1) : at]
            begin -= common_tokens(before.key.token_ids[::-1], tail[::-1])
            if begin < at:
                pages.insert(0, before.key)
        while end % PAGE_TOKENS == at % PAGE_TOKENS:
            following = [child for child in self._children.get(pages[-1].digest, ()) if may_serve(child)]
            here = ids[end : end + PAGE_TOKENS]
            child = max(following, key=lambda each: common_tokens(each.token_ids, here), default=None)
            if child is None or not (count := common_tokens(child.token_ids, here)):
                break
            pages.append(child)
            end += count
        return Span(begin, end, place.number * PAGE_TOKENS - (at - begin), tuple(pages))


def _apart(spans: Sequence[Span]) -> list[Span]:
    """Return these spans in order, the longest ones whole and of others what they leave."""
    chosen: list[Span] = []
    for span in sorted(spans, key=len, reverse=True):
        begin = span.begin
        for other in [*sorted(chosen, key=lambda each: each.begin), None]:
            end = span.end if other is None else min(other.begin, span.end)
            if begin < end:
                chosen.append(span.within(begin, end))
            begin = max(begin, span.end if other is None else other.end)
    return sorted(chosen, key=lambda each: each.begin)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _powers(base: int, count: int) -> Tensor:
    """1, base, base ** 2, ...: int64 [count], modulo 2 ** 64."""
    factors = torch.full((count,), _signed(base), dtype=torch.int64)
    factors[0] = 1
    return factors.cumprod(0)


def _page_hashes(ids: Tensor) -> Tensor:
    """ids int64 [N, 64] -> [N]"""
    return (ids * _powers(_BASE, PAGE_TOKENS)).sum(-1)


def _rolling_hashes(ids: Tensor) -> Tensor:
    """ids int64 [T] -> [T - 63], what `_page_hashes` has of the 64 tokens from each on."""
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), (ids * _powers(_BASE, len(ids))).cumsum(0)))
    windows = sums[PAGE_TOKENS:] - sums[:-PAGE_TOKENS]
    return windows * _powers(_INVERSE, len(windows))
