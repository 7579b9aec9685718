"""Multi-head latent attention over coded KV pages by products of bytes: what `cpu_latent` computes in fp32.

A row is one query head of one token. Its query is INT8, one scale for what meets the latents and one for what meets the
shared key; so are a token's codes, so that a score is two whole numbers and their scales. Weights become bytes in runs
of RUN_PAGES, times the scales of the latents that they multiply, and their largest 255. Pages are read as they are; of
INT4 ones twice a code less 15 is a byte. Products of weights need four tokens side by side, not four features: a run's
latents are turned round once a task, on their way through the caches.

Where a CPU has tiles (AMX), one instruction multiplies 16 rows with 16 tokens or features, 64 bytes each. It gives the
same whole numbers as dot products of four bytes, and so the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from localllm.kernels import cpu_kv, cpu_math
from localllm.kernels.cpu_attention import NOTHING, SECTION_PAGES, MixState, part_floats, write_row
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, PTR, Kernel, Value, Variable, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_matmul import SIGN_BITS
from localllm.kernels.cpu_quantize import int8_scales
from localllm.kernels.cpu_rope import TOKEN_BYTES
from localllm.kernels.cpu_tiles import Tiles
from localllm.kernels.kv_page import LatentLayout
from localllm.kernels.sizes import GROUP, PAGE_TOKENS, TASK_WORDS

RUN_PAGES = 4  # whose weights share a scale, and whose products are added up before they become floats
BLOCK_BYTES = 64  # of a row that one product of tiles takes
RUN_TOKENS = RUN_PAGES * PAGE_TOKENS
NIBBLES = 0x0F0F0F0F


def attention_source(isa: Isa, own: LatentLayout, coded: LatentLayout, rows: int, *, has_tiles: bool) -> Kernel:
    """Words, rows: as `cpu_latent.attention_source`. own: of the page with a token's own position, and of a sequence's
    first; INT8."""
    k = Kernel("latent_attention", "absorbed turning out tasks tokens parts shape | group stride layer window scale")
    a = k.arg
    task = _Task(k, isa, own, coded, rows, Tiles(k) if has_tiles else None)
    with task.tiles_set_up(), k.range(k.i64(0), (a.shape.load(I64, 8) + k.threads - 1 - k.thread) / k.threads) as turn:
        # Dealt out one by one: the later a token, the more keys it sees.
        task.start(a.tasks.at((turn * k.threads + k.thread) * (8 * len(TASK_WORDS))))
        with k.range(task.first_section, task.end_section) as section:
            task.section.clear()
            with task.runs(section) as (first_page, end_page, run_page):
                with k.range(first_page, end_page) as page:
                    task.score(page, page - run_page)
                task.soften(run_page, first_page, end_page)
                task.mix(first_page - run_page, end_page - run_page)
            task.whole.merge(task.section)
        task.finish()
    return k


class _Task:
    """The rows of one task, and the stages that their keys go through, a run of pages at a time."""

    def __init__(
        self, k: Kernel, isa: Isa, own: LatentLayout, coded: LatentLayout, rows: int, tiles: Tiles | None
    ) -> None:
        self.k, self.isa, self.own_layout, self.coded, self.R, self.tiles = k, isa, own, coded, rows, tiles
        self.latent, self.vectors = own.latent_dim, own.latent_dim // LANES
        # Of features that share a scale, in blocks of bytes that one product of tiles takes.
        self.latent_blocks, shared_blocks = (-(-features // BLOCK_BYTES) for features in own.runs)
        self.num_blocks = self.latent_blocks + shared_blocks
        self.queries = self._bytes(self.num_blocks * rows * BLOCK_BYTES)  # [blocks, R, 64], zeros where a block ends
        self.shared = self._bytes(shared_blocks * BLOCK_BYTES * PAGE_TOKENS)
        self.query_scales, self.query_offsets = k.stack(F32, 2 * rows), k.stack(I32, 2 * rows)  # [2, R]
        self.query = k.stack(F32, own.head_dim)
        # Of an INT4 page, [D / 4, 64, 4], and a block more, which queries of zeros are multiplied with.
        self.unpacked = self._bytes((own.head_dim + BLOCK_BYTES) * PAGE_TOKENS)
        self.scales = k.stack(F32V, 2 * RUN_TOKENS // LANES)  # [2, tokens of a run]
        self.scores = k.stack(F32V, rows * RUN_TOKENS // LANES)  # [R, tokens of a run]
        self.weights = self._bytes(rows * RUN_TOKENS)  # likewise
        self.values = self._bytes(RUN_TOKENS * self.latent)  # [pages, latent / 16, 16, 16, 4]: four tokens side by side
        self.sums = k.stack(I32V, 4 * LANES)  # of up to four products
        self.shrinks, self.factors = k.stack(F32, rows), k.stack(F32, rows)
        self.section, self.whole = MixState(k, self.latent, rows), MixState(k, self.latent, rows)
        self.lows, self.highs = k.stack(I64, rows), k.stack(I64, rows)  # the keys that a row sees, both included

    def _bytes(self, count: int) -> Value:
        """A pointer to room for so many."""
        return self.k.stack(I32V, -(-count // 64))

    @contextmanager
    def tiles_set_up(self) -> Iterator[None]:
        if self.tiles is not None:
            self.tiles.configure()
            with self.k.range(self.k.i64(0), self.k.i64(self.num_blocks * self.R * BLOCK_BYTES), 64) as at:
                self.queries.at(at).store(self.k.constant(I32V, 0), 64)
        yield
        if self.tiles is not None:
            self.tiles.release()

    def start(self, task: Value) -> None:
        k, a = self.k, self.k.arg
        words = [task.at(8 * n).load(I64, 8) for n in range(len(TASK_WORDS))]
        self.first_token, self.first_row, self.rows, self.first_section, self.end_section, self.part = words
        with k.range(k.i64(0), self.rows) as r:
            token, head = self._row(r)
            position = a.tokens.at(token * TOKEN_BYTES + 24).load(I64, 8)
            self.highs.at(r * 8).store(position, 8)
            self.lows.at(r * 8).store(position - k.smaller(a.window - 1, position), 8)
            self._take_query(r, token, head)
        self.whole.clear()
        self.first_key, self.last_key = self.lows.load(I64, 8), self.highs.at((self.rows - 1) * 8).load(I64, 8)
        self.own_page = self.last_key / PAGE_TOKENS
        token = a.tokens.at(self.first_token_of_rows() * TOKEN_BYTES)
        self.pages, own = token.load(PTR, 8), token.at(8).load(PTR, 8)
        self.own = own.at(a.layer * token.at(16).load(I64, 8))

    def first_token_of_rows(self) -> Value:
        return self._row(self.k.i64(0))[0]

    def _row(self, r: Value) -> tuple[Value, Value]:
        """Token and query head of row r."""
        row = self.first_row + r
        return self.first_token + row / self.k.arg.group, row % self.k.arg.group

    def _take_query(self, r: Value, token: Value, head: Value) -> None:
        """Rotate and scale a row's query, and code its two parts."""
        k, a, shared = self.k, self.k.arg, self.own_layout.head_dim - self.latent
        scale = a.scale.convert("trunc", I32).convert("bitcast", F32).splat()
        absorbed = a.absorbed.at((token * a.group + head) * (4 * self.latent))
        turning = a.turning.at(token * a.stride * 4).at(head * (4 * shared))
        block = 0
        for run, (source, features) in enumerate(((absorbed, self.latent), (turning, shared))):
            with k.range(k.i64(0), k.i64(4 * features), 4 * GROUP) as at:
                pair = [source.at(at).at(64 * i).load(F32V) * scale for i in range(2)]
                for i, vector in enumerate(cpu_kv.rotated(k, pair)):
                    self.query.at(at).at(64 * i).store(vector, 64)
            row = [self.query.at(64 * i).load(F32V, 64) for i in range(features // LANES)]
            step, inverse = int8_scales(k, row)
            codes = [k.unary("rint", vector * inverse.splat()).convert("fptosi", I32V) for vector in row]
            total = codes[0]
            for code in codes[1:]:
                total = total + code
            self.query_scales.at(r * 4).at(4 * self.R * run).store(step)
            offset = cpu_math.total(k, total) * -128
            self.query_offsets.at(r * 4).at(4 * self.R * run).store(offset)
            for i, code in enumerate(codes):
                place = (block + LANES * i // BLOCK_BYTES) * self.R * BLOCK_BYTES + LANES * i % BLOCK_BYTES
                self.queries.at(r * BLOCK_BYTES).at(place).store(code.convert("trunc", cpu_kv.BYTES), 1)
            block = self.latent_blocks

    @contextmanager
    def runs(self, section: Value) -> Iterator[tuple[Value, Value, Value]]:
        """Yield each run of a section: its first page, its last but one that is seen, and where it begins."""
        k = self.k
        lowest, end = self.first_key / PAGE_TOKENS, self.own_page + 1
        per_section = SECTION_PAGES // RUN_PAGES
        first = k.larger(section * per_section, lowest / RUN_PAGES)
        last = k.smaller((section + 1) * per_section, (end + (RUN_PAGES - 1)) / RUN_PAGES)
        with k.range(first, last) as run:
            run_page = run * RUN_PAGES
            yield k.larger(run_page, lowest), k.smaller(run_page + RUN_PAGES, end), run_page

    def score(self, page: Value, number: Value) -> None:
        """Write the scores of a page's tokens, their scales, and its latents with four tokens side by side. number: of
        the page in its run."""
        k, layer = self.k, self.k.arg.layer
        address = self.pages.at(page * 8).load(PTR, 8)
        is_own = page.compare("eq", self.own_page)
        kept = is_own.choose(self.own, address.at(layer * self.own_layout.layer_bytes))
        if self.coded == self.own_layout:
            self._score_codes(kept, kept.at(self.own_layout.sizes[0]), number, 1.0)
            return
        is_kept = is_own | page.compare("eq", 0)
        with k.when(is_kept):
            self._score_codes(kept, kept.at(self.own_layout.sizes[0]), number, 1.0)
        with k.when(is_kept ^ True):
            part = address.at(layer * self.coded.layer_bytes)
            if self.coded.keys == "int4":
                self._unpack(part)
                self._score_codes(self.unpacked, part.at(self.coded.sizes[0]), number, 0.5)
            else:
                self._score_codes(part, part.at(self.coded.sizes[0]), number, 1.0)

    def _unpack(self, part: Value) -> None:
        """Bring an INT4 page into bytes: twice a code less 15, which is less than its nibble by no rounding."""
        k = self.k
        half, group = GROUP // 2 * PAGE_TOKENS, GROUP * PAGE_TOKENS
        with k.range(k.i64(0), k.i64(self.own_layout.head_dim // GROUP)) as n, k.range(k.i64(0), k.i64(half), 64) as at:
            words = part.at(n * half).at(at).load(I32V)
            for i, nibbles in enumerate((words & NIBBLES, (words >> 4) & NIBBLES)):
                bytes_ = (nibbles << 1).convert("bitcast", vector_of("i8", 64)) - 15
                self.unpacked.at(n * group).at(at).at(half * i).store(bytes_, 64)

    def _score_codes(self, codes: Value, scales: Value, number: Value, factor: float) -> None:
        """codes: bytes [D / 4, 64, 4]. scales: of tokens, [2, 64]; factor multiplies them."""
        k = self.k
        first = number * (4 * PAGE_TOKENS)
        for run in range(2):
            with k.range(k.i64(0), k.i64(PAGE_TOKENS), LANES) as at:
                vector = cpu_kv.scales(scales.at(PAGE_TOKENS * run).at(at)) * factor
                self.scales.at(first).at(4 * RUN_TOKENS * run).at(at * 4).store(vector, 64)
        self._turn_round(codes, self.values.at(number * (PAGE_TOKENS * self.latent)))
        parts = codes, self._padded(codes.at(self.latent * PAGE_TOKENS))
        with k.range(k.i64(0), k.i64(PAGE_TOKENS), 2 * LANES) as token:
            for run, part in enumerate(parts):
                self._multiply_queries(part.at(token * 4), run)
                self._scale_scores(first + token * 4, run)

    def _padded(self, codes: Value) -> Value:
        """The codes of the shared key, with so many behind them as make a whole block of features."""
        k, shared = self.k, self.own_layout.head_dim - self.latent
        if self.tiles is None or shared % BLOCK_BYTES == 0:
            return codes
        with k.range(k.i64(0), k.i64(shared * PAGE_TOKENS), 64) as at:
            self.shared.at(at).store(codes.at(at).load(I32V), 64)
        return self.shared

    def _multiply_queries(self, codes: Value, run: int) -> None:
        """sums = all rows' queries times the codes of 32 tokens, of one run of features."""
        k, first, features = self.k, run * self.latent_blocks, self.own_layout.runs[run]
        if self.tiles is not None:
            num_blocks = self.latent_blocks if run == 0 else self.num_blocks - self.latent_blocks
            with self._tiles_of_sums() as multiply, k.range(k.i64(0), k.i64(num_blocks)) as n:
                queries = self.queries.at((n + first) * (self.R * BLOCK_BYTES))
                multiply(queries, BLOCK_BYTES, codes.at(n * (BLOCK_BYTES * PAGE_TOKENS)), 4 * PAGE_TOKENS, 64, True)
            return
        for half, rows in itertools.product(range(2), self._row_groups):
            offsets = [self.query_offsets.at(4 * (self.R * run + r)).load(I32).splat() for r in rows]
            totals = [k.variable(offset) for offset in offsets]
            with k.range(k.i64(0), k.i64(features), 4) as at:
                unsigned = codes.at(at * PAGE_TOKENS).at(64 * half).load(I32V) ^ SIGN_BITS
                place = (at / BLOCK_BYTES + first) * (self.R * BLOCK_BYTES) + at % BLOCK_BYTES
                for total, r in zip(totals, rows, strict=True):
                    query = self.queries.at(place).at(r * BLOCK_BYTES).load(I32).splat()
                    total.set(self.isa.dot(k, total.get(), unsigned, query))
            self._store_sums(totals, rows, half)

    @property
    def _row_groups(self) -> list[range]:
        """Rows whose sums stay in registers at once."""
        at_once = self.isa.sums // 2
        return [range(first, first + at_once) for first in range(0, self.R, at_once)]

    def _store_sums(self, totals: list[Variable], rows: range, half: int) -> None:
        for total, r in zip(totals, rows, strict=True):
            self.sums.at(64 * (LANES * (r // LANES * 2 + half) + r % LANES)).store(total.get(), 64)

    def _sums_of(self, r: Value, half: int) -> Value:
        """The 16 sums of a row, as floats."""
        row = (r / LANES) * (2 * 64 * LANES) + (r % LANES) * 64
        return self.sums.at(row).at(64 * LANES * half).load(I32V, 64).convert("sitofp", F32V)

    @contextmanager
    def _tiles_of_sums(self) -> Iterator[Callable[[Value, int, Value, int, int, bool], None]]:
        """Yield what adds to sums of zero all rows, which are so many bytes from each other, times 32 columns: rows of
        16 columns so many bytes from each other, and the other 16 so many bytes behind them."""
        tiles = self.tiles
        assert tiles is not None
        each = [(v, half) for v in range(self.R // LANES) for half in range(2)]

        def multiply(
            rows: Value, stride: int, columns: Value, column_stride: int, between: int, is_signed: bool
        ) -> None:
            for v in range(self.R // LANES):
                tiles.load(tiles.ROWS[v], rows.at(v * LANES * stride), stride)
            for half in range(2):
                tiles.load(tiles.COLUMNS[half], columns.at(between * half), column_stride)
            for v, half in each:
                tiles.multiply(2 * v + half, tiles.ROWS[v], tiles.COLUMNS[half], is_signed=is_signed)

        for v, half in each:
            tiles.clear(2 * v + half)
        yield multiply
        for v, half in each:
            tiles.store(2 * v + half, self.sums.at(64 * LANES * (2 * v + half)))

    def _scale_scores(self, at: Value, run: int) -> None:
        """scores[:, at] = the sums times their scales; of the second run they are added. at: bytes."""
        k = self.k
        keys = [self.scales.at(4 * RUN_TOKENS * run).at(at).at(64 * half).load(F32V, 64) for half in range(2)]
        with k.range(k.i64(0), self.rows) as r:
            scale = self.query_scales.at(r * 4).at(4 * self.R * run).load(F32).splat()
            for half, key in enumerate(keys):
                place = self.scores.at(r * (4 * RUN_TOKENS)).at(at).at(64 * half)
                score = self._sums_of(r, half) * (scale * key)
                place.store(score if run == 0 else place.load(F32V, 64) + score, 64)

    def _turn_round(self, codes: Value, values: Value) -> None:
        """values [latent / 16, 16, 16, 4] = the codes of the latents, four tokens side by side."""
        k, quad = self.k, [4 * (i % 4) + i // 4 for i in range(16)]
        turned = [16 * lane + i for lane in range(4) for i in quad]
        with k.range(k.i64(0), k.i64(self.latent), 4) as feature:
            for tokens in range(0, PAGE_TOKENS, LANES):
                bytes_ = codes.at(feature * PAGE_TOKENS).at(4 * tokens).load(vector_of("i8", 64), 1)
                bytes_ = k.shuffle(bytes_, bytes_, turned)
                for lane in range(4):
                    part = k.shuffle(bytes_, bytes_, [*range(16 * lane, 16 * lane + 16)])
                    block = (feature / LANES) * (PAGE_TOKENS * LANES) + (feature % LANES) * 4
                    values.at(block).at((tokens // 4 + lane) * 4 * LANES).store(part, 1)

    def soften(self, run_page: Value, first_page: Value, end_page: Value) -> None:
        """scores -> weights, bytes of exp(score - peak) times the scales of latents; what a row must not see becomes
        0. shrinks, factors: what multiplies what was mixed before, and what the bytes will give."""
        k = self.k
        begin, end = (first_page - run_page) * PAGE_TOKENS, (end_page - run_page) * PAGE_TOKENS
        with k.range(k.i64(0), self.rows) as r:
            row, first = self.scores.at(r * (4 * RUN_TOKENS)), run_page * PAGE_TOKENS
            low, high = (
                (each.at(r * 8).load(I64, 8) - first).convert("trunc", I32).splat() for each in (self.lows, self.highs)
            )
            before = self.section.peaks.at(r * 4).load(F32)
            peaks, totals = k.variable(before.splat()), k.variable(k.f32v(0))
            largest, spreads = k.variable(k.f32v(0)), k.variable(k.f32v(0))

            def seen(i: Value) -> Value:
                key = k.lane_numbers() + i.convert("trunc", I32).splat()
                return key.compare("sge", low) & key.compare("sle", high)

            with k.range(begin, end, LANES) as i:
                score = seen(i).choose(row.at(i * 4).load(F32V, 64), k.f32v(NOTHING))
                peaks.set(k.larger(score, peaks.get()))
            peak = cpu_math.largest(k, peaks.get())
            with k.range(begin, end, LANES) as i:
                is_seen = seen(i)
                weight = cpu_math.exp(k, row.at(i * 4).load(F32V, 64) - peak.splat())
                weight = is_seen.choose(weight, k.f32v(0))
                totals.add(weight)
                scaled = is_seen.choose(weight * self.scales.at(i * 4).load(F32V, 64), k.f32v(0))
                largest.set(k.larger(scaled, largest.get()))
                spreads.add(scaled - scaled)
                row.at(i * 4).store(scaled, 64)
            most = cpu_math.largest(k, largest.get())
            inverse = most.compare("ogt", 1e-30).choose(k.constant(F32, 255.0) / most, k.constant(F32, 0))
            with k.range(begin, end, LANES) as i:
                code = k.unary("rint", row.at(i * 4).load(F32V, 64) * inverse.splat())
                code = code.convert("fptosi", I32V).freeze().convert("trunc", cpu_kv.BYTES)
                self.weights.at(r * RUN_TOKENS).at(i).store(code, 1)
            # Not a number where a score or a scale is none.
            self.factors.at(r * 4).store(most * (1 / 255) + cpu_math.total(k, spreads.get()))
            shrink = k.lane(cpu_math.exp(k, (before - peak).splat()), 0)
            total = self.section.totals.at(r * 4)
            total.store(k.fma(total.load(F32), shrink, cpu_math.total(k, totals.get())))
            self.section.peaks.at(r * 4).store(peak)
            self.shrinks.at(r * 4).store(shrink)

    def mix(self, first: Value, end: Value) -> None:
        """mixed = mixed * shrink + factor * (weights . latents), of a run's pages from `first` to `end`."""
        k = self.k
        with k.range(k.i64(0), k.i64(4 * self.latent), 8 * LANES) as at:
            self._multiply_weights(first, end, at)
            with k.range(k.i64(0), self.rows) as r:
                shrink, factor = (each.at(r * 4).load(F32).splat() for each in (self.shrinks, self.factors))
                for half in range(2):
                    mixed = self.section.mixed.at(r * (4 * self.latent)).at(at).at(64 * half)
                    mixed.store(k.fma(self._sums_of(r, half), factor, mixed.load(F32V, 64) * shrink), 64)

    def _multiply_weights(self, first: Value, end: Value, at: Value) -> None:
        """sums = all rows' weights times 32 features of the latents. at: bytes of four tokens' features."""
        k = self.k
        if self.tiles is not None:
            with self._tiles_of_sums() as multiply, k.range(first, end) as page:
                values = self.values.at(page * (PAGE_TOKENS * self.latent)).at(at * LANES)
                multiply(self.weights.at(page * PAGE_TOKENS), RUN_TOKENS, values, 4 * LANES, PAGE_TOKENS * LANES, False)
            return
        for half, rows in itertools.product(range(2), self._row_groups):
            totals = [k.variable(k.constant(I32V, 0)) for _ in rows]
            with k.range(first * PAGE_TOKENS, end * PAGE_TOKENS, 4) as token:
                page = (token / PAGE_TOKENS) * (PAGE_TOKENS * self.latent) + (token % PAGE_TOKENS) * LANES
                latents = self.values.at(page).at(at * LANES).at(half * PAGE_TOKENS * LANES).load(I32V)
                for total, r in zip(totals, rows, strict=True):
                    weights = self.weights.at(token).at(r * RUN_TOKENS).load(I32).splat()
                    total.set(self.isa.dot(k, total.get(), weights, latents))
            self._store_sums(totals, rows, half)

    def finish(self) -> None:
        """The rows' mixes to `out`, or to `parts` where other tasks have more of their keys."""
        k, a, state, row_bytes = self.k, self.k.arg, self.whole, 4 * self.latent
        is_whole = self.part.compare("slt", 0)
        with k.range(k.i64(0), self.rows) as r:
            token, head = self._row(r)
            peak, total = state.peaks.at(r * 4).load(F32), state.totals.at(r * 4).load(F32)
            mixed = state.mixed.at(r * row_bytes)
            with k.when(is_whole):
                out = a.out.at((token * a.group + head) * row_bytes)
                write_row(k, self.vectors, mixed, total, out, is_rotated=True)
            with k.when(is_whole ^ True):
                part = a.parts.at((self.part + r) * (4 * part_floats(self.latent)))
                with k.range(k.i64(0), k.i64(row_bytes), 64) as at:
                    part.at(at).store(mixed.at(at).load(F32V, 64))
                part.at(row_bytes).store(peak)
                part.at(row_bytes + 4).store(total)


@cache
def attention(isa: Isa, own: LatentLayout, coded: LatentLayout, rows: int, *, has_tiles: bool) -> Native:
    return compile_kernel(attention_source(isa, own, coded, rows, has_tiles=has_tiles), isa)
