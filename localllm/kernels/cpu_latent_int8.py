"""Multi-head latent attention over coded KV pages by products of bytes: what `cpu_latent` computes in fp32.

A row is one query head of one token. Its query is INT8, one scale for what meets the latents and one for what meets the
shared key; so are a token's codes, so that a score is two whole numbers and their scales. A weight, times the scale of
the latent that it multiplies, becomes 15 bits: in one byte, all that a token gets beside one that takes half of the
attention would be rounded away. Pages are read as they are; of INT4 ones twice a code less 15 is a byte. Products of
weights need tokens side by side, not features: latents are turned round on their way, 16 features of a run of pages at
a time.

Where a CPU has tiles (AMX), one instruction multiplies 16 rows with 16 tokens or features, 64 bytes each; a weight is
two bytes there. Elsewhere weights and latents are multiplied as words: as many products an instruction as of two bytes
each, and half the sums. Both give the same whole numbers, and so the same bits.
"""

from __future__ import annotations

import math
from functools import cache

from localllm.kernels import cpu_kv, cpu_math
from localllm.kernels.cpu_amx import AmxTiles
from localllm.kernels.cpu_attention import (
    NOTHING,
    RUN_PAGES,
    SECTION_PAGES,
    MixState,
    part_floats,
    runs,
    write_part,
    write_row,
)
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, PTR, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_matmul import SIGN_BITS
from localllm.kernels.cpu_quantize import int8_scales
from localllm.kernels.cpu_rope import TOKEN_BYTES
from localllm.kernels.kv_page import LatentLayout
from localllm.kernels.sizes import GROUP, PAGE_TOKENS, TASK_WORDS

RUN_TOKENS = RUN_PAGES * PAGE_TOKENS  # whose weights share a peak, and whose products are added up as whole numbers
STEP_TOKENS = 2 * LANES  # that all rows' queries are multiplied with at once
BLOCK_BYTES = 64  # of a row that one product of AMX tiles takes
NIBBLES = 0x0F0F0F0F
WORDS = vector_of("i16")
MOST_WEIGHT = 32767.0  # so that the products of a run fit into 32 bits
# The bits of a float, as a number, are its logarithm but for 0.086 at most: what makes them an upper bound of it.
LOG_STEP = math.log(2) / (1 << 23)
LOG_BIAS = (0.0861 - 127) * math.log(2)


def attention_source(isa: Isa, own: LatentLayout, coded: LatentLayout, rows: int, *, has_amx: bool) -> Kernel:
    """Words, rows: as `cpu_latent.attention_source`. own, coded: see `LatentLayout`."""
    k = Kernel("latent_attention", "absorbed turning out tasks tokens parts shape | group stride layer window scale")
    a = k.arg
    task = _Task(k, isa, own, coded, rows, AmxTiles(k) if has_amx else None)
    with k.range(k.i64(0), (a.shape.load(I64, 8) + k.threads - 1 - k.thread) / k.threads) as turn:
        # Dealt out one by one: the later a token, the more keys it sees.
        task.start(a.tasks.at((turn * k.threads + k.thread) * (8 * len(TASK_WORDS))))
        with k.range(task.first_section, task.end_section) as section:
            task.section.clear()
            with runs(k, section, task.first_key, task.own_page) as (first_page, end_page, run_page):
                task.forget_scores()
                with k.range(first_page, end_page) as page:
                    task.score(page, page - run_page)
                task.soften(first_page - run_page, end_page - run_page)
                task.mix(first_page - run_page, end_page - run_page)
            task.whole.merge(task.section)
        task.finish()
    if task.amx is not None:
        task.amx.release()
    return k


