"""Multi-head latent attention over KV pages on the CPU (arXiv:2405.04434), as all heads share the keys.

A row is one query head of one token, brought into the space of the latents (queries "absorb" what would make keys of
them), so that a page is read once for all heads. A vector has one number of 16 rows: scores, weights and the softmax
need no sums over lanes. A page is brought into fp32 once a task, token by token; each of its numbers is multiplied with
all rows. Softmax is merged from page to page (arXiv:2205.14135) and from section to section as in `cpu_attention`, for
the same reason: a token's attention does not depend on what is computed beside it, nor on the number of threads.

`tokens`, `tasks` and `parts` are those of `cpu_attention`; the layouts `own` and `coded`: see `LatentLayout`.
"""

from __future__ import annotations

from functools import cache

import torch

from localllm.kernels import cpu_kv, cpu_math
from localllm.kernels.cpu_attention import NOTHING, SECTION_PAGES, part_floats, write_part, write_row
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, PTR, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_quantize import inverse_rms
from localllm.kernels.cpu_rope import TOKEN_BYTES, rotated_features
from localllm.kernels.kv_page import INT4_ZERO, LatentLayout
from localllm.kernels.sizes import GROUP, PAGE_TOKENS, TASK_WORDS

# Of a task: more share each number that is read, but their queries leave the caches. 20 are the heads of GLM 4.7 Flash.
ROWS = (16, 20, 24, 32)


def place_source(own: LatentLayout, coded: LatentLayout | None, rotary_dim: int, *, has_norm: bool) -> Kernel:
    """Rotate queries in place, and write latents with their keys into the pages.

    turning: fp32, of each token the features of all query heads that rotate, `stride` floats behind those of the last
    token. latents fp32 [T, latent_stride]: the latent, and the key that rotates. norm: fp32 [latent_dim]. cos, sin:
    fp32 [T, rotary_dim] from a `Rotary`; rotary_dim is 0 where nothing turns, or has done so. eps: the bits of a float.
    tokens, shape: as in `cpu_rope`. Threads share out the heads of all tokens, the key being one.
    """
    shared, latent = own.head_dim - own.latent_dim, own.latent_dim
    assert rotary_dim % (2 * LANES) == 0 == shared % LANES == latent % LANES
    k = Kernel("place_latents", "turning latents norm cos sin tokens shape | stride latent_stride heads layer eps")
    a = k.arg
    items = a.heads + 1
    begin, end = k.share(a.shape.load(I64, 8) * items)
    with k.range(begin, end) as item:
        token, head = item / items, item % items
        if rotary_dim:
            with k.when(head.compare("ult", a.heads)):
                x = a.turning.at(token * a.stride * 4).at(head * (4 * shared))
                for i, vector in enumerate(rotated_features(k, _vectors(x, shared), token, rotary_dim)):
                    x.at(64 * i).store(vector)
        with k.when(head.compare("eq", a.heads)):
            x = a.latents.at(token * a.latent_stride * 4)
            vectors, key = _vectors(x, latent), _vectors(x.at(4 * latent), shared)
            if has_norm:
                inverse = inverse_rms(k, x, k.i64(latent)).splat()
                vectors = [vector * inverse * a.norm.at(64 * i).load(F32V) for i, vector in enumerate(vectors)]
            key = rotated_features(k, key, token, rotary_dim) if rotary_dim else key
            _store(k, own, coded, a.tokens.at(token * TOKEN_BYTES), [*vectors, *key])
    return k


