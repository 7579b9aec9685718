"""The rows of a batch that belong to one sequence, and its pages. Knows no cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from localllm.kernels.kv_page import PageLayout
from localllm.kernels.page_choice import PageChoice, PageSketches
from localllm.kernels.paged_attention import LayerPages
from localllm.kernels.state_shapes import StatePlace
from localllm.layers.low_rank import AppliedAdapter


class StateBytes(Protocol):
    """So many bytes of each layer that keeps a state."""

    def layer(self, number: int) -> Tensor:
        """Return those of one layer, uint8, on its device."""

    def address(self, device: torch.device) -> int:
        """Return where the first of a device's layers begins; they lie one after the other."""


class StateStore(Protocol):
    """The recurrent states of one sequence, as the forward needs them that was prepared.

    committed: tokens before this position change a state in place.
    due: the snapshots to be taken, by the position before which.
    """

    @property
    def committed(self) -> int: ...

    @property
    def states(self) -> StateBytes: ...

    @property
    def due(self) -> Mapping[int, StateBytes]: ...

    def place(self, layer: int) -> StatePlace:
        """Return where a layer's part begins on its device."""


class SpilledPages(Protocol):
    """Brings the pages that rest elsewhere, layer by layer.

    base: while a layer is held whose pages a GPU uses, what is added to the addresses of those that rest elsewhere.
    """

    @property
    def base(self) -> int: ...

    @property
    def brings(self) -> bool:
        """Return whether `bring` is to be called for what a layer's tokens have chosen."""

    def begin(self, layers: Sequence[int], kvs: Sequence[Any], *, num_chosen: int) -> None:
        """A forward of these sequences begins, through these layers. num_chosen: the pages that its tokens choose, each
        for itself, where only those are read: the caller calls `bring` for them, or its kernels read them on a GPU; 0:
        all are read."""

    def bring(self, layer: int, chosen: Tensor) -> None:
        """Write the addresses of a layer's pages in place of their numbers, once they are in memory."""

    def held(self, layer: int) -> AbstractContextManager[None]:
        """Inside, the pages of a layer have addresses. Raises LocalLLMError where they cannot be brought."""


class Masses(Protocol):
    """The attention that pages get from some of a forward's tokens."""

    def watched(self, past: int, end: int) -> range:
        """Return the positions of those of the tokens from `past` to `end` that count."""

    def row(self, position: int, device: torch.device = ...) -> Tensor:
        """Return where a device, by default the host, is to add the weights of a token, fp32 [key heads, pages that it
        sees]."""


class KVStore(Protocol):
    """Pages with the keys and values of one sequence. The tokens of a forward may be written again and again: only the
    owner says which ones count. Layers of the same window and shape are one group."""

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """For each layer, its group and its number there."""

    @property
    def is_on_host(self) -> bool:
        """Return whether all pages are on the host."""

    @property
    def adapters(self) -> Sequence[AppliedAdapter]:
        """The adapters that all of it is computed with, in their order."""

    @property
    def state(self) -> StateStore | None:
        """Return the recurrent states; None where no layer has any."""

    @property
    def ring(self) -> SpilledPages | None:
        """Return what brings its pages from where they rest; None where all are in memory."""

    def spilled_pages(self, group: int) -> int:
        """Return how many pages of a group rest elsewhere, behind the first one."""

    @property
    def masses(self) -> Masses | None:
        """Return what counts the attention that pages get in layers without a window; None where nothing does."""

    @property
    def evicts(self) -> bool:
        """Return whether pages leave before its end, so that tokens of one page may see others than those of another
        do."""

    @property
    def layouts(self) -> tuple[PageLayout, PageLayout | None]:
        """The layouts of dense pages and of coded ones, where all layers have the same."""

    def layouts_of(self, layer: int) -> tuple[PageLayout, PageLayout | None]:
        """Return the layouts of a layer's dense pages and of its coded ones."""

    @property
    def choice(self) -> PageChoice | None:
        """Return by what tokens choose the pages that they attend to; None where they attend to all."""

    @property
    def chosen_pages(self) -> int:
        """Return how many pages a token chooses where it does not attend to all; 0 where each attends to all."""

    def sketches(self, group: int) -> PageSketches:
        """Return the sketches of a group's pages, by which tokens choose."""

    def runs(self, layer: int, past: int, num_tokens: int) -> Iterator[tuple[int, int, LayerPages]]:
        """Yield the pages that queries at the positions [past, past + num_tokens) write and read of a layer: how many
        of them see the same ones, and the position of the first one among these."""

    @property
    def homes(self) -> Sequence[tuple[torch.device, int]]:
        """For each layer, the device of its keys and values, and the number of its part in a page's bytes there."""

    def addresses(self, group: int, device: torch.device) -> Tensor:
        """int64 [pages], on the host: where the parts of a group's pages that are on this device begin."""

    def view(self, group: int, number: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the addresses of the pages that the tokens of one page see, as `addresses` does, and which of these is
        their own."""

    def own_page(self, group: int, number: int, device: torch.device) -> tuple[int, int]:
        """Return the address of a page on this device as its own tokens read it, and the bytes from one layer's part
        of it to the next one's."""


@dataclass(frozen=True)
class Segment:
    """The rows [begin, end) of a batch belong to one sequence and are the tokens behind its first `past`."""

    begin: int
    end: int
    kv: KVStore
    past: int
    rope_length: int  # tokens by which length-dependent RoPE scalings choose their frequencies

    @property
    def chooses(self) -> bool:
        """Return whether a token of them chooses the pages that it attends to."""
        choice = self.kv.choice
        return choice is not None and self.past + self.end - self.begin > choice.first_position

    @property
    def all_choose(self) -> bool:
        """Return whether all of its tokens choose the pages that they attend to."""
        choice = self.kv.choice
        return choice is not None and self.past >= choice.first_position

    @property
    def changes_state(self) -> bool:
        """Whether these tokens change recurrent states in place, so that they cannot be computed again."""
        return self.kv.state is not None and self.kv.state.committed > self.past


def ring_of(segments: Sequence[Segment], layers: Sequence[int], *, reads_chosen: bool) -> SpilledPages | None:
    """Begin a forward of these segments through these layers; return what brings their pages from where they
    rest, if any rest elsewhere. reads_chosen: where all tokens choose their pages, the caller reads no others."""
    spilled = [segment for segment in segments if segment.kv.ring is not None]
    ring = spilled[0].kv.ring if spilled else None
    if ring is not None:
        reads_chosen = reads_chosen and all(each.all_choose for each in spilled)
        num_chosen = sum((each.end - each.begin) * each.kv.chosen_pages for each in spilled) if reads_chosen else 0
        ring.begin(layers, [each.kv for each in spilled], num_chosen=num_chosen)
    return ring


def by_sequence(segments: Sequence[Segment]) -> list[Segment]:
    """Return one segment for each sequence: drafts that attend one by one are several."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].kv is segment.kv:
            joined[-1] = replace(joined[-1], end=segment.end)
        else:
            joined.append(segment)
    return joined
