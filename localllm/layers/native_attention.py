"""Attention of a batch by the CPU's compiled kernels: which rows attend together, and where each token's pages are.

`NativeAttention` serves layers of which torch's operators compute the rest; a native step uses the tables alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from localllm.kernels import cpu_rope
from localllm.kernels.cpu_attention import ROW_COUNTS, SECTION_PAGES
from localllm.kernels.cpu_ir import LANES
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import is_available
from localllm.kernels.cpu_page_mass import MassRoom
from localllm.kernels.cpu_paged import (
    AttentionPlace,
    AttentionRoom,
    AttentionTables,
    ChoiceRoom,
    ChosenPages,
    LatentPlace,
    Words,
    row_counts_of,
)
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.kernels.page_choice import FIXED_PAGES, PageChoice
from localllm.layers.config import AttentionConfig, LatentAttentionConfig
from localllm.layers.segment import KVStore, Segment

_HOST = torch.device("cpu")


def is_native(segments: Sequence[Segment], x: Tensor) -> bool:
    """Return whether the kernels can compute it: the layer and all pages are on the host, and heads fill whole
    vectors."""
    return (
        x.device.type == "cpu"
        and x.shape[-1] % LANES == 0
        and is_available()
        and all(segment.kv.is_on_host for segment in segments)
    )


class NativeAttention:
    """The tables of one batch, for all layers whose heads are like those of this one."""

    def __init__(self, segments: Sequence[Segment], heads: int, layer: int, *, chooses: bool = False) -> None:
        """heads: of queries. chooses: tokens that do not attend to all pages choose theirs."""
        kv = segments[0].kv
        self.layouts = kv.layouts_of(layer)
        self._places = kv.places
        groups = 1 + max(group for group, _ in kv.places)
        kv_heads, value_dim = self.layouts[0].num_kv_heads, self.layouts[0].value_dim
        threads, rows, group = torch.get_num_threads(), row_counts_of(self.layouts[0]), kv.places[layer][0]
        tables = attention_tables(segments, heads, kv_heads, groups, threads, rows, group if chooses else None)
        choice = None if tables.chosen is None else ChoiceRoom(tables.chosen, len(tables.chosen.choices), kv_heads)
        sizes = len(tables.tasks), len(tables.merges), tables.num_parts
        self._room = AttentionRoom(*sizes, kv_heads, value_dim, choice)
        self._room.place(tables)
        self._tokens = [torch.tensor(words) for words in tables.tokens]
        self._rows, self._is_split = tables.rows, tables.is_split
        watched = watched_tokens(segments)
        self._masses = MassRoom(0, 0, 0).placed(watched, torch.get_num_threads()) if watched else None

    def __call__(self, qkv: Tensor, config: AttentionConfig, layer: int, sinks: Tensor | None = None) -> Tensor:
        """qkv fp32 [T, H + 2 KH, D], rotated already; written over. sinks: fp32 [H]. Keys and values go to their pages;
        without any, those of another layer are read. Returns fp32 [T, H, D]."""
        T, heads, D = qkv.shape
        group, row = self._places[layer]
        isa, out, tokens = best_isa(), torch.empty(T, config.num_heads, D), self._tokens[group]
        store = cpu_rope.rope(isa, *self.layouts, 0, "none").step(
            qkv=qkv,
            cos=0,
            sin=0,
            q_norm=0,
            k_norm=0,
            tokens=tokens,
            shape=torch.tensor([T]),
            stride=heads * D,
            heads=config.num_heads,
            kv_heads=config.key_heads,
            layer=row,
            scales=torch.full((T,), config.scale),
            eps=0,
        )
        options = config.window, config.softcap, sinks
        place = AttentionPlace(qkv, heads * D, out, tokens, row, config.num_heads, *options)
        steps = [*self._room.steps(isa, self.layouts, place, rows=self._rows, is_split=self._is_split)]
        if self._masses is not None and config.window is None:
            steps.append(self._masses.step(isa, self.layouts, place))
        Tape([store, *steps]).run()
        return out

    def of_latents(self, queries: Tensor, keys: Tensor, config: LatentAttentionConfig, layer: int) -> Tensor:
        """queries fp32 [T, H, D], keys fp32 [T, 1, D]: latents and what has rotated, which go to their pages. Returns
        fp32 [T, H, latent_dim]."""
        group, row = self._places[layer]
        absorbed = queries[..., : config.latent_dim].flatten(1)
        turning = queries[..., config.latent_dim :].flatten(1)
        out, shape, isa = torch.empty_like(absorbed), torch.tensor([len(queries)]), best_isa()
        widths, tokens = (turning.shape[1], keys.shape[-1]), self._tokens[group]
        places = absorbed, config.num_heads, turning, widths[0], keys, widths[1], out, tokens, row
        place = LatentPlace(*places, config.window)
        rows, is_split = self._rows, self._is_split
        steps = self._room.latent_steps(isa, self.layouts, place, config.scale, rows=rows, is_split=is_split)
        Tape([place.step(isa, self.layouts, shape), *steps]).run()
        return out.view(len(queries), config.num_heads, -1)


def attention_tables(
    segments: Sequence[Segment],
    heads: int,
    kv_heads: int,
    groups: int,
    threads: int,
    row_counts: Sequence[int] = ROW_COUNTS,
    choosing: int | None = None,
) -> AttentionTables:
    """heads: of queries; groups: of layers; row_counts: those that a kernel's task may have; choosing: the group of the
    layers in which tokens choose their pages. Where there are too few tasks for the threads, each has one section of
    its keys: which sections there are does not depend on it, and so neither does a bit of what comes out."""
    group = heads // kv_heads
    longest = max(segment.end - segment.begin for segment in segments)
    rows = next((count for count in row_counts if count >= longest * group), row_counts[-1])
    runs = [run for segment in segments for run in _page_runs(segment, groups, choosing)]
    tokens = [[word for run in runs for word in run.tokens(index)] for index in range(groups)]
    tasks = [
        (run, first, min(rows, run.end_row(group) - first)) for run in runs for first in run.first_rows(group, rows)
    ]
    chosen = None if choosing is None else _chosen_pages(runs, choosing, threads)
    whole: Words = [(run.segment.begin, first, count, 0, run.sections, -1) for run, first, count in tasks]
    if len(tasks) * kv_heads >= 2 * threads or max(run.sections for run in runs) == 1:
        return AttentionTables(rows, tokens, whole, [], 0, chosen)
    parts, split, merges = 0, [], []
    for run, first, count in tasks:
        split += [(run.segment.begin, first, count, s, s + 1, parts + s * count) for s in range(run.sections)]
        places = ((run.segment.begin + row // group, row % group) for row in range(first, first + count))
        merges += [(*place, parts + i, count, run.sections) for i, place in enumerate(places)]
        parts += run.sections * count
    return AttentionTables(rows, tokens, split, merges, parts, chosen)


def watched_tokens(segments: Sequence[Segment]) -> Words:
    """Return the tokens of a batch whose attention is summed up for each page: see MASS_WORDS."""
    words = []
    for segment in segments:
        if (masses := segment.kv.masses) is None:
            continue
        for position in masses.watched(segment.past, segment.past + segment.end - segment.begin):
            row = masses.row(position)
            words.append((segment.begin + position - segment.past, row.data_ptr(), row.shape[1]))
    return words


@dataclass(frozen=True)
class _PageRun:
    """The tokens [begin, end) of a segment, counted in positions, which stand in one page. choice: by which the only
    one chooses its pages."""

    segment: Segment
    begin: int
    end: int
    groups: int  # of layers
    choice: PageChoice | None = None

    @property
    def number(self) -> int:
        return self.begin // PAGE_TOKENS

    @cached_property
    def sections(self) -> int:
        """Of the layers that see most."""
        if self.choice is not None:
            return -(-(self.choice.pages + FIXED_PAGES) // SECTION_PAGES)
        kv = self.segment.kv
        return max(kv.view(index, self.number, _HOST)[1] for index in range(self.groups)) // SECTION_PAGES + 1

    def tokens(self, index: int) -> Words:
        kv = self.segment.kv
        own, stride = kv.own_page(index, self.number, _HOST)
        pages, place = kv.view(index, self.number, _HOST)
        moved = (place - self.number) * PAGE_TOKENS
        return [(pages.data_ptr(), own, stride, position + moved) for position in range(self.begin, self.end)]

    def end_row(self, group: int) -> int:
        """Rows count from the segment's first token."""
        return (self.end - self.segment.past) * group

    def first_rows(self, group: int, rows: int) -> range:
        return range((self.begin - self.segment.past) * group, self.end_row(group), rows)


