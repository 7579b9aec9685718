"""Sequences that hold tokens, in pages of which nothing else is a number."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor

from localllm.cache.kv_pages import KVPages
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import PagePool
from localllm.cache.prefix import PrefixCache
from localllm.kernels.paged_attention import write

LAYERS = 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(pages: KVPages, past: int, count: int, seed: int) -> PagedKV:
    """A sequence of `past` tokens, of both layers, that has room for more; every other byte of its pages is 255."""
    kv = PagedKV(pages, past + count)
    layout = kv.layouts[0]
    for pool in pages.groups[0].pools:
        for page in pool.free:
            for part in page.parts.values():
                part.fill_(0xFF)
    while kv.length < past:
        chunk = min(500, past - kv.length)
        kv.prepare(kv.length + chunk)
        for layer in range(LAYERS):
            k, v = random(2, chunk, layout.num_kv_heads, layout.head_dim, seed=1000 * seed + kv.length + layer)
            write(kv.layer(layer, kv.length, chunk), kv.length, k, v)
        kv.advance(chunk)
    kv.prepare(past + count)
    return kv


def check_pages(pages: KVPages) -> None:
    """Check that every page is owned exactly as often as counted, and in one place at once."""
    for index, group in enumerate(pages.groups):
        owned = Counter(id(page) for kv in pages.sequences for page in kv.owned(index))
        for pool in group.pools:
            _check_pool(pool, owned)
    for index, store in pages.stores.items():
        extents = Counter(extent for kv in pages.sequences for extent in kv.extents[index])
        assert all(extent.owners == count for extent, count in extents.items())
        slots = [*store._free, *(extent.slot for extent in extents)]
        assert sorted(slots) == [*range(store._num_slots)], "a place of a store is nobody's, or two extents'"


def _check_pool(pool: PagePool, owned: Counter[int]) -> None:
    for page in pool.pages:
        assert page.spares <= max(0, page.owners - 1), "more pages are spared for a page than may be wanted"
        assert page.owners == owned[id(page)], f"a page has {owned[id(page)]} owners and counts {page.owners}"
    free = {id(page) for page in pool.free}
    assert len(free) == len(pool.free) and all(not page.owners and not page.is_sealed for page in pool.free)
    assert all(not page.owners and page.is_sealed for page in pool.idle)
    num_owned = sum(page.owners > 0 for page in pool.pages)
    assert num_owned + len(pool.free) + len(pool.idle) == len(pool.pages)
    assert 0 <= pool.reserved <= len(pool.free) + len(pool.idle)


def check_prefix(prefix: PrefixCache) -> None:
    """Check that what is known is where it is said to be, and counted once."""
    for page, (entry, index) in prefix._of_page.items():
        assert entry.parts[index] is page and page.is_sealed, "a page is known that is another's now"
    held = itertools.chain(prefix._in_ram.values(), (entry for entry, _ in prefix._of_page.values()))
    assert all(prefix._entries.get(entry.key.digest) is entry for entry in held), "a page is kept that nobody finds"
    assert all(entry.is_held for entry in prefix._entries.values()), "a page is found that nobody has"
    assert prefix.ram_used_bytes == sum(prefix.payload_bytes(entry.number) for entry in prefix._in_ram.values())
    assert all(entry.payload is not None for entry in prefix._in_ram.values())
