"""Which rows of a batch the CPU's kernels attend with together, and where each token's pages are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from localllm.kernels.cpu_attention import MAX_ROWS, SECTION_PAGES
from localllm.kernels.cpu_paged import AttentionTables, Words
from localllm.kernels.kv_page import PAGE_TOKENS

if TYPE_CHECKING:
    from localllm.layers.batch import Segment

_HOST = torch.device("cpu")


def attention_tables(
    segments: Sequence[Segment], heads: int, kv_heads: int, groups: int, threads: int
) -> AttentionTables:
    """heads: of queries; groups: of layers. Where there are too few tasks for the threads, each has one section of its
    keys: which sections there are does not depend on it, and so neither does a bit of what comes out."""
    group = heads // kv_heads
    longest = max(segment.end - segment.begin for segment in segments)
    rows = min(MAX_ROWS, 1 << (longest * group - 1).bit_length())
    runs = [run for segment in segments for run in _page_runs(segment)]
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


def _page_runs(segment: Segment) -> Iterator[_PageRun]:
    begin, end = segment.past, segment.past + segment.end - segment.begin
    while begin < end:
        stop = min(end, (begin // PAGE_TOKENS + 1) * PAGE_TOKENS)
        yield _PageRun(segment, begin, stop)
        begin = stop