def _vectors(x: Value, features: int) -> list[Value]:
    return [x.at(64 * i).load(F32V) for i in range(features // LANES)]


def _store(k: Kernel, own: LatentLayout, coded: LatentLayout | None, token: Value, vectors: list[Value]) -> None:
    """Write a token's features into its own page, and into the coded one, if there is one."""
    layer = k.arg.layer
    own_page, position = token.at(8).load(PTR, 8), token.at(24).load(I64, 8)
    turned = vectors if coded is None else cpu_kv.rotated(k, vectors)
    _store_in(k, own, own_page.at(layer * token.at(16).load(I64, 8)), position % PAGE_TOKENS, turned)
    if coded is None:
        return
    with k.when(position.compare("uge", PAGE_TOKENS)):  # a sequence's first page is kept as its own
        page = token.load(PTR, 8).at(position / PAGE_TOKENS * 8).load(PTR, 8).at(layer * coded.layer_bytes)
        _store_in(k, coded, page, position % PAGE_TOKENS, turned)


def _store_in(k: Kernel, layout: LatentLayout, part: Value, slot: Value, vectors: list[Value]) -> None:
    if layout.is_dense:
        size = layout.dtype.itemsize
        row = part.at(slot * (layout.head_dim * size))
        for i, vector in enumerate(vectors):
            row.at(i * LANES * size).store(vector if size == 4 else cpu_math.to_bf16(k, vector), 2)
        return
    row, scales = part.at(slot * 4), part.at(layout.sizes[0]).at(slot)
    first = at = 0
    for run, features in enumerate(layout.runs):
        own_vectors = vectors[first : first + features // LANES]
        code, parts = cpu_kv.coded_run(k, own_vectors, layout.keys)
        scales.at(PAGE_TOKENS * run).store(code.convert("trunc", "i8"), 1)
        for bytes_ in parts:
            words = bytes_.convert("bitcast", vector_of(I32, LANES // 4))
            for n in range(LANES // 4):
                row.at(4 * PAGE_TOKENS * (at + n)).store(k.lane(words, n))
            at += LANES // 4
        first += len(own_vectors)


def attention_source(isa: Isa, own: LatentLayout, coded: LatentLayout | None, rows: int) -> Kernel:
    """absorbed fp32 [T, group * latent_dim] and turning, fp32 of `stride` floats a token: the two parts of the queries;
    out fp32 [T, group * latent_dim]. group: heads of queries. scale: the bits of a float. rows: of a task, see ROWS.
    window, parts, tasks, tokens, shape: as in `cpu_attention`.
    """
    k = Kernel("latent_attention", "absorbed turning out tasks tokens parts shape | group stride layer window scale")
    a = k.arg
    task = _Task(k, isa, own, coded, -(-rows // LANES))
    # Dealt out one by one: the later a token, the more keys it sees.
    with k.range(k.i64(0), (a.shape.load(I64, 8) + k.threads - 1 - k.thread) / k.threads) as turn:
        task.start(a.tasks.at((turn * k.threads + k.thread) * (8 * len(TASK_WORDS))))
        with k.range(task.first_section, task.end_section) as section:
            task.section.clear()
            first = k.larger(section * SECTION_PAGES, task.first_page)
            with k.range(first, k.smaller((section + 1) * SECTION_PAGES, task.own_page + 1)) as page:
                count = k.smaller(k.i64(PAGE_TOKENS), task.last_key + 1 - page * PAGE_TOKENS)
                task.unpack(page, count)
                task.score(count)
                task.soften(page, count)
                task.mix(count)
            task.whole.merge(task.section)
        task.finish()
    return k


class _State:
    """Of 16 rows a vector: the mixed latents so far, not yet divided by the sum of the weights, and the largest
    score."""

    def __init__(self, k: Kernel, latent_dim: int, vectors: int) -> None:
        self.k, self.V, self.latent_dim = k, vectors, latent_dim
        self.mixed = k.stack(F32V, latent_dim * vectors)
        self.peaks, self.totals = k.stack(F32V, vectors), k.stack(F32V, vectors)

    def clear(self) -> None:
        k = self.k
        for v in range(self.V):
            self.peaks.at(64 * v).store(k.f32v(NOTHING), 64)
            self.totals.at(64 * v).store(k.f32v(0), 64)
        with k.range(k.i64(0), k.i64(self.latent_dim * self.V)) as i:
            self.mixed.at(i * 64).store(k.f32v(0), 64)

    def merge(self, other: _State) -> None:
        """Both, as if their keys had been seen together: what `cpu_attention.merge_row` does of a row."""
        k = self.k
        shares = []
        for v in range(self.V):
            peak, total = (self.peaks.at(64 * v), other.peaks.at(64 * v)), self.totals.at(64 * v)
            before, new = (each.load(F32V, 64) for each in peak)
            highest = k.larger(before, new)
            shares.append([cpu_math.exp(k, each - highest) for each in (before, new)])
            peak[0].store(highest, 64)
            added = other.totals.at(64 * v).load(F32V, 64) * shares[v][1]
            total.store(k.fma(total.load(F32V, 64), shares[v][0], added), 64)
        with k.range(k.i64(0), k.i64(self.latent_dim)) as d:
            for v, (old, new) in enumerate(shares):
                own, others = (state.mixed.at(d * (64 * self.V)).at(64 * v) for state in (self, other))
                own.store(k.fma(own.load(F32V, 64), old, others.load(F32V, 64) * new), 64)


class _Task:
    """The rows of one task, and the stages that their keys go through, a page at a time."""

    def __init__(self, k: Kernel, isa: Isa, own: LatentLayout, coded: LatentLayout | None, vectors: int) -> None:
        self.k, self.V, self.own_layout, self.coded = k, vectors, own, coded
        self.D, self.latent = own.head_dim, own.latent_dim
        self.at_once = max(1, isa.sums // vectors)  # tokens or features, whose sums stay in registers
        self.queries = k.stack(F32V, self.D * vectors)
        self.keys = k.stack(F32, PAGE_TOKENS * self.D)
        self.scales = k.stack(F32V, 2 * PAGE_TOKENS // LANES)
        self.scores = k.stack(F32V, PAGE_TOKENS * vectors)
        self.row = k.stack(F32, self.latent)
        # The keys that a row sees, both included.
        self.lows, self.highs = k.stack(I32V, vectors), k.stack(I32V, vectors)
        self.section, self.whole = _State(k, self.latent, vectors), _State(k, self.latent, vectors)

    def start(self, task: Value) -> None:
        k, a = self.k, self.k.arg
        words = [task.at(8 * n).load(I64, 8) for n in range(len(TASK_WORDS))]
        self.first_token, self.first_row, self.rows, self.first_section, self.end_section, self.part = words
        with k.range(k.i64(0), k.i64(LANES * self.V)) as r:
            token, head = self._row(r)
            position = a.tokens.at(token * TOKEN_BYTES + 24).load(I64, 8)
            self.highs.at(r * 4).store(position.convert("trunc", I32))
            self.lows.at(r * 4).store((position - k.smaller(a.window - 1, position)).convert("trunc", I32))
            self._take_query(r, token, head)
        self.whole.clear()
        ends = k.i64(0), k.i64(LANES * self.V - 1)
        first, last = (a.tokens.at(self._row(r)[0] * TOKEN_BYTES) for r in ends)
        positions = [at.at(24).load(I64, 8) for at in (first, last)]
        self.last_key = positions[1]
        self.own_page = self.last_key / PAGE_TOKENS
        self.first_page = (positions[0] - k.smaller(a.window - 1, positions[0])) / PAGE_TOKENS
        self.pages, own = first.load(PTR, 8), first.at(8).load(PTR, 8)
        self.own = own.at(a.layer * first.at(16).load(I64, 8))

    def _row(self, r: Value) -> tuple[Value, Value]:
        """Token and query head of row r; where the task has fewer rows, its last one again."""
        row = self.first_row + self.k.smaller(r, self.rows - 1)
        return self.first_token + row / self.k.arg.group, row % self.k.arg.group

    def _take_query(self, r: Value, token: Value, head: Value) -> None:
        """Put a row's query, scaled, and rotated where pages are, into its lane."""
        k, a, shared = self.k, self.k.arg, self.D - self.latent
        scale = a.scale.convert("trunc", I32).convert("bitcast", F32).splat()
        absorbed = a.absorbed.at((token * a.group + head) * (4 * self.latent))
        turning = a.turning.at(token * a.stride * 4).at(head * (4 * shared))
        step = GROUP if self.coded is not None else LANES
        for source, features, first in ((absorbed, self.latent, 0), (turning, shared, self.latent)):
            with k.range(k.i64(0), k.i64(features), step) as at:
                vectors = [source.at(at * 4).at(64 * i).load(F32V) * scale for i in range(step // LANES)]
                vectors = vectors if self.coded is None else cpu_kv.rotated(k, vectors)
                lanes = self.queries.at(at * (64 * self.V)).at(r * 4)
                for i, vector in enumerate(vectors):
                    for lane in range(LANES):
                        place = (first + LANES * i + lane) * 64 * self.V
                        lanes.at(place).store(k.lane(vector, lane))

    def unpack(self, page: Value, count: Value) -> None:
        """Bring the first `count` tokens of a page into `keys`, fp32 [64, D]."""
        k, address = self.k, self.pages.at(page * 8).load(PTR, 8)
        is_own = page.compare("eq", self.own_page)
        kept = is_own.choose(self.own, address.at(k.arg.layer * self.own_layout.layer_bytes))
        later = self.pages.at(k.smaller(page + 1, self.own_page) * 8).load(PTR, 8)
        if self.coded is None or self.coded == self.own_layout:
            self._unpack(self.own_layout, kept, count, later)
            return
        is_kept = is_own | page.compare("eq", 0)
        with k.when(is_kept):
            self._unpack(self.own_layout, kept, count, later)
        with k.when(is_kept ^ True):
            self._unpack(self.coded, address.at(k.arg.layer * self.coded.layer_bytes), count, later)

    def _unpack(self, layout: LatentLayout, part: Value, count: Value, later: Value) -> None:
        """later: the next page, which is fetched meanwhile."""
        if layout.is_dense:
            self._unpack_dense(part, count)
        else:
            self._unpack_coded(layout, part, count, later.at(self.k.arg.layer * layout.layer_bytes))

    def _unpack_dense(self, part: Value, count: Value) -> None:
        k = self.k
        is_float = self.own_layout.dtype is torch.float32
        with k.range(k.i64(0), count * self.D, LANES) as i:
            if is_float:
                vector = part.at(i * 4).load(F32V)
            else:
                halves = part.at(i * 2).load(vector_of("i16"), 2)
                vector = (halves.convert("zext", I32V) << 16).convert("bitcast", F32V)
            self.keys.at(i * 4).store(vector)

    def _unpack_coded(self, layout: LatentLayout, part: Value, count: Value, later: Value) -> None:
        """later: the part of the next page, which is fetched meanwhile."""
        k, row_bytes = self.k, layout.sizes[0] // PAGE_TOKENS
        with k.range(k.i64(0), k.i64(2 * PAGE_TOKENS), LANES) as n:
            self.scales.at(n * 4).store(cpu_kv.scales(part.at(layout.sizes[0]).at(n)), 64)
        with k.range(k.i64(0), count) as token:
            row, target = part.at(token * 4), self.keys.at(token * (4 * self.D))
            ends = layout.latent_dim, layout.head_dim
            for run, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
                scale = self.scales.at(token * 4).at(4 * PAGE_TOKENS * run).load(F32).splat()
                with k.range(k.i64(first), k.i64(end), GROUP) as at:
                    for i, vector in enumerate(self._codes(layout, row, at)):
                        target.at(at * 4).at(64 * i).store(vector * scale)
            for line in range(0, row_bytes, 64):
                k.prefetch(later.at(token * row_bytes).at(line))

    def _codes(self, layout: LatentLayout, row: Value, at: Value) -> list[Value]:
        """The codes of a group of 32 features."""
        if layout.keys == "int8":
            return [self._bytes(row.at(at * PAGE_TOKENS), n).convert("sitofp", F32V) for n in range(2)]
        words = self._bytes(row.at(at * (PAGE_TOKENS // 2)), 0).convert("zext", I32V)
        return [part.convert("sitofp", F32V) - INT4_ZERO for part in (words & 15, words >> 4)]

    def _bytes(self, row: Value, number: int) -> Value:
        """16 bytes of a token, four of which lie side by side."""
        quads = [row.at(4 * PAGE_TOKENS * (4 * number + n)).load(vector_of("i8", 4), 1) for n in range(4)]
        low, high = self.k.shuffle(quads[0], quads[1], [*range(8)]), self.k.shuffle(quads[2], quads[3], [*range(8)])
        return self.k.shuffle(low, high, [*range(16)])

    def score(self, count: Value) -> None:
        """scores[t] = the rows' queries . key of token t. Tokens behind `count` have any."""
        k, n = self.k, self.at_once
        each = [(t, v) for t in range(n) for v in range(self.V)]
        with k.range(k.i64(0), count, n) as token:
            sums = {one: k.variable(k.f32v(0)) for one in each}
            with k.range(k.i64(0), k.i64(self.D)) as d:
                queries = [self.queries.at(d * (64 * self.V)).at(64 * v).load(F32V, 64) for v in range(self.V)]
                column = self.keys.at(token * (4 * self.D)).at(d * 4)
                keys = [column.at(4 * self.D * t).load(F32).splat() for t in range(n)]
                for t, v in each:
                    sums[t, v].set(k.fma(keys[t], queries[v], sums[t, v].get()))
            for (t, v), total in sums.items():
                self.scores.at(token * (64 * self.V)).at(64 * (t * self.V + v)).store(total.get(), 64)

    def soften(self, page: Value, count: Value) -> None:
        """scores -> exp(score - peak); what a row must not see becomes 0."""
        k, state = self.k, self.section
        first = (page * PAGE_TOKENS).convert("trunc", I32)
        for v in range(self.V):
            low, high = (each.at(64 * v).load(I32V, 64) for each in (self.lows, self.highs))
            before = state.peaks.at(64 * v).load(F32V, 64)
            peaks, totals = k.variable(before), k.variable(k.f32v(0))

            def seen(t: Value, low: Value = low, high: Value = high) -> Value:
                key = (t.convert("trunc", I32) + first).splat()
                return key.compare("sge", low) & key.compare("sle", high)

            def place(t: Value, v: int = v) -> Value:
                return self.scores.at(t * (64 * self.V)).at(64 * v)

            with k.range(k.i64(0), count) as t:
                visible = seen(t).choose(place(t).load(F32V, 64), k.f32v(NOTHING))
                peaks.set(k.larger(visible, peaks.get()))
            peak = peaks.get()
            with k.range(k.i64(0), count) as t:
                weight = seen(t).choose(cpu_math.exp(k, place(t).load(F32V, 64) - peak), k.f32v(0))
                place(t).store(weight, 64)
                totals.add(weight)
            shrink = cpu_math.exp(k, before - peak)
            total = state.totals.at(64 * v)
            total.store(k.fma(total.load(F32V, 64), shrink, totals.get()), 64)
            state.peaks.at(64 * v).store(peak, 64)
            with k.range(k.i64(0), k.i64(self.latent)) as d:
                mixed = state.mixed.at(d * (64 * self.V)).at(64 * v)
                mixed.store(mixed.load(F32V, 64) * shrink, 64)

    def mix(self, count: Value) -> None:
        """mixed += sum of weights[t] * latent of token t."""
        k, n = self.k, min(self.at_once, self.latent)
        with k.range(k.i64(0), k.i64(self.latent), n) as d:
            places = {
                (i, v): self.section.mixed.at(d * (64 * self.V)).at(64 * (i * self.V + v))
                for i in range(n)
                for v in range(self.V)
            }
            sums = {key: k.variable(place.load(F32V, 64)) for key, place in places.items()}
            with k.range(k.i64(0), count) as t:
                weights = [self.scores.at(t * (64 * self.V)).at(64 * v).load(F32V, 64) for v in range(self.V)]
                latent = self.keys.at(t * (4 * self.D)).at(d * 4)
                for i in range(n):
                    number = latent.at(4 * i).load(F32).splat()
                    for v, weight in enumerate(weights):
                        sums[i, v].set(k.fma(number, weight, sums[i, v].get()))
            for key, place in places.items():
                place.store(sums[key].get(), 64)

    def finish(self) -> None:
        """The rows' mixes to `out`, or to `parts` where other tasks have more of their keys."""
        k, a, state = self.k, self.k.arg, self.whole
        is_whole, latent = self.part.compare("slt", 0), self.latent
        with k.range(k.i64(0), self.rows) as r:
            with k.range(k.i64(0), k.i64(latent)) as d:
                self.row.at(d * 4).store(state.mixed.at(d * (64 * self.V)).at(r * 4).load(F32))
            token, head = self._row(r)
            peak, total = state.peaks.at(r * 4).load(F32), state.totals.at(r * 4).load(F32)
            with k.when(is_whole):
                out = a.out.at((token * a.group + head) * (4 * latent))
                write_row(k, latent // LANES, self.row, total, out, is_rotated=self.coded is not None)
            with k.when(is_whole ^ True):
                part = a.parts.at((self.part + r) * (4 * part_floats(latent)))
                write_part(latent // LANES, self.row, peak, total, part)


@cache
def place(isa: Isa, own: LatentLayout, coded: LatentLayout | None, rotary_dim: int, *, has_norm: bool) -> Native:
    return compile_kernel(place_source(own, coded, rotary_dim, has_norm=has_norm), isa)


@cache
def attention(isa: Isa, own: LatentLayout, coded: LatentLayout | None, rows: int) -> Native:
    return compile_kernel(attention_source(isa, own, coded, rows), isa)
