"""A decoder without some of its blocks, on the same bytes: it drafts what the whole one would say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from localllm.models.decoder import ALL_RESIDENT, BlockStream, Decoder
from localllm.models.layout import EMBED, HEAD
from localllm.offload.streaming.disk_stream import StreamClock


def without(decoder: Decoder, names: frozenset[str]) -> Decoder:
    """names: of attention and MLP blocks. Where they are all that is streamed, no weight moves."""
    kept = tuple(block for block in decoder.blocks if block.name not in names)
    stream: BlockStream = ALL_RESIDENT
    if not decoder.stream.names <= names:
        order = (EMBED, *(block.name for block in decoder.blocks), HEAD)
        stream = _PassedOver(decoder.stream, order, names)
    return replace(decoder, blocks=kept, stream=stream)


class _PassedOver:
    """A stream brings its blocks in their order: those that are left out come too, and are let go at once."""

    def __init__(self, stream: BlockStream, order: tuple[str, ...], left_out: frozenset[str]) -> None:
        self._stream = stream
        self._place = {name: place for place, name in enumerate(order)}
        self._order, self._left_out = order, left_out
        self._next = 0

    @property
    def names(self) -> frozenset[str]:
        return self._stream.names

    @property
    def clock(self) -> StreamClock:
        return self._stream.clock

    def begin(self) -> None:
        self._next = 0
        self._stream.begin()

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        place = self._place[name]
        for passed in self._order[self._next : place]:
            if passed in self._left_out:
                with self._stream.held(passed):
                    pass
        self._next = place + 1
        with self._stream.held(name):
            yield
