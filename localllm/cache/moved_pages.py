"""Pages of a prompt that are filled from pages of the same tokens at another position, instead of being computed.

What a token's keys and values are depends on the tokens before it, so these are not those that would be computed: the
first tokens of each span, which other text stood in front of, are computed anew (EPIC, arXiv:2410.15332). Positions are
made right: keys turn by the difference, as RoPE would have turned them, and values know of none. In a coded page a key
is Hadamard times what has turned, so one matrix of a head's size does all of it: un-Hadamard, turn, Hadamard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from localllm.cache.kv_pages import KVPages
from localllm.cache.layer_group import LayerGroup
from localllm.cache.page_file import PageKey
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import Page
from localllm.cache.prefix import PrefixCache
from localllm.cache.spans import Span, SpanIndex
from localllm.kernels.kv_page import PAGE_TOKENS, LatentLayout, rotated
from localllm.kernels.moved_tokens import moved_tokens
from localllm.layers.rotary import rotate
from localllm.offload.streaming.host_buffer import host_buffer

# Of a span's tokens, the first, that are computed anew. With the pages at its borders that is a ninth of 512 tokens. A
# larger share buys little: behind six such documents the perplexity of SmolLM2 135M is 15.95 where all is computed,
# 16.06 with this share, 15.99 with 0.1 and 15.98 with 0.3, each +-0.06 (benchmarks/chunk_quality.py). Tokens whose keys
# and values in the second layer deviate most (CacheBlend, arXiv:2405.16444) are no better than as many first ones:
# their KL divergence from what is computed is as large or larger (docs/internals/quality.md).
COMPUTED_SHARE = 0.02
_PAGES_AT_ONCE = 16  # that are filled: in between a request can be cancelled
_MOST_STALE = 4096  # pages that an index may have beyond those that are known

Parts = dict[torch.device, Tensor]  # of a page in one group of layers: uint8 [layers there, layer_bytes]


class PageMover:
    """Finds what a prompt can take from elsewhere in a prefix cache, and puts it there."""

    def __init__(self, prefix: PrefixCache, pages: KVPages, frequencies: Sequence[Tensor | None], share: float) -> None:
        """frequencies: of each layer with keys and values, radians a position of the features that turn, fp32
        [rotary_dim / 2]; None where none do. share: of a span's tokens, those that are computed at least."""
        self._prefix, self._pages, self._frequencies, self._share = prefix, pages, frequencies, share
        self._index = SpanIndex(prefix.root, prefix.knows)

    def plan(self, token_ids: Sequence[int], begin: int, variant: bytes) -> dict[int, Span]:
        """Return the pages of a prompt from token `begin` on that can be filled, each with the span that it is in.

        variant: as the prefix cache has it. The last page of a prompt is not among them: what follows is made of it.
        """
        if len(self._index.digests) > 2 * self._prefix.num_pages + _MOST_STALE:
            self._index = SpanIndex(self._prefix.root, self._prefix.knows)
        self._index.add(self._prefix.unlisted(self._index.digests))
        spans = self._index.find(token_ids, begin, variant)
        last = (len(token_ids) - 1) // PAGE_TOKENS
        planned = {number: span for span in spans for number in span.whole_pages(last, self._share)}
        self._prefix.keep_last([key for span in {*planned.values()} for key in span.pages])
        return planned

    def move(self, kv: PagedKV, planned: Mapping[int, Span], cancelled: Callable[[], bool]) -> None:
        """Fill pages of a sequence, but for those whose source is gone meanwhile. Raises what torch does where there is
        no memory; what is filled by then is the sequence's."""
        with _one_thread():
            for numbers in _runs(planned):
                if cancelled():
                    return
                self._fill(kv, numbers, planned[numbers[0]])

    def _fill(self, kv: PagedKV, numbers: Sequence[int], span: Span) -> None:
        """Fill pages that follow each other, as far as the sources of the first ones are there."""
        at = span.place_of(numbers[0])
        first, end = at // PAGE_TOKENS, -(-(at + PAGE_TOKENS * len(numbers)) // PAGE_TOKENS)
        sources = self._sources(span.pages[first:end])
        offset = at - first * PAGE_TOKENS
        numbers = numbers[: max(0, PAGE_TOKENS * len(sources) - offset) // PAGE_TOKENS]
        if not numbers:
            return
        # What they are filled with is copied before they are taken: one may have been a source.
        filled = [
            {
                device: moved_tokens(
                    group.sealed.layout,
                    torch.stack([source[index][device] for source in sources]),
                    offset,
                    len(numbers),
                    self._turns(group, device, span.shift),
                )
                for device in dict.fromkeys(group.sealed.devices)
            }
            for index, group in enumerate(self._pages.groups)
        ]
        for n, number in enumerate(numbers):
            parts: dict[int, Page] = {}
            try:
                for index in range(len(filled)):
                    parts[index] = kv.take_for(index, number)
            except BaseException:
                for page in parts.values():
                    kv.give_back(page)
                raise
            for index, page in parts.items():
                for device, part in page.parts.items():
                    part.copy_(filled[index][device][n])
            kv.move_in(number, parts)

    def _turns(self, group: LayerGroup, device: torch.device, shift: int) -> Tensor | None:
        """Return what the keys of a group's layers on a device are multiplied by: see `moved_tokens`."""
        layout = group.sealed.layout
        layers = [layer for layer, home in zip(group.layers, group.sealed.devices, strict=True) if home == device]
        frequencies = [self._frequencies[layer] for layer in layers]
        if not shift or all(each is None for each in frequencies):
            return None
        num_features = layout.runs[1] if isinstance(layout, LatentLayout) else layout.head_dim
        made: dict[int, Tensor] = {}
        for each in frequencies:
            if id(each) not in made:
                made[id(each)] = _turn_matrix(each, shift, num_features, is_coded=not layout.is_dense).to(device)
        if len(made) == 1:
            return made[id(frequencies[0])]
        return torch.stack([made[id(each)] for each in frequencies])

    # Sources

    def _sources(self, keys: Sequence[PageKey]) -> list[list[Parts]]:
        """Return the bytes of the first of these pages that can be had, each as one `Parts` a group."""
        sources: list[list[Parts]] = []
        held = [self._held(key) for key in keys]
        for is_held, run in itertools.groupby(zip(keys, held, strict=True), lambda pair: pair[1] is not None):
            pairs = list(run)
            if is_held:
                sources += [parts for _, parts in pairs if parts is not None]
                continue
            read = self._read([key for key, _ in pairs])
            sources += read
            if len(read) < len(pairs):
                break
        return sources

    def _held(self, key: PageKey) -> list[Parts] | None:
        """Return the parts of a page that is in memory; None where one is not."""
        entry = self._prefix.in_memory(key)
        if entry is None:
            return None
        if entry.payload is not None:
            return self._split(entry.payload)
        return [part.parts for part in entry.parts if part is not None] if None not in entry.parts else None

    def _read(self, keys: Sequence[PageKey]) -> list[list[Parts]]:
        if self._prefix.disk is None:
            return []
        buffers = [host_buffer(self._prefix.payload_bytes(1)) for _ in keys]
        count = self._prefix.disk.read(keys, [buffer.numpy().data for buffer in buffers])
        return [self._split(buffer) for buffer in buffers[:count]]

    def _split(self, payload: Tensor) -> list[Parts]:
        """payload: of a page that is not a sequence's first: see `PrefixCache`."""
        parts: list[Parts] = []
        for group in self._pages.groups:
            pool = group.sealed
            own, payload = payload[: pool.page_bytes].view(-1, pool.layout.layer_bytes), payload[pool.page_bytes :]
            homes = {
                device: [row for row, home in enumerate(pool.devices) if home == device] for device in pool.devices
            }
            parts.append({device: own[rows].to(device) for device, rows in homes.items()})
        return parts


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operators of half a millisecond wait for their threads longer than they compute, once a core is busy otherwise:
    4,096 tokens of 22 layers took 10 s by two threads beside ten processes, by one thread 0.6."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _turn_matrix(frequencies: Tensor | None, shift: int, num_features: int, *, is_coded: bool) -> Tensor:
    """Return what turns a stored key, as a row, by so many positions: fp32 [D, D], on the host."""
    features = torch.eye(num_features)
    if frequencies is None:
        return features
    angles = (shift * frequencies.double().cpu()).repeat(2)
    cos, sin = angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(len(frequencies))
    if not is_coded:
        return rotate(features, cos.float(), sin.float())
    return rotated(rotate(rotated(features), cos.float(), sin.float()))


def _runs(planned: Mapping[int, Span]) -> Iterator[list[int]]:
    """Yield pages that follow each other in a span, so many at once."""
    run: list[int] = []
    for number in sorted(planned):
        if run and (number > run[-1] + 1 or len(run) == _PAGES_AT_ONCE or planned[number] is not planned[run[0]]):
            yield run
            run = []
        run.append(number)
    if run:
        yield run
