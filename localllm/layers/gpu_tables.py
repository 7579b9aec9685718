"""The tables of a batch for a GPU's kernels: token ids, positions, addresses of pages, rows that attend together, the
states of sequences and what becomes of them.

All of it is one run of bytes, written on the host and copied at once, at the same address in every forward of the same
shape: so a graph of launches can be replayed over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from localllm.kernels.gpu.attention import AttentionHistory, block_rows, tasks_of
from localllm.kernels.gpu.page_choice import Choices
from localllm.kernels.gpu.page_masses import Watched
from localllm.kernels.gpu.product import FEW_ROWS
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.gpu.rope import TokenTables
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout, pages_of
from localllm.kernels.page_choice import FIXED_PAGES, PageSketches
from localllm.kernels.page_locked import copy_event, page_locked
from localllm.kernels.state_shapes import REPLAYED_ROWS, STATE_WORDS
from localllm.layers.batch import Batch, Draw
from localllm.layers.segment import Segment, by_sequence

_ALIGN = 16
# Of the host's memory: the copies of two steps may still wait while the tables of a third are written.
_STAGES = 4
# Pages of a graph's tables, and by how much they grow. Up to FEW_ROWS, programs share out the pages that a table has
# room for; of more rows a program has all of its task's pages, and room costs eight bytes a page.
_LEAST_PAGES, _MORE_PAGES = 4, 2
_LONG_PAGES, _MORE_LONG_PAGES = 64, 16


# Of layers that are on a device: the rows there of those in which tokens may choose their pages.
Groups = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class TableShape:
    """rows, of which the last ones may be nobody's; tables: of pages; pages: of the longest of them; groups: of layers;
    frequencies: for each RoPE that depends on the length of a sequence, how many it has. sequences: that have recurrent
    states on the device, at most; 0 where no layer there has any. watched: rows whose attention is summed up, at
    most. chosen: pages that a row chooses; 0 where none does. choosers: rows that choose, at most. all_choose: every
    row does."""

    rows: int
    tables: int
    tasks: int
    pages: int
    groups: int
    frequencies: tuple[int, ...] = ()
    sequences: int = 0
    watched: int = 0
    chosen: int = 0
    choosers: int = 0
    all_choose: bool = False

    @property
    def snapshots(self) -> int:
        """Those that may be due: one at each border of pages among a sequence's new tokens and the few before them that
        its states lack."""
        return self.rows // PAGE_TOKENS + 2 * self.sequences

    @property
    def sections(self) -> int:
        return self.pages if self.rows <= FEW_ROWS else 1

    @property
    def chosen_sections(self) -> int:
        """As `sections`, of layers in which rows choose."""
        is_short = self.rows <= FEW_ROWS and self.all_choose
        return min(self.sections, self.chosen + FIXED_PAGES) if is_short else self.sections

    @property
    def fields(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        by_group = (self.groups, _even(self.rows))
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (self.rows,)),
            "keys": (torch.int64, (self.rows,)),
            "own": (torch.int64, by_group),
            "own_stride": (torch.int64, by_group),
            "coded": (torch.int64, by_group),
            "pages": (torch.int64, (self.groups, self.tables, _even(self.pages))),
            "positions": (torch.int32, (self.rows,)),
            "places": (torch.int32, (self.groups, 2 * _even(-(-self.rows // 2)))),
            "tasks": (torch.int32, (self.tasks, 4)),
            "temperatures": (torch.float32, (self.rows,)),
            "thresholds": (torch.float32, (self.rows,)),
        }
        ropes = {f"frequencies{i}": (torch.float32, (self.rows, n)) for i, n in enumerate(self.frequencies) if n}
        states: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "states": (torch.int64, (self.sequences, len(STATE_WORDS))),
            "snapshots": (torch.int64, (self.snapshots, 2)),
        }
        watched: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "watched": (torch.int32, (self.watched, 4)),
            "sums": (torch.int64, (self.watched, 2)),
        }
        choices: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "choosers": (torch.int32, (self.choosers,)),
            "choices": (torch.int64, (self.groups, self.rows, 4)),
            "sketches": (torch.int64, (self.groups, self.tables, 4)),
        }
        parts = (self.sequences, states), (self.watched, watched), (self.chosen, choices)
        return {**fields, **ropes, **{name: field for has, part in parts if has for name, field in part.items()}}

    @property
    def num_bytes(self) -> int:
        return sum(_padded(dtype, shape) for dtype, shape in self.fields.values())

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """memory uint8 [num_bytes]."""
        views, begin = {}, 0
        for name, (dtype, shape) in self.fields.items():
            count = torch.Size(shape).numel()
            views[name] = memory[begin : begin + count * dtype.itemsize].view(dtype).view(shape)
            begin += _padded(dtype, shape)
        return views


def _even(count: int) -> int:
    """Round up words of 8 bytes: each group begins at a multiple of 16, as Triton would compile other variants
    otherwise."""
    return count + count % 2


def _padded(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGN) * _ALIGN


class HostStage:
    """Memory of the host from which tables are copied. It is page-locked once, as that takes the driver longer than the
    tables of a forward do, and written again when its copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(0, dtype=torch.uint8)
        self._copied: Any = None  # an event

    def of(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; waits for the copy before."""
        self.wait()
        if self._memory.nbytes < num_bytes:
            self._memory = page_locked((max(num_bytes, 2 * self._memory.nbytes),), torch.uint8, self._device)
        return self._memory[:num_bytes]

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """Remember that its copy has been given to the device."""
        if self._device.type == "cuda":
            self._copied = self._copied or copy_event()
            self._copied.record(torch.cuda.current_stream(self._device))


class GpuTables:
    """The tables of forwards of one shape, for the layers on `device`."""

    def __init__(
        self,
        shape: TableShape,
        device: torch.device,
        layouts: tuple[PageLayout, PageLayout | None],
        stage: HostStage | None = None,
    ) -> None:
        """layouts: of dense and of coded pages. stage: where they are written; by default in memory of their own, of
        which most forwards find a part that nothing is copied from any more."""
        self.shape, self.device = shape, device
        self.dense, self.coded = layouts
        stages = [HostStage(device) for _ in range(_STAGES)] if stage is None else [stage]
        written = [(each, each.of(shape.num_bytes)) for each in stages]
        self._stages = [
            (each, memory, {n: v.numpy() for n, v in shape.views(memory).items()}) for each, memory in written
        ]
        self._used = 0
        self._memory = torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device)
        self.views = shape.views(self._memory)
        self._spilled: dict[int, list[int]] = {}  # of each group and table: pages that rest elsewhere
        self._bases: dict[int, int] = {}  # that are in their addresses
        self._made: list[tuple[PageSketches, Sequence[int], int]] = []  # layers that will have them, of so many pages

    @cached_property
    def tokens(self) -> tuple[TokenTables, ...]:
        """The token tables of each group of layers."""
        v = self.views
        return tuple(
            TokenTables(v["positions"], v["own"][g], v["own_stride"][g], v["coded"][g])
            for g in range(self.shape.groups)
        )

    @cached_property
    def attended(self) -> tuple[TokenTables, ...]:
        """The same with the positions that attention has: as if the pages that a row sees were all there are."""
        places = self.views["places"][:, : self.shape.rows]
        return tuple(replace(tokens, positions=own) for tokens, own in zip(self.tokens, places, strict=True))

    @cached_property
    def watched(self) -> Watched | None:
        """The rows whose attention is summed up, in layers without a window; None where there are none."""
        return Watched(self.views["watched"], self.views["sums"]) if self.shape.watched else None

    @cached_property
    def choices(self) -> tuple[Choices, ...]:
        """What rows choose among in each group of layers; empty where none chooses."""
        v = self.views
        groups = range(self.shape.groups if self.shape.chosen else 0)
        return tuple(Choices(v["choosers"], v["choices"][g], v["sketches"][g], self.shape.chosen) for g in groups)

    @cached_property
    def histories(self) -> tuple[AttentionHistory, ...]:
        v = self.views
        return tuple(AttentionHistory(v["tasks"], v["pages"][g]) for g in range(self.shape.groups))

    @cached_property
    def states(self) -> SegmentTables:
        return SegmentTables(self.views["states"], self.views["positions"])

    def frequencies(self, rotation: int, batch: Batch) -> Tensor:
        """fp32 [1 or rows, rotary_dim / 2], on the device."""
        if self.shape.frequencies and self.shape.frequencies[rotation]:
            return self.views[f"frequencies{rotation}"]
        return batch.rotaries[rotation].frequencies(batch.segments)

    def fill(self, batch: Batch, groups: Groups, task_tokens: int, draws: Sequence[Draw] = ()) -> None:
        """groups: those that have layers on the device. task_tokens: the most of a task. draws: how a token is to be
        drawn from each row's logits, if any is. A copy is begun. Waits for no copy but that of as many forwards before
        as there are stages."""
        stage, memory, words = self._stages[self._used % len(self._stages)]
        self._used += 1
        stage.wait()
        T = len(batch)
        words["token_ids"][:T] = batch.token_ids.numpy()
        words["token_ids"][T:] = 0
        words["positions"][:T] = batch.positions.numpy()
        words["positions"][T:] = words["places"][:, T:] = -1
        runs = list(_page_runs(batch.segments))
        tasks = [task for table, run in enumerate(runs) for task in run.tasks(table, task_tokens)]
        words["tasks"][len(tasks) :] = 0
        words["tasks"][: len(tasks)] = tasks
        for table, run in enumerate(runs):
            for group in groups:
                self._place(words, table, run, group)
        if self.shape.watched:
            self._place_watched(words, runs)
        self._made.clear()
        if self.shape.chosen:
            words["choices"][:] = words["sketches"][:] = 0
            words["choosers"][:], count = -1, 0
            for table, run in enumerate(runs):
                words["choosers"][count : count + len(run.choosers)] = run.choosers
                for group, rows in groups.items():
                    if rows and run.choosers:
                        self._place_choice(words, table, run, group, rows, count)
                count += len(run.choosers)
        for index, draw in enumerate(draws):
            words["keys"][index] = draw.key
            words["temperatures"][index] = draw.temperature
            words["thresholds"][index] = draw.threshold
        for index, count in enumerate(self.shape.frequencies):
            if count:
                words[f"frequencies{index}"][:T] = batch.rotaries[index].frequencies(batch.segments).numpy()
        if self.shape.sequences:
            self._place_states(words, by_sequence(batch.segments))
        self._memory.copy_(memory, non_blocking=memory.is_pinned())  # what is not pinned is copied before this returns
        stage.mark()
        self._spilled = {group: [each.kv.spilled_pages(group) for each in batch.segments] for group in groups}
        self._bases.clear()

    def rebase(self, group: int, base: int) -> None:
        """Let the addresses of pages that rest elsewhere begin at `base`, for what is launched from here on."""
        added, self._bases[group] = base - self._bases.get(group, 0), base
        for index, count in enumerate(self._spilled[group]):
            if count:
                self.views["pages"][group, index, 1 : 1 + count].add_(added)

    def _place(self, words: dict[str, numpy.ndarray], table: int, run: _PageRun, group: int) -> None:
        """Write the addresses of the pages of this group that a run sees, and where its rows stand among them."""
        kv, last = run.segment.kv, (run.end - 1) // PAGE_TOKENS
        addresses, place = kv.view(group, last, self.device)
        words["pages"][group, table, : place + 1] = addresses[: place + 1].numpy()
        all_rows, left = slice(run.first_row, run.first_row + run.end - run.begin), last - place
        words["places"][group, all_rows] = numpy.arange(run.begin, run.end) - left * PAGE_TOKENS
        for number in range(run.begin // PAGE_TOKENS, last + 1):
            begin, stop = max(run.begin, number * PAGE_TOKENS), min(run.end, (number + 1) * PAGE_TOKENS)
            rows = slice(run.first_row + begin - run.begin, run.first_row + stop - run.begin)
            own, stride = kv.own_page(group, number, self.device)
            words["own"][group, rows], words["own_stride"][group, rows] = own, stride
            words["coded"][group, rows] = addresses[number - left] if self.coded is not None and number else 0

    def _place_choice(
        self, words: dict[str, numpy.ndarray], table: int, run: _PageRun, group: int, rows: Sequence[int], first: int
    ) -> None:
        """Write among which pages the rows of a run choose. rows: of the layers that do, in the group's part on the
        device; first: which of the choosers its first one is."""
        sketches, own = run.segment.kv.sketches(group), slice(run.choosers.start, run.choosers.stop)
        room = sketches.on(self.device).data_ptr(), sketches.pages
        positions = numpy.arange(run.begin + run.num_whole, run.end)
        words["places"][group, own] = (self.shape.chosen + FIXED_PAGES - 1) * PAGE_TOKENS + positions % PAGE_TOKENS
        words["choices"][group, own, :3] = *room, table
        words["choices"][group, own, 3] = range(first, first + len(run.choosers))
        wanted, made = (run.end - 1) // PAGE_TOKENS - 1, sketches.made(self.device)[list(rows)]
        words["sketches"][group, table] = *room, max(1, int(made.min())), wanted
        self._made.append((sketches, rows, wanted))

    def mark_made(self) -> None:
        """Remember that all has been launched that makes sketches."""
        for sketches, rows, wanted in self._made:
            made = sketches.made(self.device)
            made[list(rows)] = made[list(rows)].clamp(min=wanted)
        self._made.clear()

    def _place_watched(self, words: dict[str, numpy.ndarray], runs: Sequence[_PageRun]) -> None:
        """Write which rows' attention is summed up, and where to."""
        count = 0
        for table, run in enumerate(runs):
            if (masses := run.segment.kv.masses) is None:
                continue
            for position in masses.watched(run.begin, run.end):
                row, sums = run.first_row + position - run.begin, masses.row(position, self.device)
                # In the parts of all rows, where programs had one page of them.
                words["watched"][count] = row, 1, table, row if self.shape.sections > 1 else count
                words["sums"][count] = sums.data_ptr(), sums.shape[1]
                count += 1
        words["watched"][count:] = 0

    def _place_states(self, words: dict[str, numpy.ndarray], segments: Sequence[Segment]) -> None:
        """Write where each sequence's states are, and the snapshots that are due. Rows that are computed again stand
        before a sequence's own."""
        rows, pairs, first = words["states"], list[tuple[int, int]](), self.views["snapshots"].data_ptr()
        rows[len(segments) :] = 0
        for index, segment in enumerate(segments):
            store, end = segment.kv.state, segment.past + segment.end - segment.begin
            assert store is not None, "layers keep states"
            # Of a forward's; this batch may be one of several.
            own = [position for position in sorted(store.due) if segment.past - REPLAYED_ROWS < position <= end]
            due = [(position, store.due[position].address(self.device)) for position in own]
            row = (index + 1) * REPLAYED_ROWS + segment.begin
            states, at = store.states.address(self.device), first + 16 * len(pairs)
            committed = min(store.committed, end)
            rows[index] = (segment.begin, segment.end, segment.past, committed, states, row, at, len(due))
            pairs += due
        words["snapshots"][: len(pairs)] = numpy.array(pairs, dtype=numpy.int64).reshape(-1, 2)


@dataclass(frozen=True)
class _PageRun:
    """The tokens [begin, end) of a segment, counted in positions, which read one table of pages."""

    segment: Segment
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def first_row(self) -> int:
        return self.segment.begin + self.begin - self.segment.past

    @property
    def num_whole(self) -> int:
        """The first tokens, which attend to all pages."""
        choice = self.segment.kv.choice
        return len(self) if choice is None else max(0, min(len(self), choice.first_position - self.begin))

    @property
    def choosers(self) -> range:
        """The rows of the others."""
        return range(self.first_row + self.num_whole, self.first_row + len(self))

    def tasks(self, table: int, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tasks of at most so many tokens; one that chooses its pages is one by itself."""
        yield from tasks_of(table, self.first_row, self.begin, self.num_whole, tokens)
        for row in self.choosers:
            yield row, 1, table, row


def _page_runs(segments: Sequence[Segment]) -> Iterator[_PageRun]:
    """Yield a run for each segment, or for each page of one whose tokens may see other pages in each."""
    for segment in segments:
        begin, end = segment.past, segment.past + segment.end - segment.begin
        while segment.kv.evicts and begin // PAGE_TOKENS < (end - 1) // PAGE_TOKENS:
            stop = (begin // PAGE_TOKENS + 1) * PAGE_TOKENS
            yield _PageRun(segment, begin, stop)
            begin = stop
        yield _PageRun(segment, begin, end)


def seen_pages(batch: Batch, groups: Iterable[int], device: torch.device) -> int:
    """Return the pages that tables need for what the batch sees, of these groups on the device."""
    lasts = [(each.kv, (each.past + each.end - each.begin - 1) // PAGE_TOKENS) for each in batch.segments]
    return max((kv.view(group, last, device)[1] + 1 for kv, last in lasts for group in groups), default=1)


def table_shape(
    batch: Batch,
    rows: int,
    pages: int,
    groups: int,
    task_tokens: int,
    *,
    keeps_states: bool = False,
    chooses: bool = False,
) -> TableShape:
    """Return the shape of tables for this batch in so many rows, and for others whose sequences have at most so many
    pages: it serves any batch that has no more rows, of one segment where this one has one. keeps_states: layers on the
    device do, of as many sequences as this batch has, or a few more. chooses: rows may choose their pages."""
    frequencies = tuple(
        rotary.rotary_dim // 2 if rotary.depends_on_length else 0 for rotary in batch.rotaries
    )  # fmt: skip
    count = rows if rows <= FEW_ROWS else 1 << (len(batch.segments) - 1).bit_length()
    sequences = count if keeps_states else 0
    chosen = batch.segments[0].kv.chosen_pages if chooses else 0
    all_choose = chooses and all(each.all_choose for each in batch.segments)
    choosers = rows if rows <= FEW_ROWS else 1 << max(0, _num_choosers(batch) - 1).bit_length()
    choice = chosen, choosers if chooses else 0, all_choose
    ends = frequencies, sequences, _most_watched(batch, rows), *choice
    if rows <= FEW_ROWS or len(batch.segments) > 1:  # a task has a row at least
        return TableShape(rows, rows, rows, pages, groups, *ends)
    # A task ends with its page, too.
    most_pages = rows // PAGE_TOKENS + 2
    tables, tasks = most_pages if batch.segments[0].kv.evicts else 1, rows // task_tokens + most_pages
    return TableShape(rows, tables, rows if chosen else tasks, pages, groups, *ends)


def _num_choosers(batch: Batch) -> int:
    return sum(len(run.choosers) for run in _page_runs(batch.segments))


def _most_watched(batch: Batch, rows: int) -> int:
    """Return the most rows of such a batch whose attention is summed up."""
    if all(segment.kv.masses is None for segment in batch.segments):
        return 0
    if rows <= FEW_ROWS:
        return rows
    spans = [(each.kv.masses, each.past, each.past + each.end - each.begin) for each in batch.segments]
    count = sum(len(masses.watched(begin, end)) for masses, begin, end in spans if masses is not None)
    return 1 << max(0, count - 1).bit_length()


def table_pages(num_tokens: int, rows: int) -> int:
    """Return the pages of tables for a sequence of so many tokens and for longer ones, in forwards of so many rows: a
    graph is made for each such number."""
    pages, more = (_LEAST_PAGES, _MORE_PAGES) if rows <= FEW_ROWS else (_LONG_PAGES, _MORE_LONG_PAGES)
    while pages < pages_of(num_tokens):
        pages *= more
    return pages


def task_tokens(heads_per_key_head: int, rows: int) -> int:
    """The most tokens of a task of attention, in a forward of so many rows."""
    return max(1, block_rows(heads_per_key_head, is_prefill=rows > FEW_ROWS) // heads_per_key_head)
