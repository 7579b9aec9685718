"""Attention of a batch by the CPU's compiled kernels: which rows attend together, and where each token's pages are.

`NativeAttention` serves layers of which torch's operators compute the rest; a native step uses the tables alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import cpu_rope
from localllm.kernels.cpu_attention import ROW_COUNTS, SECTION_PAGES
from localllm.kernels.cpu_ir import LANES
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import is_available
from localllm.kernels.cpu_paged import (
    AttentionPlace,
    AttentionRoom,
    AttentionTables,
    LatentPlace,
    Words,
    row_counts_of,
)
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.layers.config import AttentionConfig, LatentAttentionConfig
from localllm.layers.segment import Segment

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

    def __init__(self, segments: Sequence[Segment], heads: int, layer: int) -> None:
        """heads: of queries."""
        kv = segments[0].kv
        self.layouts = kv.layouts_of(layer)
        self._places = kv.places
        groups = 1 + max(group for group, _ in kv.places)
        kv_heads, value_dim = self.layouts[0].num_kv_heads, self.layouts[0].value_dim
        tables = attention_tables(
            segments, heads, kv_heads, groups, torch.get_num_threads(), row_counts_of(self.layouts[0])
        )
        self._room = AttentionRoom(len(tables.tasks), len(tables.merges), tables.num_parts, kv_heads, value_dim)
        self._room.place(tables)
        self._tokens = [torch.tensor(words) for words in tables.tokens]
        self._rows, self._is_split = tables.rows, tables.is_split

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
        steps = self._room.steps(isa, self.layouts, place, rows=self._rows, is_split=self._is_split)
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
) -> AttentionTables:
    """heads: of queries; groups: of layers; row_counts: those that a kernel's task may have. Where there are too few
    tasks for the threads, each has one section of its keys: which sections there are does not depend on it, and so
    neither does a bit of what comes out."""
    group = heads // kv_heads
    longest = max(segment.end - segment.begin for segment in segments)
    rows = next((count for count in row_counts if count >= longest * group), row_counts[-1])
    runs = []
    for segment in segments:
        begin, end = segment.past, segment.past + segment.end - segment.begin
        for first in (begin, *range((begin // PAGE_TOKENS + 1) * PAGE_TOKENS, end, PAGE_TOKENS)):
            runs.append(_PageRun(segment, first, min(end, (first // PAGE_TOKENS + 1) * PAGE_TOKENS)))
    tokens = [[word for run in runs for word in run.tokens(index)] for index in range(groups)]
    tasks = [
        (run, first, min(rows, run.end_row(group) - first)) for run in runs for first in run.first_rows(group, rows)
    ]
    whole: Words = [(run.segment.begin, first, count, 0, run.sections, -1) for run, first, count in tasks]
    if len(tasks) * kv_heads >= 2 * threads or max(run.sections for run in runs) == 1:
        return AttentionTables(rows, tokens, whole, [], 0)
    parts, split, merges = 0, [], []
    for run, first, count in tasks:
        split += [(run.segment.begin, first, count, s, s + 1, parts + s * count) for s in range(run.sections)]
        places = ((run.segment.begin + row // group, row % group) for row in range(first, first + count))
        merges += [(*place, parts + i, count, run.sections) for i, place in enumerate(places)]
        parts += run.sections * count
    return AttentionTables(rows, tokens, split, merges, parts)


@dataclass(frozen=True)
class _PageRun:
    """The tokens [begin, end) of a segment, counted in positions, which stand in one page."""

    segment: Segment
    begin: int
    end: int

    @property
    def number(self) -> int:
        return self.begin // PAGE_TOKENS

    @property
    def sections(self) -> int:
        return self.number // SECTION_PAGES + 1

    def tokens(self, index: int) -> Words:
        kv = self.segment.kv
        own, stride = kv.own_page(index, self.number, _HOST)
        pages = kv.addresses(index, _HOST).data_ptr()
        return [(pages, own, stride, position) for position in range(self.begin, self.end)]

    def end_row(self, group: int) -> int:
        """Rows count from the segment's first token."""
        return (self.end - self.segment.past) * group

    def first_rows(self, group: int, rows: int) -> range:
        return range((self.begin - self.segment.past) * group, self.end_row(group), rows)