def _page_runs(segment: Segment, groups: int, choosing: int | None) -> Iterator[_PageRun]:
    """Yield the runs of a segment; a token that chooses its pages is one by itself. groups: of layers."""
    begin, end = segment.past, segment.past + segment.end - segment.begin
    choice = None if choosing is None else segment.kv.choice
    first_chosen = end if choice is None else max(begin, min(end, choice.first_position))
    first = begin
    while first < first_chosen:
        last = min(first_chosen, (first // PAGE_TOKENS + 1) * PAGE_TOKENS)
        yield _PageRun(segment, first, last, groups)
        first = last
    for position in range(first_chosen, end):
        yield _PageRun(segment, position, position + 1, groups, choice)


def _chosen_pages(runs: Sequence[_PageRun], group: int, threads: int) -> ChosenPages:
    """group: of layers."""
    choices: list[tuple[int, ...]] = []
    wanted: dict[KVStore, int] = {}
    table = 0
    for run in runs:
        if run.choice is None:
            choices += [(0, 0, 0, 0)] * (run.end - run.begin)
            continue
        kv, pages = run.segment.kv, run.choice.pages
        sketches = kv.sketches(group)
        choices.append((sketches.on(_HOST).data_ptr(), sketches.pages, pages, table))
        table += pages + FIXED_PAGES
        wanted[kv] = max(wanted.get(kv, 0), run.number - 1)
    sequences = [_sketch_words(kv, group, count) for kv, count in wanted.items()]
    return ChosenPages(choices, sequences, threads)


def _sketch_words(kv: KVStore, group: int, wanted: int) -> tuple[int, ...]:
    sketches = kv.sketches(group)
    pages = kv.addresses(group, _HOST).data_ptr()
    return pages, sketches.on(_HOST).data_ptr(), sketches.pages, sketches.made(_HOST).data_ptr(), wanted
