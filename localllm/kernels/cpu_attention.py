"""Causal grouped-query attention over KV pages on the CPU: one kernel for decode, verification and prefill.

A row is one query head of one token; the rows of a task share a key head, and so each load of its keys and values, and
stand in one page. Coded pages are multiplied as they are: a key row's scale once a group, a value's once a weight. Keys
are read in runs of RUN_PAGES, softmax is merged from run to run (arXiv:2205.14135), and from SECTION_PAGES to the next
by its final formula, which is why a long history may be shared out over threads by sections. Runs and sections begin
at multiples of their length, and what a row cannot see changes no bit of it: a token's attention does not depend on
which others are computed beside it, nor on how many threads there are.

A query reads its own page dense and all before it as they are coded (but a sequence's first, which stays dense): what
it sees does not depend on when those pages were computed, so that a prefix that is found again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from localllm.kernels import cpu_kv, cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I64, LANES, PTR, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_kv import HeadPlan
from localllm.kernels.cpu_rope import TOKEN_BYTES
from localllm.kernels.kv_page import INT4_ZERO, PAGE_TOKENS, PageLayout
from localllm.kernels.sizes import TASK_WORDS as TASK_WORDS

RUN_PAGES = 4  # 8 KB of scores for 8 rows, in the first-level cache beside the pages
SECTION_PAGES = 16
ROW_COUNTS = (1, 2, 4, 8)  # of a task; 16 sums in registers are 8 rows x 2 vectors, see `Isa.sums`
NOTHING = -1e30  # a maximum over no key: finite, so that differences of it are
# Of a query row: its token, its head within the group, its first part, from one section's part to the next's, sections.
MERGE_WORDS = ("token", "head", "first_part", "step", "count")


def part_floats(head_dim: int) -> int:
    """Floats of one row's share of the keys: its mix, the largest score, the sum of the weights."""
    return head_dim + LANES


def attention_source(
    isa: Isa, dense: PageLayout, coded: PageLayout | None, rows: int, *, has_softcap: bool, has_sinks: bool
) -> Kernel:
    """q fp32 [T, stride] rotated and scaled; out fp32 [T, H * D]; dense, coded: as in `rope_source`.

    tasks: int64 [tasks, 6], see TASK_WORDS; tokens: see `cpu_rope`. parts: fp32 [key heads, parts, part_floats]. shape:
    a pointer to {tasks, parts}. group: query heads a key head. window: keys that a query sees, itself included.
    softcap: the bits of a float. sinks: fp32 [H], scores without a value, which count as if they came before all keys.
    token_stride: bytes from one key head's tokens to the next one's, where they attend to different pages; else 0.
    """
    words = "q out tasks tokens parts sinks shape | kv_heads group stride layer window softcap token_stride"
    k = Kernel("attention", words)
    a = k.arg
    task = Task(k, isa, dense, coded, rows, has_softcap, has_sinks)
    # Dealt out one by one: the later a token, the more keys it sees.
    with k.range(k.i64(0), (a.shape.load(I64, 8) * a.kv_heads + k.threads - 1 - k.thread) / k.threads) as turn:
        item = turn * k.threads + k.thread
        words = a.tasks.at((item / a.kv_heads) * (8 * len(TASK_WORDS)))
        task.start([words.at(8 * n).load(I64, 8) for n in range(len(TASK_WORDS))], item % a.kv_heads)
        with k.range(task.first_section, task.end_section) as section:
            task.section.clear()
            with runs(k, section, task.first_key, task.own_page) as (first_page, end_page, run_page):
                with k.range(first_page, end_page) as page:
                    task.score(page, (page - run_page) * PAGE_TOKENS)
                task.soften(run_page, first_page, end_page)
                with k.range(first_page, end_page) as page:
                    task.mix(page, (page - run_page) * PAGE_TOKENS)
            task.whole.merge(task.section)
        task.finish()
    return k


@contextmanager
def runs(k: Kernel, section: Value, first_key: Value, own_page: Value) -> Iterator[tuple[Value, Value, Value]]:
    """Yield each run of a section: its first page that is seen, the one behind its last, and where it begins."""
    lowest, end = first_key / PAGE_TOKENS, own_page + 1
    per_section = SECTION_PAGES // RUN_PAGES
    first = k.larger(section * per_section, lowest / RUN_PAGES)
    last = k.smaller((section + 1) * per_section, (end + (RUN_PAGES - 1)) / RUN_PAGES)
    with k.range(first, last) as run:
        run_page = run * RUN_PAGES
        yield k.larger(run_page, lowest), k.smaller(run_page + RUN_PAGES, end), run_page