class _Task:
    """The rows of one task, and the stages that their keys go through, a run of pages at a time."""

    def __init__(
        self, k: Kernel, isa: Isa, own: LatentLayout, coded: LatentLayout, rows: int, amx: AmxTiles | None
    ) -> None:
        self.k, self.isa, self.own_layout, self.coded, self.R, self.amx = k, isa, own, coded, rows, amx
        self.latent, self.vectors = own.latent_dim, own.latent_dim // LANES
        self.row_vectors = -(-rows // LANES)
        padded = self.row_vectors * LANES
        # Of features that share a scale, in blocks of bytes that one product of AMX tiles takes.
        self.latent_blocks, shared_blocks = (-(-features // BLOCK_BYTES) for features in own.runs)
        self.num_blocks = self.latent_blocks + shared_blocks
        self.queries = self._bytes(self.num_blocks * padded * BLOCK_BYTES)  # [blocks, R, 64], zeros where a block ends
        self.query_block_bytes = padded * BLOCK_BYTES
        self.shared = self._bytes(shared_blocks * BLOCK_BYTES * PAGE_TOKENS)
        self.query_scales, self.query_offsets = k.stack(F32, 2 * rows), k.stack(I32, 2 * rows)  # [2, R]
        self.query = k.stack(F32, own.head_dim)
        self.codes = k.stack(PTR, RUN_PAGES)  # of each page of a run, bytes [D / 4, 64, 4]
        self.later = k.stack(PTR, RUN_PAGES)  # the pages that will be read in their places
        # Of a later page, what is fetched while scores are computed, the rest while values are mixed.
        self.first_bytes = coded.layer_bytes // 128 * 64
        self.unpacked_bytes = own.head_dim * PAGE_TOKENS  # of an INT4 page
        self.unpacked = self._bytes(RUN_PAGES * self.unpacked_bytes if coded.keys == "int4" else 0)
        self.scales = k.stack(F32V, 2 * PAGE_TOKENS // LANES)  # [2, tokens of a page]
        self.bounds = k.stack(F32V, PAGE_TOKENS // LANES)  # of the logarithms of the latents' scales
        self.steps = k.stack(F32V, RUN_TOKENS // LANES)  # what makes a weight a whole number
        self.score_sums = k.stack(I32V, 4 * padded * STEP_TOKENS // LANES)  # [2 runs, 2 halves, R, 32]
        self.scores = k.stack(F32V, rows * RUN_TOKENS // LANES)  # [R, tokens of a run]
        self.highest = k.stack(F32V, rows)  # of the scores that a lane has had in this run, and their bounds
        # Words [R, tokens of a run]; for tiles bytes [R, 2, tokens of a run], the high one first.
        self.weights = self._bytes(2 * padded * RUN_TOKENS)
        # Of two steps: words [2, tokens / 2, 16 features, 2]; bytes [2, tokens / 4, 16 features, 4].
        self.value_bytes = (2 if amx is None else 1) * RUN_TOKENS * LANES
        self.values = self._bytes(2 * self.value_bytes)
        self.mix_sums = k.stack(I32V, 2 * 2 * padded if amx is not None else 0)  # [2, R, 2, 16]
        # Of each row in a run: its peak, the sum of its weights, and what multiplies the mix so far and its products.
        self.peaks, self.totals, self.shrinks, self.factors = (k.stack(F32V, self.row_vectors) for _ in range(4))
        self.section, self.whole = MixState(k, self.latent, rows), MixState(k, self.latent, rows)
        self.lows, self.highs = k.stack(I64, rows), k.stack(I64, rows)  # the keys that a row sees, both included
        with k.range(k.i64(0), k.i64(self.num_blocks * self.query_block_bytes), 64) as at:
            self.queries.at(at).store(k.constant(I32V, 0), 64)

    def _bytes(self, count: int) -> Value:
        """A pointer to room for so many."""
        return self.k.stack(I32V, -(-count // 64))

    def start(self, task: Value) -> None:
        k, a = self.k, self.k.arg
        words = [task.at(8 * n).load(I64, 8) for n in range(len(TASK_WORDS))]
        self.first_token, self.first_row, self.rows, self.first_section, self.end_section, self.part = words
        if self.amx is not None:
            self.amx.configure(self._second_rows())
        with k.range(k.i64(0), self.rows) as r:
            token, head = self._row(r)
            position = a.tokens.at(token * TOKEN_BYTES + 24).load(I64, 8)
            self.highs.at(r * 8).store(position, 8)
            self.lows.at(r * 8).store(position - k.smaller(a.window - 1, position), 8)
            self._take_query(r, token, head)
        self.whole.clear()
        last = (self.rows - 1) * 8
        self.first_key, last_low = self.lows.load(I64, 8), self.lows.at(last).load(I64, 8)
        first_high, self.last_key = self.highs.load(I64, 8), self.highs.at(last).load(I64, 8)
        # Pages of which all rows see all: the first of them, and the one behind the last.
        self.whole_from, self.whole_to = (last_low + (PAGE_TOKENS - 1)) / PAGE_TOKENS, (first_high + 1) / PAGE_TOKENS
        self.own_page = self.last_key / PAGE_TOKENS
        token = a.tokens.at(self._row(k.i64(0))[0] * TOKEN_BYTES)
        self.pages, own = token.load(PTR, 8), token.at(8).load(PTR, 8)
        self.own = own.at(a.layer * token.at(16).load(I64, 8))

    def _second_rows(self) -> Value:
        """The rows of the second tiles: of queries those beyond 16, of weights, two for a row, those beyond 32."""
        k = self.k
        queries, weights = self.rows - LANES, self.rows * 2 - 2 * LANES
        most = weights.compare("sgt", queries).choose(weights, queries)
        most = most.compare("sgt", 1).choose(most, k.i64(1))
        return k.smaller(most, k.i64(LANES))

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
                place = (block + LANES * i // BLOCK_BYTES) * self.query_block_bytes + LANES * i % BLOCK_BYTES
                self.queries.at(r * BLOCK_BYTES).at(place).store(code.convert("trunc", cpu_kv.BYTES), 1)
            block = self.latent_blocks

    def forget_scores(self) -> None:
        """Begin a run."""
        with self.k.range(self.k.i64(0), self.rows) as r:
            self.highest.at(r * 64).store(self.k.f32v(NOTHING), 64)

    def score(self, page: Value, number: Value) -> None:
        """Write the scores of a page's tokens. number: of the page in its run."""
        k, layer = self.k, self.k.arg.layer
        address = self.pages.at(page * 8).load(PTR, 8)
        is_own = page.compare("eq", self.own_page)
        kept = is_own.choose(self.own, address.at(layer * self.own_layout.layer_bytes))
        if self.coded == self.own_layout:
            self._score_codes(kept, kept.at(self.own_layout.sizes[0]), page, number, 1.0)
            return
        is_kept = is_own | page.compare("eq", 0)
        with k.when(is_kept):
            self._score_codes(kept, kept.at(self.own_layout.sizes[0]), page, number, 1.0)
        with k.when(is_kept ^ True):
            part = address.at(layer * self.coded.layer_bytes)
            scales = part.at(self.coded.sizes[0])
            if self.coded.keys == "int4":
                unpacked = self.unpacked.at(number * self.unpacked_bytes)
                self._unpack(part, unpacked)
                self._score_codes(unpacked, scales, page, number, 0.5)
            else:
                self._score_codes(part, scales, page, number, 1.0)

    def _unpack(self, part: Value, unpacked: Value) -> None:
        """Bring an INT4 page into bytes: twice a code less 15, which is less than its nibble by no rounding."""
        k = self.k
        half, group = GROUP // 2 * PAGE_TOKENS, GROUP * PAGE_TOKENS
        with k.range(k.i64(0), k.i64(self.own_layout.head_dim // GROUP)) as n, k.range(k.i64(0), k.i64(half), 64) as at:
            words = part.at(n * half).at(at).load(I32V)
            for i, nibbles in enumerate((words & NIBBLES, (words >> 4) & NIBBLES)):
                bytes_ = (nibbles << 1).convert("bitcast", vector_of("i8", 64)) - 15
                unpacked.at(n * group).at(at).at(half * i).store(bytes_, 64)

    def _score_codes(self, codes: Value, scales: Value, page: Value, number: Value, factor: float) -> None:
        """codes: bytes [D / 4, 64, 4]. scales: of tokens, [2, 64]; factor multiplies them."""
        k = self.k
        self.codes.at(number * 8).store(codes, 8)
        first = number * (4 * PAGE_TOKENS)
        self._take_scales(scales, first, factor)
        parts = codes, self._padded(codes.at(self.latent * PAGE_TOKENS))
        is_whole = page.compare("uge", self.whole_from) & page.compare("ult", self.whole_to)
        later = self._later(page)
        self.later.at(number * 8).store(later, 8)
        for run, part in enumerate(parts):
            self._multiply_queries(part, run, later)
        with k.when(is_whole):
            self._scale_scores(first)
        with k.when(is_whole ^ True):
            self._scale_scores(first, page * PAGE_TOKENS)

    def _later(self, page: Value) -> Value:
        """The page that this thread will read a run after this one: sections of a long sequence are dealt out."""
        k = self.k
        later, end = page + RUN_PAGES, self.end_section * SECTION_PAGES
        skipped = (self.end_section - self.first_section) * SECTION_PAGES * (k.threads - 1)
        later = later.compare("ult", end).choose(later, later + skipped)
        address: Value = self.pages.at(k.smaller(later, self.own_page) * 8).load(PTR, 8)
        return address.at(k.arg.layer * self.coded.layer_bytes)

    def _fetch(self, part: Value, step: Value, steps: int, count: int) -> None:
        """Fetch what one of these steps has of a part of so many bytes."""
        lines = -(-count // (64 * steps))
        for line in range(lines):
            self.k.prefetch(part.at(64 * line).at(step * (64 * lines)), 2)

    def _take_scales(self, scales: Value, first: Value, factor: float) -> None:
        """Read the scales of a page. first: of its tokens in the run, in bytes of floats."""
        k = self.k
        for run in range(2):
            with k.range(k.i64(0), k.i64(PAGE_TOKENS), LANES) as at:
                vector = cpu_kv.scales(scales.at(PAGE_TOKENS * run).at(at)) * factor
                self.scales.at(4 * PAGE_TOKENS * run).at(at * 4).store(vector, 64)
                if run == 0:
                    bound = k.fma(
                        vector.convert("bitcast", I32V).convert("sitofp", F32V), *map(k.f32v, (LOG_STEP, LOG_BIAS))
                    )
                    self.bounds.at(at * 4).store(bound, 64)
                    # Of a token that nobody sees it may be no number.
                    self.steps.at(first).at(at * 4).store(k.larger(vector, k.f32v(0)) * MOST_WEIGHT, 64)

    def _padded(self, codes: Value) -> Value:
        """The codes of the shared key, with so many behind them as make a whole block of features."""
        k, shared = self.k, self.own_layout.head_dim - self.latent
        if self.amx is None or shared % BLOCK_BYTES == 0:
            return codes
        with k.range(k.i64(0), k.i64(shared * PAGE_TOKENS), 64) as at:
            self.shared.at(at).store(codes.at(at).load(I32V), 64)
        return self.shared

    def _sums(self, run: int, part: int) -> Value:
        return self.score_sums.at((2 * run + part) * self.row_vectors * LANES * STEP_TOKENS * 4)

    def _multiply_queries(self, page: Value, run: int, later: Value) -> None:
        """score_sums[run] = all rows' queries times the codes of a page, of one run of features."""
        first, num_blocks = run * self.latent_blocks, self.latent_blocks
        num_blocks = self.num_blocks - num_blocks if run else num_blocks
        for part in range(PAGE_TOKENS // STEP_TOKENS):
            codes, sums = page.at(4 * STEP_TOKENS * part), self._sums(run, part)
            if self.amx is not None:
                self._multiply_query_tiles(codes, first, num_blocks, sums, later, part)
                continue
            for rows in self._row_groups():
                self._multiply_query_rows(codes, run, rows, sums, later.at(self.first_bytes // 2 * part))

    def _multiply_query_rows(self, codes: Value, run: int, rows: range, sums: Value, later: Value) -> None:
        """later: what is fetched while the first rows are multiplied."""
        k, first, head_dim = self.k, run * self.latent_blocks, self.own_layout.head_dim
        offsets = [self.query_offsets.at(4 * (self.R * run + r)).load(I32).splat() for r in rows]
        totals = [[k.variable(offset) for offset in offsets] for _ in range(2)]
        with k.range(k.i64(0), k.i64(self.own_layout.runs[run]), 4) as at:
            tokens = [codes.at(at * PAGE_TOKENS).at(64 * half).load(I32V) ^ SIGN_BITS for half in range(2)]
            place = (at / BLOCK_BYTES + first) * self.query_block_bytes + at % BLOCK_BYTES
            if rows.start == 0:
                self._fetch(later, (at + run * self.latent) / 4, head_dim // 4, self.first_bytes // 2)
            for i, r in enumerate(rows):
                query = self.queries.at(place).at(r * BLOCK_BYTES).load(I32).splat()
                for each, unsigned in zip(totals, tokens, strict=True):
                    each[i].set(self.isa.dot(k, each[i].get(), unsigned, query))
        for half, each in enumerate(totals):
            for total, r in zip(each, rows, strict=True):
                sums.at(4 * STEP_TOKENS * r + 64 * half).store(total.get(), 64)

    def _row_groups(self) -> list[range]:
        """Rows that are multiplied at once with two vectors, so that a row's number is read once for both: with their
        sums in three quarters of the registers."""
        groups = -(-self.R // (3 * self.isa.sums // 4))
        each = -(-self.R // groups)
        return [range(first, min(first + each, self.R)) for first in range(0, self.R, each)]

    def _multiply_query_tiles(
        self, codes: Value, first: int, num_blocks: int, sums: Value, later: Value, part: int
    ) -> None:
        k, tiles = self.k, self.amx
        assert tiles is not None
        each = [(v, half) for v in range(self.row_vectors) for half in range(2)]
        for v, half in each:
            tiles.clear(tiles.SUMS[2 * v + half])
        with k.range(k.i64(0), k.i64(num_blocks)) as n:
            queries, columns = (
                self.queries.at((n + first) * self.query_block_bytes),
                codes.at(n * (BLOCK_BYTES * PAGE_TOKENS)),
            )
            step = n + (first + part * self.num_blocks)
            self._fetch(later, step, 2 * self.num_blocks, self.first_bytes)
            for v in range(self.row_vectors):
                tiles.load(tiles.ROWS[v], queries.at(v * LANES * BLOCK_BYTES), BLOCK_BYTES)
            for half in range(2):
                tiles.load(tiles.COLUMNS[half], columns.at(64 * half), 4 * PAGE_TOKENS)
            for v, half in each:
                tiles.multiply(tiles.SUMS[2 * v + half], tiles.ROWS[v], tiles.COLUMNS[half], is_signed=True)
        for v, half in each:
            tiles.store(tiles.SUMS[2 * v + half], sums.at(v * LANES * 4 * STEP_TOKENS + 64 * half), 4 * STEP_TOKENS)

    def _scale_scores(self, first: Value, position: Value | None = None) -> None:
        """Write the scores of a page. first: of its tokens in the run, in bytes of floats. position: of its first one,
        where not every row sees all of them."""
        k = self.k
        with k.range(k.i64(0), self.rows) as r:
            queries = [self.query_scales.at(r * 4).at(4 * self.R * run).load(F32).splat() for run in range(2)]
            highest = self.highest.at(r * 64).load(F32V, 64)
            for at in range(0, PAGE_TOKENS, LANES):
                latent, shared = (self._scaled_sums(run, r, at) for run in range(2))
                score = k.fma(shared, queries[1], latent * queries[0])
                if position is not None:
                    score = self._sees(r, position + at).choose(score, k.f32v(NOTHING))
                self.scores.at(r * (4 * RUN_TOKENS)).at(first).at(4 * at).store(score, 64)
                highest = k.larger(score + self.bounds.at(4 * at).load(F32V, 64), highest)
            self.highest.at(r * 64).store(highest, 64)

    def _scaled_sums(self, run: int, r: Value, at: int) -> Value:
        """A row's products with 16 tokens of a page, times the scales of these."""
        place = self._sums(run, at // STEP_TOKENS).at(r * (4 * STEP_TOKENS)).at(4 * (at % STEP_TOKENS))
        scales = self.scales.at(4 * (PAGE_TOKENS * run + at)).load(F32V, 64)
        return place.load(I32V, 64).convert("sitofp", F32V) * scales

    def _sees(self, r: Value, position: Value) -> Value:
        """Which of 16 tokens, from this position on, a row sees."""
        key = self.k.lane_numbers() + position.convert("trunc", I32).splat()
        low, high = (each.at(r * 8).load(I64, 8).convert("trunc", I32).splat() for each in (self.lows, self.highs))
        return key.compare("sge", low) & key.compare("sle", high)

    def soften(self, first: Value, end: Value) -> None:
        """scores -> weights, whole numbers of exp(score - peak) times the scales of latents, of a run's pages from
        `first` to `end`. As peaks are of scores and the scales' logarithms, a product is beyond 1 by the rounding of
        large scores alone."""
        k = self.k
        with k.range(k.i64(0), self.rows) as r:
            row, weights = self.scores.at(r * (4 * RUN_TOKENS)), self.weights.at(r * (2 * RUN_TOKENS))
            # A row that sees nothing of this run has scores far below this peak.
            peak = k.larger(cpu_math.largest(k, self.highest.at(r * 64).load(F32V, 64)), k.constant(F32, NOTHING / 2))
            totals = k.variable(k.f32v(0))
            with k.range(first * PAGE_TOKENS, end * PAGE_TOKENS, LANES) as i:
                weight = cpu_math.exp(k, row.at(i * 4).load(F32V, 64) - peak.splat())
                totals.add(weight)
                product = k.smaller(weight * self.steps.at(i * 4).load(F32V, 64), k.f32v(MOST_WEIGHT))
                code = k.unary("rint", product).convert("fptosi", I32V).freeze()
                if self.amx is None:
                    weights.at(i * 2).store(code.convert("trunc", WORDS), 2)
                else:
                    for byte, part in enumerate((code >> 8, code)):
                        weights.at(i).at(RUN_TOKENS * byte).store(part.convert("trunc", cpu_kv.BYTES), 1)
            self.peaks.at(r * 4).store(peak)
            self.totals.at(r * 4).store(cpu_math.total(k, totals.get()))
        self._merge_peaks()

    def _merge_peaks(self) -> None:
        """Bring a run's peaks and totals into the section's; shrinks, factors: what multiplies what was mixed before,
        and what the whole numbers will give."""
        k, section = self.k, self.section
        for v in range(self.row_vectors):
            before, new, total, others = (
                each.at(64 * v).load(F32V, 64) for each in (section.peaks, self.peaks, section.totals, self.totals)
            )
            highest = k.larger(before, new)
            shrink, grow = (cpu_math.exp(k, each - highest) for each in (before, new))
            section.peaks.at(64 * v).store(highest, 64)
            section.totals.at(64 * v).store(k.fma(total, shrink, others * grow), 64)
            self.shrinks.at(64 * v).store(shrink, 64)
            self.factors.at(64 * v).store(grow * (1 / MOST_WEIGHT), 64)

    def mix(self, first: Value, end: Value) -> None:
        """mixed = mixed * shrink + factor * (weights . latents), of a run's pages from `first` to `end`, 16 features a
        step."""
        k, steps = self.k, self.latent // LANES
        if self.amx is not None:
            self._mix_by_tiles(self.amx, first, end)
            return
        with k.range(k.i64(0), k.i64(steps), 2) as step:
            for i in range(2):
                self._turn_run(first, end, step + i, self._values(k.i64(i)))
            for rows in self._row_groups():
                self._multiply_weights(first, end, step, rows)

    def _multiply_weights(self, first: Value, end: Value, step: Value, rows: range) -> None:
        """Mix 32 features into the sums of some rows."""
        k = self.k
        totals = [[k.variable(k.constant(I32V, 0)) for _ in rows] for _ in range(2)]
        with k.range(first * PAGE_TOKENS, end * PAGE_TOKENS, 2) as token:
            latents = [self._values(k.i64(i)).at(token * (2 * LANES)).load(I32V, 64) for i in range(2)]
            for i, r in enumerate(rows):
                weights = self.weights.at(token * 2).at(r * (2 * RUN_TOKENS)).load(I32).splat()
                for each, words in zip(totals, latents, strict=True):
                    each[i].set(self.isa.dot_words(k, each[i].get(), words, weights))
        for n, each in enumerate(totals):
            for total, r in zip(each, rows, strict=True):
                self._add_products(k.i64(r), step + n, total.get().convert("sitofp", F32V))

    def _add_products(self, r: Value, step: Value, products: Value) -> None:
        shrink, factor = (each.at(r * 4).load(F32).splat() for each in (self.shrinks, self.factors))
        mixed = self.section.mixed.at(r * (4 * self.latent)).at(step * (4 * LANES))
        mixed.store(self.k.fma(products, factor, mixed.load(F32V, 64) * shrink), 64)

    def _mix_by_tiles(self, tiles: AmxTiles, first: Value, end: Value) -> None:
        """What a step multiplies was turned round in the last one, and its sums are read in the next: tiles cannot be
        read from what is still being written, and have others to wait for meanwhile."""
        k, steps = self.k, self.latent // LANES
        self._turn_run(first, end, k.i64(0), self.values)
        with k.range(k.i64(0), k.i64(steps)) as step:
            self._multiply_weight_tiles(tiles, first, end, step % 2)
            following = k.smaller(step + 1, k.i64(steps - 1))
            self._turn_run(first, end, following, self._values(following % 2))
            with k.when(step.compare("ugt", 0)):
                self._add_sums(step - 1)
        self._add_sums(k.i64(steps - 1))

    def _add_sums(self, step: Value) -> None:
        k = self.k
        sums = self._mix_sums(step % 2)
        with k.range(k.i64(0), self.rows) as r:
            high, low = (sums.at(r * 128).at(64 * i).load(I32V, 64).convert("sitofp", F32V) for i in range(2))
            self._add_products(r, step, k.fma(high, k.f32v(256), low))

    def _mix_sums(self, buffer: Value) -> Value:
        return self.mix_sums.at(buffer * (2 * self.row_vectors * LANES * 64))

    def _turn_run(self, first: Value, end: Value, step: Value, values: Value) -> None:
        width = 2 if self.amx is None else 1
        with self.k.range(first, end) as page:
            later = self.later.at(page * 8).load(PTR, 8).at(self.first_bytes)
            self._fetch(later, step, self.latent // LANES, self.coded.layer_bytes - self.first_bytes)
            codes = self.codes.at(page * 8).load(PTR, 8).at(step * (LANES * PAGE_TOKENS))
            self._turn_round(codes, values.at(page * (width * PAGE_TOKENS * LANES)))

    def _values(self, buffer: Value) -> Value:
        return self.values.at(buffer * self.value_bytes)

    def _turn_round(self, codes: Value, values: Value) -> None:
        """values = the codes of 16 features of a page, four tokens side by side, or as words two."""
        k, octets, has_words = self.k, vector_of("i8", LANES), self.amx is None
        tokens = 2 if has_words else 4
        # By four tokens, each part having four of their features.
        turned = [
            4 * token + LANES * (feature // 4) + feature % 4
            for first in range(0, 4, tokens)
            for feature in range(LANES)
            for token in range(first, first + tokens)
        ]
        with k.range(k.i64(0), k.i64(4 * PAGE_TOKENS), 64) as at:
            for place in range(0, 64, LANES):
                parts = [codes.at(at).at(4 * PAGE_TOKENS * n + place).load(octets, 1) for n in range(4)]
                low, high = (k.shuffle(a, b, list(range(2 * LANES))) for a, b in (parts[:2], parts[2:]))
                if not has_words:
                    values.at(at * 4).at(4 * place).store(k.shuffle(low, high, turned), 64)
                    continue
                for half in range(2):
                    bytes_ = k.shuffle(low, high, turned[32 * half : 32 * half + 32])
                    values.at(at * 8).at(8 * place + 64 * half).store(bytes_.convert("sext", vector_of("i16", 32)), 64)

    def _multiply_weight_tiles(self, tiles: AmxTiles, first: Value, end: Value, buffer: Value) -> None:
        """mix_sums = all rows' weights times 16 features of the latents."""
        k, values, sums = self.k, self._values(buffer), self._mix_sums(buffer)
        count = -(-2 * self.R // LANES)
        for n in range(count):
            tiles.clear(tiles.SUMS[n])
        with k.range(first, end) as page:
            tiles.load(tiles.COLUMNS[0], values.at(page * (PAGE_TOKENS * LANES)), 4 * LANES)
            for n in range(count):
                rows = tiles.ROWS[n // 2]
                tiles.load(rows, self.weights.at(page * PAGE_TOKENS).at(n * LANES * RUN_TOKENS), RUN_TOKENS)
                tiles.multiply(tiles.SUMS[n], rows, tiles.COLUMNS[0], is_signed=False)
        for n in range(count):
            tiles.store(tiles.SUMS[n], sums.at(n * LANES * 64), 64)

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
                write_part(self.vectors, mixed, peak, total, part)


@cache
def attention(isa: Isa, own: LatentLayout, coded: LatentLayout, rows: int, *, has_amx: bool) -> Native:
    return compile_kernel(attention_source(isa, own, coded, rows, has_amx=has_amx), isa)
