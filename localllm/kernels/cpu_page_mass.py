"""The attention that pages get, on the CPU: the softmax weights of a token's heads, summed up for each page.

A kernel of its own beside `cpu_attention`, which keeps its bits and its speed where nobody asks. It computes the scores
of a few tokens once more, as that one does, and no values: 31 us a layer for a token behind 1,024 in a 1.1B shape,
beside 48 of the attention (one thread, AVX-512).
"""

from __future__ import annotations

from functools import cache

import torch

from localllm.kernels import cpu_math
from localllm.kernels.cpu_attention import ROW_COUNTS, RUN_PAGES, SECTION_PAGES, Task, runs
from localllm.kernels.cpu_ir import F32, F32V, I32, I64, LANES, PTR, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_paged import NO_WINDOW, AttentionPlace, Layouts, Words
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout

# Of a token whose attention is summed up: its row, where its sums are, fp32 [key heads, pages], and the pages.
MASS_WORDS = ("token", "sums", "pages")
_PAIR = 2 * 4 * LANES  # bytes: of up to 16 rows, the sum of a page's weights, and the score that they are relative to


def page_mass_source(
    isa: Isa, dense: PageLayout, coded: PageLayout | None, rows: int, *, has_softcap: bool, has_sinks: bool
) -> Kernel:
    """Add to sums[key head, page] the weights that the token's heads of this key head give to the page.

    q, tokens, sinks, group, stride, layer, softcap: as in `attention_source`. tasks: int64 [tasks, 3], see MASS_WORDS.
    scratch: fp32 [threads, pages, 2, 16]. shape: a pointer to {tasks, pages}, of the longest.
    """
    names = "q tasks tokens sinks scratch shape | kv_heads group stride layer window softcap token_stride"
    k = Kernel("page_mass", names)
    a, pages = k.arg, k.arg.shape.at(8).load(I64, 8)
    task = Task(k, isa, dense, coded, rows, has_softcap, has_sinks=False)
    scratch = a.scratch.at(k.thread * pages * _PAIR)
    begin, end = k.share(a.shape.load(I64, 8) * a.kv_heads)
    with k.range(begin, end) as item:
        kv_head, words = item % a.kv_heads, a.tasks.at(item / a.kv_heads * (8 * len(MASS_WORDS)))
        token, width = words.load(I64, 8), words.at(16).load(I64, 8)
        sums = words.at(8).load(PTR, 8).at(kv_head * width * 4)
        with k.range(k.i64(0), a.group, rows) as first_row:  # as many of its heads as are computed at once
            count = k.smaller(k.i64(rows), a.group - first_row)
            task.start([token, first_row, count, k.i64(0), k.i64(0), k.i64(0)], kv_head)
            state = task.section
            state.clear()
            if has_sinks:
                for r in range(rows):
                    head = kv_head * a.group + first_row + k.smaller(k.i64(r), count - 1)
                    state.peaks.at(4 * r).store(a.sinks.at(head * 4).load(F32))
                    state.totals.at(4 * r).store(k.constant(F32, 1))
            with (
                k.range(k.i64(0), task.own_page / SECTION_PAGES + 1) as section,
                runs(k, section, task.first_key, task.own_page) as (first_page, end_page, run_page),
            ):
                with k.range(first_page, end_page) as page:
                    task.score(page, (page - run_page) * PAGE_TOKENS)
                task.soften(run_page, first_page, end_page)
                with k.range(first_page, end_page) as page:
                    _keep(task, (page - run_page) * PAGE_TOKENS, scratch.at(page * _PAIR))
            _add(task, scratch, sums)
    return k


def _keep(task: Task, at: Value, pair: Value) -> None:
    """Keep the sum of each row's weights in a page whose scores begin `at`, and the score that they are relative to by
    now."""
    k = task.k
    for r in range(task.R):
        weights = task.scores.at(4 * r * RUN_PAGES * PAGE_TOKENS).at(at * 4)
        vectors = [weights.at(64 * i).load(F32V, 64) for i in range(PAGE_TOKENS // LANES)]
        pair.at(4 * r).store(cpu_math.total(k, (vectors[0] + vectors[1]) + (vectors[2] + vectors[3])))
        pair.at(4 * (LANES + r)).store(task.section.peaks.at(4 * r).load(F32))


def _add(task: Task, scratch: Value, sums: Value) -> None:
    """Add to each page's sum the shares of all rows in it."""
    k, state = task.k, task.section
    lanes = k.lane_numbers().compare("slt", task.rows.convert("trunc", I32).splat())
    peaks, totals = (lanes.choose(x.load(F32V), k.f32v(1)) for x in (state.peaks, state.totals))
    shares = k.f32v(1) / totals
    with k.range(k.i64(0), task.own_page + 1) as page:
        pair, place = scratch.at(page * _PAIR), sums.at(page * 4)
        weights = pair.load(F32V) * cpu_math.exp(k, pair.at(4 * LANES).load(F32V) - peaks) * shares
        place.store(place.load(F32) + cpu_math.total(k, lanes.choose(weights, k.f32v(0))))


class MassRoom:
    """Fixed places for the tokens of a batch whose attention is summed up, which a tape points at."""

    def __init__(self, tasks: int, pages: int, threads: int) -> None:
        """tasks, pages, threads: at most."""
        self._tasks = torch.zeros(tasks, len(MASS_WORDS), dtype=torch.int64)
        self._scratch = torch.zeros(threads, pages, _PAIR // 4)
        self._shape = torch.tensor([0, pages])

    def placed(self, tasks: Words, threads: int) -> MassRoom:
        """Place tasks in this room, or in another one where they need more than it has; return which."""
        room, pages = self, max((task[2] for task in tasks), default=0)
        if len(tasks) > len(self._tasks) or pages > self._scratch.shape[1] or threads > len(self._scratch):
            room = MassRoom(max(2 * len(tasks), len(self._tasks)), max(2 * pages, self._scratch.shape[1]), threads)
        if tasks:
            room._tasks[: len(tasks)] = torch.tensor(tasks)
        room._shape[0] = len(tasks)
        return room

    def step(self, isa: Isa, layouts: Layouts, place: AttentionPlace) -> Step:
        """Return the step, behind the one that has rotated the queries and written the keys."""
        dense, coded = layouts
        group = place.num_heads // dense.num_kv_heads
        rows = next((count for count in ROW_COUNTS if count >= group), ROW_COUNTS[-1])
        has_softcap, has_sinks = place.softcap is not None, place.sinks is not None
        return page_mass(isa, dense, coded, rows, has_softcap=has_softcap, has_sinks=has_sinks).step(
            q=place.q,
            tasks=self._tasks,
            tokens=place.tokens,
            sinks=0 if place.sinks is None else place.sinks,
            scratch=self._scratch,
            shape=self._shape,
            kv_heads=dense.num_kv_heads,
            group=group,
            stride=place.stride,
            layer=place.layer,
            window=NO_WINDOW,
            softcap=float_bits(place.softcap or 0.0),
            token_stride=0,
        )


@cache
def page_mass(
    isa: Isa, dense: PageLayout, coded: PageLayout | None, rows: int, *, has_softcap: bool, has_sinks: bool
) -> Native:
    source = page_mass_source(isa, dense, coded, rows, has_softcap=has_softcap, has_sinks=has_sinks)
    return compile_kernel(source, isa)