class MixState:
    """Per row: the mixed values so far, not yet divided by the sum of the weights, and the largest score."""

    def __init__(self, k: Kernel, head_dim: int, rows: int) -> None:
        self.k, self.vectors, self.rows = k, head_dim // LANES, rows
        self.mixed = k.stack(F32V, rows * self.vectors)
        self.peaks, self.totals = (k.stack(F32V, -(-rows // LANES)) for _ in range(2))

    def clear(self) -> None:
        k = self.k
        for r in range(self.rows):
            self.peaks.at(4 * r).store(k.constant(F32, NOTHING))
            self.totals.at(4 * r).store(k.constant(F32, 0))
        with k.range(k.i64(0), k.i64(self.rows * self.vectors)) as i:
            self.mixed.at(i * 64).store(k.f32v(0), 64)

    def merge(self, other: MixState) -> None:
        """Both, as if their keys had been seen together."""
        with self.k.range(self.k.i64(0), self.k.i64(self.rows)) as r:
            places = self.peaks.at(r * 4), self.totals.at(r * 4), self.mixed.at(r * (64 * self.vectors))
            peak, total = other.peaks.at(r * 4).load(F32), other.totals.at(r * 4).load(F32)
            merge_row(self.k, self.vectors, places, peak, total, other.mixed.at(r * (64 * self.vectors)))


def merge_row(k: Kernel, vectors: int, into: tuple[Value, Value, Value], peak: Value, total: Value, mix: Value) -> None:
    """into: pointers to a row's peak, total and mix."""
    before = into[0].load(F32)
    highest = k.larger(before, peak)
    old, new = (k.lane(cpu_math.exp(k, (x - highest).splat()), 0) for x in (before, peak))
    into[0].store(highest)
    into[1].store(k.fma(into[1].load(F32), old, total * new))
    for i in range(vectors):
        at = into[2].at(64 * i)
        at.store(k.fma(at.load(F32V), old.splat(), mix.at(64 * i).load(F32V) * new.splat()))


class Task:
    """The rows of one task: what is known of each, and the stages that their keys go through."""

    def __init__(
        self,
        k: Kernel,
        isa: Isa,
        dense: PageLayout,
        coded: PageLayout | None,
        rows: int,
        has_softcap: bool,
        has_sinks: bool,
    ) -> None:
        self.k, self.R, self.has_softcap, self.D = k, rows, has_softcap, dense.head_dim
        self.has_sinks = has_sinks
        self.dense, self.coded = HeadPlan(dense), None if coded is None else HeadPlan(coded)
        self.vectors, self.group_size = self.D // LANES, self.dense.group_size
        self.groups = self.D // self.group_size
        self.sums = isa.sums  # that are computed at once
        self.queries = k.stack(F32, rows * self.D)  # [D, R]
        self.query_sums = k.stack(F32, rows * self.groups)  # [D / 32, R], times -INT4_ZERO
        self.scores = k.stack(F32V, rows * RUN_PAGES * PAGE_TOKENS // LANES)  # [R, keys of a run]
        at_once = rows * self._groups_a_step  # [groups, R, 64]: the weights times the scales of a group's values
        self.weighted = k.stack(F32V, at_once * PAGE_TOKENS // LANES)
        self.section, self.whole = MixState(k, self.D, rows), MixState(k, self.D, rows)
        self.shrink = k.stack(F32, rows)
        self.lows, self.highs = k.stack(I64, rows), k.stack(I64, rows)  # the keys that a row sees, both included

    def start(self, words: Sequence[Value], kv_head: Value) -> None:
        """words: see TASK_WORDS."""
        k, a = self.k, self.k.arg
        self.first_token, self.first_row, rows, self.first_section, self.end_section, self.part = words
        self.rows, self.last_row, self.kv_head = rows, rows - 1, kv_head
        tokens = a.tokens.at(kv_head * a.token_stride)
        for r in range(self.R):
            token, head = self._row(r)
            position = tokens.at(token * TOKEN_BYTES + 24).load(I64, 8)
            self.highs.at(8 * r).store(position, 8)
            self.lows.at(8 * r).store(position - k.smaller(a.window - 1, position), 8)
            self._take_query(r, a.q.at((token * a.stride + head * self.D) * 4))
        self.whole.clear()
        if self.has_sinks:
            with k.when(self.part.compare("slt", 0)):
                for r in range(self.R):
                    self.whole.peaks.at(4 * r).store(a.sinks.at(self._row(r)[1] * 4).load(F32))
                    self.whole.totals.at(4 * r).store(k.constant(F32, 1))
        self.first_key, self.last_key = self.lows.load(I64, 8), self.highs.at(8 * (self.R - 1)).load(I64, 8)
        self.own_page = self.last_key / PAGE_TOKENS
        token = tokens.at(self._row(0)[0] * TOKEN_BYTES)
        self.pages, own = token.load(PTR, 8), token.at(8).load(PTR, 8)
        self.own = own.at(a.layer * token.at(16).load(I64, 8)).at(kv_head * self.dense.layout.head_bytes)

    def _take_query(self, r: int, q: Value) -> None:
        k = self.k
        for i in range(self.vectors):
            vector = q.at(64 * i).load(F32V)
            for lane in range(LANES):
                self.queries.at(4 * ((i * LANES + lane) * self.R + r)).store(k.lane(vector, lane))
        if self.coded is None or self.coded.layout.keys != "int4":
            return
        for group in range(self.groups):
            pair = q.at(128 * group).load(F32V) + q.at(128 * group + 64).load(F32V)
            self.query_sums.at(4 * (group * self.R + r)).store(cpu_math.total(k, pair) * -INT4_ZERO)

    def score(self, page: Value, at: Value) -> None:
        """scores[r, at + i] = q[r] . keys of the page's token i."""
        scores = self.scores.at(at * 4)
        for plan, head in self._each_kind(page):
            with self.k.range(self.k.i64(0), self.k.i64(PAGE_TOKENS), self._tokens_a_step) as token:
                width = plan.layout.sizes[0] // PAGE_TOKENS // self.D if plan.layout.is_dense else 1
                self._score_tokens(plan, head.at(token * width), scores.at(token * 4), head, token)

    @property
    def _tokens_a_step(self) -> int:
        return min(PAGE_TOKENS, LANES * max(1, self.sums // self.R))

    @property
    def _row_blocks(self) -> list[range]:
        """Rows of which as many are computed at once as there are sums."""
        return [range(first, min(first + self.sums, self.R)) for first in range(0, self.R, self.sums)]

    def _score_tokens(self, plan: HeadPlan, columns: Value, scores: Value, head: Value, token: Value) -> None:
        k = self.k
        with k.range(k.i64(0), k.i64(self.groups)) as group:
            for rows in self._row_blocks:
                self._score_group(plan, columns, scores, head, token, group, rows)

    def _score_group(
        self, plan: HeadPlan, columns: Value, scores: Value, head: Value, token: Value, group: Value, rows: range
    ) -> None:
        k, wide = self.k, self._tokens_a_step // LANES
        coding = plan.layout.keys
        step = self.group_size // 2 if coding == "int4" else self.group_size
        sums = {}
        for r, n in [(r, n) for r in rows for n in range(wide)]:
            first = k.f32v(0)
            if coding == "int4":
                first = self.query_sums.at(group * (4 * self.R)).at(4 * r).load(F32).splat()
            sums[r, n] = k.variable(first)
        values, steps = head.at(plan.offsets[2]), self.groups * step * (PAGE_TOKENS // self._tokens_a_step)
        with k.range(k.i64(0), k.i64(step)) as i:
            if rows.start == 0:
                done = (token / self._tokens_a_step * self.groups + group) * step + i
                self._prefetch(values, sum(plan.layout.sizes[2:]), done, 1, steps)
            for further, vectors in plan.keys(columns, group * self.group_size + i, wide * LANES):
                queries = self.queries.at((group * self.group_size + i + further) * (4 * self.R))
                for r in rows:
                    query = queries.at(4 * r).load(F32).splat()
                    for n in range(wide):
                        sums[r, n].set(k.fma(vectors[n], query, sums[r, n].get()))
        is_first = group.compare("eq", 0)
        for n in range(wide):
            scale = None
            if coding != "dense":
                scale = cpu_kv.scales(head.at(plan.offsets[1] + LANES * n).at(group * PAGE_TOKENS).at(token))
            for r in rows:
                place = scores.at(4 * (r * RUN_PAGES * PAGE_TOKENS + n * LANES))
                before = is_first.choose(k.f32v(0), place.load(F32V, 64))
                total = sums[r, n].get()
                place.store(total + before if scale is None else k.fma(total, scale, before), 64)

    def soften(self, run_page: Value, first_page: Value, end_page: Value) -> None:
        """scores -> exp(score - peak); what a row must not see becomes 0."""
        k, state = self.k, self.section
        begin, end = (first_page - run_page) * PAGE_TOKENS, (end_page - run_page) * PAGE_TOKENS
        with k.range(k.i64(0), k.i64(self.R)) as r:
            row = self.scores.at(r * (4 * RUN_PAGES * PAGE_TOKENS))
            low = (self.lows.at(r * 8).load(I64, 8) - run_page * PAGE_TOKENS).convert("trunc", I32).splat()
            high = (self.highs.at(r * 8).load(I64, 8) - run_page * PAGE_TOKENS).convert("trunc", I32).splat()
            before = state.peaks.at(r * 4).load(F32)
            peaks = k.variable(before.splat())

            def seen(i: Value) -> Value:
                key = k.lane_numbers() + i.convert("trunc", I32).splat()
                return key.compare("sge", low) & key.compare("sle", high)

            with k.range(begin, end, LANES) as i:
                score = row.at(i * 4).load(F32V, 64)
                if self.has_softcap:
                    cap = k.arg.softcap.convert("trunc", I32).convert("bitcast", F32).splat()
                    score = cap * cpu_math.tanh(k, score / cap)
                    row.at(i * 4).store(score, 64)
                peaks.set(k.larger(seen(i).choose(score, k.f32v(NOTHING)), peaks.get()))
            peak = cpu_math.largest(k, peaks.get())
            totals = k.variable(k.f32v(0))
            with k.range(begin, end, LANES) as i:
                weight = cpu_math.exp(k, row.at(i * 4).load(F32V, 64) - peak.splat())
                weight = seen(i).choose(weight, k.f32v(0))
                row.at(i * 4).store(weight, 64)
                totals.add(weight)
            shrink = k.lane(cpu_math.exp(k, (before - peak).splat()), 0)
            total = k.fma(state.totals.at(r * 4).load(F32), shrink, cpu_math.total(k, totals.get()))
            state.peaks.at(r * 4).store(peak)
            state.totals.at(r * 4).store(total)
            for n in range(self.vectors):
                mixed = state.mixed.at(r * (64 * self.vectors)).at(64 * n)
                mixed.store(mixed.load(F32V, 64) * shrink.splat(), 64)

    def mix(self, page: Value, at: Value) -> None:
        """mixed[r] += sum of weights[r, at + i] * values of the page's token i."""
        k = self.k
        for plan, head in self._each_kind(page):
            # Beyond the last key a page may hold anything, a NaN too.
            count = k.smaller(k.i64(PAGE_TOKENS), self.last_key + 1 - page * PAGE_TOKENS)
            later = k.smaller(page + RUN_PAGES, self.own_page)
            keys = self._head_of(plan, self.pages.at(later * 8).load(PTR, 8))
            with k.range(k.i64(0), k.i64(self.groups), self._groups_a_step) as group:
                self._mix_groups(plan, head, [group + n for n in range(self._groups_a_step)], at, count, keys)

    @property
    def _parts(self) -> int:
        """Return how many vectors the features of a group are."""
        return self.group_size // LANES

    @property
    def _groups_a_step(self) -> int:
        """Return how many groups' sums fit into registers."""
        fit = max(1, min(self.groups, self.sums // self._parts // self.R))
        return next(n for n in range(fit, 0, -1) if self.groups % n == 0)

    def _mix_groups(
        self, plan: HeadPlan, head: Value, groups: list[Value], at: Value, count: Value, keys: Value
    ) -> None:
        weighted = [(group, self._weighted(plan, head, group, at, n)) for n, group in enumerate(groups)]
        parts_at_once = min(self._parts, max(1, self.sums // self.R))
        for first in range(0, self._parts, parts_at_once):
            parts = range(first, min(first + parts_at_once, self._parts))
            for rows in self._row_blocks:
                fetched = keys if parts.start == rows.start == 0 else None
                self._mix_parts(plan, head.at(plan.offsets[2]), weighted, count, fetched, rows, parts)

    def _mix_parts(
        self,
        plan: HeadPlan,
        values: Value,
        weighted: list[tuple[Value, Value]],
        count: Value,
        keys: Value | None,
        rows: range,
        parts: range,
    ) -> None:
        """weighted: groups, and where their values' weights are. keys: of the next run, to be fetched meanwhile."""
        k = self.k
        stride = PAGE_TOKENS * (RUN_PAGES if plan.layout.values == "dense" else 1)
        places = {
            (r, n, part): self._mixed(r, group, part)
            for r in rows
            for n, (group, _) in enumerate(weighted)
            for part in parts
        }
        sums = {key: k.variable(place.load(F32V, 64)) for key, place in places.items()}
        with k.range(k.i64(0), count) as i:
            token = values.at(i * plan.token_value_bytes)
            if keys is not None:
                done = weighted[0][0] * PAGE_TOKENS + i * len(weighted)
                self._prefetch(keys, sum(plan.layout.sizes[:2]), done, len(weighted), self.groups * PAGE_TOKENS)
            for n, (group, weights) in enumerate(weighted):
                vectors = plan.values(token, group)
                for r in rows:
                    weight = weights.at(4 * r * stride).at(i * 4).load(F32).splat()
                    for part in parts:
                        total = sums[r, n, part]
                        total.set(k.fma(weight, vectors[part], total.get()))
        for key, place in places.items():
            place.store(sums[key].get(), 64)

    def _weighted(self, plan: HeadPlan, head: Value, group: Value, at: Value, n: int) -> Value:
        """Return the place of the weights by which the codes of a group's values are multiplied: [R, keys]."""
        weights = self.scores.at(at * 4)
        if plan.layout.values == "dense":
            return weights
        k, scaled = self.k, self.weighted.at(4 * n * self.R * PAGE_TOKENS)
        scales = head.at(plan.offsets[3]).at(group * PAGE_TOKENS)
        with k.range(k.i64(0), k.i64(PAGE_TOKENS), LANES) as i:
            scale = cpu_kv.scales(scales.at(i))
            for r in range(self.R):
                weight = weights.at(4 * r * RUN_PAGES * PAGE_TOKENS).at(i * 4).load(F32V, 64)
                scaled.at(4 * r * PAGE_TOKENS).at(i * 4).store(weight * scale, 64)
        return scaled

    def finish(self) -> None:
        """The rows' mixes to `out`, or to `parts` where other tasks have more of their keys."""
        k, a, state = self.k, self.k.arg, self.whole
        is_whole = self.part.compare("slt", 0)
        for r in range(self.R):
            token, head = self._row(r)
            peak, total = state.peaks.at(4 * r).load(F32), state.totals.at(4 * r).load(F32)
            mixed = state.mixed.at(64 * r * self.vectors)
            with k.when(is_whole):
                out = a.out.at(((token * a.kv_heads * a.group) + head) * (self.D * 4))
                write_row(k, self.vectors, mixed, total, out, is_rotated=self.coded is not None)
            with k.when((k.i64(r).compare("ult", self.rows)) & self.part.compare("sge", 0)):
                row = self.kv_head * a.shape.at(8).load(I64, 8) + self.part + r
                part = a.parts.at(row * (4 * part_floats(self.D)))
                write_part(self.vectors, mixed, peak, total, part)

    def _each_kind(self, page: Value) -> Iterator[tuple[HeadPlan, Value]]:
        """Yield once for each kind of page that this one may be, with the address of its head: the body is written
        down for each."""
        k, address = self.k, self.pages.at(page * 8).load(PTR, 8)
        own = page.compare("eq", self.own_page)
        dense = own.choose(self.own, self._head_of(self.dense, address))
        if self.coded is None:
            yield self.dense, dense
            return
        is_dense = own | page.compare("eq", 0)
        with k.when(is_dense):
            yield self.dense, dense
        with k.when(is_dense ^ True):
            yield self.coded, self._head_of(self.coded, address)

    def _prefetch(self, begin: Value, num_bytes: int, done: Value, now: int, steps: int) -> None:
        """The share of these bytes that `now` of `steps` steps have: values are fetched while scores are computed, the
        next run's keys while values are mixed."""
        at = begin.at(done * num_bytes / steps)
        for offset in range(0, -(-num_bytes * now // steps), 64):
            self.k.prefetch(at.at(offset))

    def _head_of(self, plan: HeadPlan, page: Value) -> Value:
        """A pointer to this layer's and head's part of a page."""
        return page.at((self.k.arg.layer * self.k.arg.kv_heads + self.kv_head) * plan.layout.head_bytes)

    def _mixed(self, r: int, group: Value, part: int) -> Value:
        return self.section.mixed.at(64 * (r * self.vectors + part)).at(group * (4 * self.group_size))

    def _row(self, r: int) -> tuple[Value, Value]:
        """Token and query head of row r; where the task has fewer rows, its last one again."""
        k, a = self.k, self.k.arg
        row = self.first_row + k.smaller(k.i64(r), self.last_row)
        return self.first_token + row / a.group, self.kv_head * a.group + row % a.group


def combine_source(head_dim: int, *, is_rotated: bool, has_sinks: bool) -> Kernel:
    """Rows whose sections several tasks have attended to: parts -> out.

    merges: int64 [rows, 5], see MERGE_WORDS; parts, out, sinks: as in `attention_source`; shape: a pointer to {rows,
    parts}.
    """
    k = Kernel("combine", "parts out merges sinks shape | kv_heads group")
    a, vectors = k.arg, head_dim // LANES
    peak, total, mixed = k.stack(F32), k.stack(F32), k.stack(F32V, vectors)
    begin, end = k.share(a.shape.load(I64, 8) * a.kv_heads)
    with k.range(begin, end) as item:
        kv_head, row = item % a.kv_heads, a.merges.at(item / a.kv_heads * (8 * len(MERGE_WORDS)))
        token, head, first, step, count = (row.at(8 * n).load(I64, 8) for n in range(len(MERGE_WORDS)))
        sink = a.sinks.at((kv_head * a.group + head) * 4).load(F32) if has_sinks else k.constant(F32, NOTHING)
        peak.store(sink)
        total.store(k.constant(F32, 1 if has_sinks else 0))
        for i in range(vectors):
            mixed.at(64 * i).store(k.f32v(0), 64)
        with k.range(k.i64(0), count) as section:
            number = kv_head * a.shape.at(8).load(I64, 8) + first + section * step
            part = a.parts.at(number * (4 * part_floats(head_dim)))
            sums = part.at(64 * vectors)
            merge_row(k, vectors, (peak, total, mixed), sums.load(F32), sums.at(4).load(F32), part)
        out = a.out.at(((token * a.kv_heads + kv_head) * a.group + head) * (head_dim * 4))
        write_row(k, vectors, mixed, total.load(F32), out, is_rotated=is_rotated)
    return k


def write_row(k: Kernel, vectors: int, mixed: Value, total: Value, out: Value, *, is_rotated: bool) -> None:
    """out = mixed / total, with the values' rotation undone."""
    inverse = (k.constant(F32, 1.0) / total).splat()
    row = [mixed.at(64 * i).load(F32V) * inverse for i in range(vectors)]
    for i, vector in enumerate(cpu_kv.rotated(k, row) if is_rotated else row):
        out.at(64 * i).store(vector)


def write_part(vectors: int, mixed: Value, peak: Value, total: Value, part: Value) -> None:
    """Write a row's share of the keys for `combine_source`: see `part_floats`."""
    for i in range(vectors):
        part.at(64 * i).store(mixed.at(64 * i).load(F32V, 64))
    part.at(64 * vectors).store(peak)
    part.at(64 * vectors + 4).store(total)


@cache
def attention(
    isa: Isa, dense: PageLayout, coded: PageLayout | None, rows: int, *, has_softcap: bool, has_sinks: bool = False
) -> Native:
    source = attention_source(isa, dense, coded, rows, has_softcap=has_softcap, has_sinks=has_sinks)
    return compile_kernel(source, isa)


@cache
def combine(isa: Isa, head_dim: int, *, is_rotated: bool, has_sinks: bool = False) -> Native:
    return compile_kernel(combine_source(head_dim, is_rotated=is_rotated, has_sinks=has_sinks), isa)
