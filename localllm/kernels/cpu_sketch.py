"""Sketches of pages (see `page_choice`) on the CPU: made of the keys, and the scores of pages by them."""

from __future__ import annotations

import math
from functools import cache

from localllm.kernels import cpu_kv, cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32V, I64, LANES, PTR, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_kv import HeadPlan
from localllm.kernels.kv_page import (
    GROUP,
    INT4_ZERO,
    PAGE_TOKENS,
    SCALE_BIAS,
    SCALE_HIGH,
    SCALE_LOW,
    SCALE_SHIFT,
    PageLayout,
)
from localllm.kernels.page_choice import LEAST_UNIT, MOST_UNITS, NOISE
from localllm.kernels.sizes import SKETCH_WORDS, SketchLayout

HEADS = LANES  # of queries, whose scores are computed together
MASS_BYTES = 2 * 4 * HEADS  # of a page: of each head its mass, and the exponent of that
SCRATCH_BYTES = MASS_BYTES + 4  # and its score
_VECTORS = PAGE_TOKENS // LANES
_LOG2_E = math.log2(math.e)
_EXPONENT, _MANTISSA = 127.0, 2.0**23  # of a float: how 1 has it, and a one in it
_NOTHING = -1e30
_MOST = (_EXPONENT + 100) * _MANTISSA
_AT_ONCE = 8  # sums that do not wait for each other
_NIBBLES = GROUP // 4  # of a group
_LOW_NIBBLES = 0x0F0F0F0F


def sketch_source(layout: PageLayout) -> Kernel:
    """Make the sketches of all pages in front of `wanted` that have none.

    layout: of all pages but a sequence's first, which needs none. sequences: int64 [sequences, 5], see SKETCH_WORDS.
    shape: a pointer to {tokens, sequences}. layer: as in `attention_source`.
    """
    k = Kernel("sketch", "sequences shape | kv_heads layer")
    a, made_of = k.arg, SketchLayout(layout.head_dim)
    numbers = k.stack(F32V, GROUP * _VECTORS)
    with k.range(k.i64(0), a.shape.at(8).load(I64, 8)) as number:
        words = words_of(a.sequences, number, SKETCH_WORDS)
        pages, sketches, made = (words[name].load(PTR, 8) for name in ("pages", "sketches", "made"))
        first = k.larger(made.at(a.layer * 8).load(I64, 8), k.i64(1))
        end = k.larger(words["wanted"].load(I64, 8), first)
        begin, stop = k.share((end - first) * a.kv_heads)
        with k.range(begin, stop) as item:
            page, part = first + item / a.kv_heads, a.layer * a.kv_heads + item % a.kv_heads
            head = pages.at(page * 8).load(PTR, 8).at(part * layout.head_bytes)
            sketch = sketches.at((part * words["room"].load(I64, 8) + page) * made_of.nbytes)
            whole = layout.head_dim // GROUP
            with k.range(k.i64(0), k.i64(whole)) as group:
                _sketch_group(k, layout, head, sketch, group, GROUP, numbers)
            if layout.head_dim % GROUP:
                _sketch_group(k, layout, head, sketch, k.i64(whole), layout.head_dim % GROUP, numbers)
    return k


def _sketch_group(
    k: Kernel, layout: PageLayout, head: Value, sketch: Value, group: Value, features: int, numbers: Value
) -> None:
    """numbers: room for the group's keys, [features, 64]."""
    made_of, means = SketchLayout(layout.head_dim), k.stack(F32V, GROUP // LANES)
    with k.range(k.i64(0), k.i64(_VECTORS)) as n:
        for feature, row in enumerate(_rotated_rows(layout, head, group, features, n)):
            numbers.at(n * 64).at(feature * 4 * PAGE_TOKENS).store(row, 64)
    for first in range(0, features, LANES):
        rows = [numbers.at(4 * PAGE_TOKENS * (first + i)) for i in range(LANES)]
        sums = [_sum([row.at(64 * n).load(F32V, 64) for n in range(_VECTORS)]) for row in rows]
        mean = cpu_math.totals(k, sums) * (1 / PAGE_TOKENS)
        rounded = cpu_math.to_bf16(k, mean + (mean - mean))
        sketch.at(made_of.mean).at(group * (2 * GROUP)).at(2 * first).store(rounded, 2)
        means.at(4 * first).store(_from_bf16(rounded), 64)
    with k.range(k.i64(0), k.i64(_VECTORS)) as n:
        total, place = k.f32v(0), group * PAGE_TOKENS + n * LANES
        for first in range(0, features, 8):
            signs = k.constant(I32V, 0)
            for feature in range(first, first + 8):
                mean = means.at(4 * feature).load(F32).splat()
                beside = numbers.at(n * 64).at(feature * 4 * PAGE_TOKENS).load(F32V, 64) - mean
                bit = k.constant(I32V, 1 << (feature - first))
                signs = signs | beside.compare("olt", 0.0).choose(k.constant(I32V, 0), bit)
                total = total + k.unary("fabs", beside)
            row = sketch.at(group * (PAGE_TOKENS * GROUP // 8)).at(first // 8 * PAGE_TOKENS).at(n * LANES)
            row.store(signs.convert("trunc", cpu_kv.BYTES), 1)
        scale = k.smaller(k.larger(total * (1 / features), k.f32v(SCALE_LOW)), k.f32v(SCALE_HIGH))
        code = (scale.convert("bitcast", I32V) - SCALE_BIAS + (1 << (SCALE_SHIFT - 1))) >> SCALE_SHIFT
        sketch.at(made_of.scales).at(place).store(code.convert("trunc", cpu_kv.BYTES), 1)


def _rotated_rows(layout: PageLayout, head: Value, group: Value, features: int, n: Value) -> list[Value]:
    """Return the group's features of 16 tokens, a vector each, as coded pages have them."""
    plan, coding = HeadPlan(layout), layout.keys
    columns = head.at(n * (LANES * (layout.dtype.itemsize if layout.is_dense else 1)))
    found: dict[int, Value] = {}
    for i in range(features // 2 if coding == "int4" else features):
        for further, (vector,) in plan.keys(columns, group * GROUP + i, LANES):
            found[i + further] = vector - INT4_ZERO if coding == "int4" else vector
    rows = [found[feature] for feature in range(features)]
    if layout.is_dense:
        return _rotated(rows)
    scale = cpu_kv.scales(head.at(plan.offsets[1]).at(group * PAGE_TOKENS + n * LANES))
    return [row * scale for row in rows]


def _rotated(rows: list[Value]) -> list[Value]:
    """`cpu_kv.hadamard` of vectors that have a feature each."""
    stride = len(rows) // 2
    while stride:
        rows = [rows[i - stride] - row if i & stride else row + rows[i + stride] for i, row in enumerate(rows)]
        stride //= 2
    return [row * len(rows) ** -0.5 for row in rows]


class PageScores:
    """The scores of pages for a token and a key head, whose heads of queries are taken in turns of HEADS."""

    def __init__(self, k: Kernel, isa: Isa, head_dim: int, *, is_rotated: bool) -> None:
        """is_rotated: queries come so."""
        self.k, self.isa, self.layout, self.is_rotated = k, isa, SketchLayout(head_dim), is_rotated
        groups = self.layout.groups
        self.tables = k.stack(cpu_kv.BYTES, HEADS * groups * _NIBBLES)  # [heads, groups, nibbles, 16]
        self.missed = k.stack(F32, HEADS * groups)  # [heads, groups]: of the square of a scale
        self.queries = k.stack(F32V, head_dim)  # [features, heads], times log2(e)
        self.factors = k.stack(F32V)  # from the tables' units to the bits of a power of two
        self.unit, self.total = k.stack(F32V), k.stack(F32V)  # of each head's masses: the power, and how many there are
        self.nibbles = k.stack(I32V, groups * _NIBBLES)  # [groups, nibbles, 64 tokens]
        self.scales = k.stack(F32V, groups * _VECTORS)  # [groups, 4, every fourth token]
        self.starts = k.stack(F32V, _VECTORS)  # what takes away by what all tables have been made larger
        self.offsets = k.stack(F32V)  # of a page's mean, in such bits
        self.partial = k.stack(F32V, HEADS)

    def compute(self, q: Value, group: Value, sketches: Value, newest: Value, scratch: Value, scores: Value) -> None:
        """Write the score of each page in front of the newest full one, but the first: fp32. q: [group, D]; scratch:
        room for the masses of the pages."""
        k = self.k
        with k.range(k.i64(0), group, HEADS) as first:
            count = k.smaller(group - first, k.i64(HEADS))
            self._take(q.at(first * (4 * self.layout.head_dim)), count)
            with k.range(k.i64(1), newest) as page:
                sketch = sketches.at(page * self.layout.nbytes)
                self._weigh(sketch, count, scratch.at(page * MASS_BYTES))
            self._share_out(newest, scratch, scores, is_first=first.compare("eq", 0))

    def _take(self, q: Value, count: Value) -> None:
        k, D, groups = self.k, self.layout.head_dim, self.layout.groups
        for place, size in ((self.queries, D), (self.partial, HEADS)):
            with k.range(k.i64(0), k.i64(size)) as row:
                place.at(row * 64).store(k.f32v(0), 64)
        for place in (self.factors, self.total):
            place.store(k.f32v(0), 64)
        self.unit.store(k.f32v(_NOTHING), 64)
        own = k.stack(F32V, D // LANES)
        with k.range(k.i64(0), count) as head:
            vectors = [q.at(head * (4 * D)).at(64 * i).load(F32V) for i in range(D // LANES)]
            if not self.is_rotated:
                vectors = cpu_kv.rotated(k, vectors)
            for i, vector in enumerate(vectors):
                own.at(64 * i).store(vector, 64)
                for lane in range(LANES):
                    of_feature = self.queries.at((i * LANES + lane) * 64)
                    of_feature.at(head * 4).store(k.lane(vector, lane) * _LOG2_E)
            unit = self._take_tables(own, self.tables.at(head * (groups * _NIBBLES * LANES)))
            self.factors.at(head * 4).store(unit * (_LOG2_E * _MANTISSA))
            for number in range(groups):
                squares = [vector * vector for vector in vectors[2 * number : 2 * number + 2]]
                missed = cpu_math.total(k, _sum(squares)) * NOISE / unit
                self.missed.at((head * groups + number) * 4).store(missed)

    def _take_tables(self, own: Value, tables: Value) -> Value:
        """Write the sums of each four features of a query with all their signs, in units, and return the unit."""
        k, D = self.k, self.layout.head_dim
        highest = k.variable(k.f32v(LEAST_UNIT))
        with k.range(k.i64(0), k.i64(D), 4) as feature:
            highest.set(k.larger(self._signed_sums(own.at(feature * 4)), highest.get()))
        unit = cpu_math.largest(k, highest.get()) * (1 / MOST_UNITS)
        with k.range(k.i64(0), k.i64(D), 4) as feature:
            steps = k.unary("rint", self._signed_sums(own.at(feature * 4)) / unit.splat())
            # A NaN becomes some number, as a byte must be one: the attention is NaN then, whatever is chosen.
            limited = k.smaller(k.larger(steps, k.f32v(-MOST_UNITS)), k.f32v(MOST_UNITS)) + MOST_UNITS
            tables.at(feature * 4).store(limited.convert("fptosi", I32V).convert("trunc", cpu_kv.BYTES), 16)
        for behind in range(D // 4, self.layout.groups * _NIBBLES):
            tables.at(LANES * behind).store(k.constant(cpu_kv.BYTES, MOST_UNITS), 16)
        return unit

    def _signed_sums(self, features: Value) -> Value:
        signs = ([1.0 if lane >> bit & 1 else -1.0 for lane in range(LANES)] for bit in range(4))
        parts = [features.at(4 * bit).load(F32).splat() * self.k.f32_lanes(own) for bit, own in enumerate(signs)]
        return _sum(parts)

    def _weigh(self, sketch: Value, count: Value, masses: Value) -> None:
        """Write what a page has of each head's attention: its sum of powers of two, and the power that is their unit.

        That is the largest so far: what is a hundred powers above it counts as if it were no more."""
        k = self.k
        center, unit = self._center(sketch.at(self.layout.mean)), self.unit.load(F32V, 64)
        is_finite = (center - center).compare("ord", 0.0)
        is_first = unit.compare("oeq", _NOTHING)
        unit = (is_first & is_finite).choose(k.unary("rint", center), unit)
        self.offsets.store((center - unit + _EXPONENT) * _MANTISSA, 64)
        self._expand(sketch)
        self._estimate(count)
        rows = [self.partial.at(64 * head).load(F32V, 64) for head in range(HEADS)]
        mass = cpu_math.totals(k, rows)
        masses.store(is_finite.choose(mass, k.f32v(math.nan)), 64)
        masses.at(4 * HEADS).store(unit, 64)
        above = (mass.convert("bitcast", I32V) >> 23).convert("sitofp", F32V) - _EXPONENT
        next_unit = unit + k.larger(is_finite.choose(above, k.f32v(0)), k.f32v(0))
        total = self.total.load(F32V, 64) + is_finite.choose(mass, k.f32v(0))
        self.total.store(total * self._power_of(unit - next_unit), 64)
        self.unit.store(next_unit, 64)

    def _center(self, mean: Value) -> Value:
        """Return the product of the page's mean with each head's query, times log2(e)."""
        k, D = self.k, self.layout.head_dim
        means = k.stack(F32V, D // LANES)
        for i in range(D // LANES):
            means.at(64 * i).store(_from_bf16(mean.at(2 * LANES * i).load(vector_of("i16"), 2)), 64)
        sums = [k.variable(k.f32v(0)) for _ in range(_AT_ONCE)]
        with k.range(k.i64(0), k.i64(D), _AT_ONCE) as feature:
            for n, total in enumerate(sums):
                query = self.queries.at(feature * 64).at(64 * n).load(F32V, 64)
                total.set(k.fma(query, means.at(feature * 4).at(4 * n).load(F32).splat(), total.get()))
        return _sum([total.get() for total in sums])

    def _expand(self, sketch: Value) -> None:
        """Signs to bytes of four; scales to floats, of every fourth token in a vector, as products come."""
        k, groups = self.k, self.layout.groups
        with k.range(k.i64(0), k.i64(groups * _NIBBLES // 2)) as row:
            word = sketch.at(row * PAGE_TOKENS).load(I32V)
            for half in range(2):
                self.nibbles.at(row * 128).at(64 * half).store(word >> (4 * half) & _LOW_NIBBLES, 64)
        starts = [k.variable(k.f32v(0)) for _ in range(_VECTORS)]
        with k.range(k.i64(0), k.i64(groups)) as group:
            word = sketch.at(self.layout.scales).at(group * PAGE_TOKENS).load(I32V)
            for n, start in enumerate(starts):
                scale = (((word >> (8 * n) & 255) << SCALE_SHIFT) + SCALE_BIAS).convert("bitcast", F32V)
                self.scales.at(group * (64 * _VECTORS)).at(64 * n).store(scale, 64)
                start.set(k.fma(scale, k.f32v(-MOST_UNITS * _NIBBLES), start.get()))
        for n, start in enumerate(starts):
            self.starts.at(64 * n).store(start.get(), 64)

    def _estimate(self, count: Value) -> None:
        """Write the powers of two of each head's products with the keys, of every 16th token together."""
        k, groups = self.k, self.layout.groups
        with k.range(k.i64(0), count) as head:
            sums = [self.starts.at(64 * n).load(F32V, 64) for n in range(_VECTORS)]
            for group in range(groups):
                at = head * groups + group
                missed = self.missed.at(at * 4).load(F32).splat()
                nibbles = self.nibbles.at(group * (64 * _NIBBLES))
                for n, product in enumerate(self._products(nibbles, self.tables.at(at * (LANES * _NIBBLES)))):
                    scale = self.scales.at(group * (64 * _VECTORS)).at(64 * n).load(F32V, 64)
                    number = k.fma(scale, missed, product.convert("sitofp", F32V))
                    sums[n] = k.fma(number, scale, sums[n])
            factor, offset = (place.at(head * 4).load(F32).splat() for place in (self.factors, self.offsets))
            self.partial.at(head * 64).store(_sum([_power(k, k.fma(x, factor, offset)) for x in sums]), 64)

    def _products(self, nibbles: Value, tables: Value) -> list[Value]:
        """Return a group's products with the signs, <16 x i32> of every fourth token, each too large by what all tables
        have been made larger."""
        k, fours = self.k, []
        for first in range(0, _NIBBLES, 4):  # whose sums fit bytes without a sign
            parts = []
            for n in range(first, first + 4):
                table = tables.at(LANES * n).load(cpu_kv.BYTES, 16)
                parts.append(self.isa.looked_up(k, table, nibbles.at(64 * n).load(I32V, 64)))
            fours.append(_sum(parts))
        even, odd = (_sum([four >> shift & 0x00FF00FF for four in fours]) for shift in (0, 8))
        return [even & 0xFFFF, odd & 0xFFFF, even >> 16, odd >> 16]

    def _share_out(self, newest: Value, masses: Value, scores: Value, *, is_first: Value) -> None:
        """Add the heads' shares to the scores."""
        k, unit, total = self.k, self.unit.load(F32V, 64), self.total.load(F32V, 64)
        # Behind the last head there is nothing.
        inverse = total.compare("ogt", 0.0).choose(k.f32v(1) / total, k.f32v(0))
        with k.range(k.i64(1), newest) as page:
            place, score = masses.at(page * MASS_BYTES), scores.at(page * 4)
            weight = self._power_of(place.at(4 * HEADS).load(F32V, 64) - unit) * inverse
            share = cpu_math.total(k, place.load(F32V, 64) * weight)
            score.store(share + is_first.choose(k.constant(F32, 0), score.load(F32)))

    def _power_of(self, exponents: Value) -> Value:
        return _power(self.k, (exponents + _EXPONENT) * _MANTISSA)


def words_of(table: Value, row: Value, names: tuple[str, ...]) -> dict[str, Value]:
    """Return where each word of a table's row is."""
    return {name: table.at(row * (8 * len(names))).at(8 * n) for n, name in enumerate(names)}


def _power(k: Kernel, bits: Value) -> Value:
    """A float whose bits these are, as a number; 0 where that is below 0."""
    return k.smaller(k.larger(bits, k.f32v(0)), k.f32v(_MOST)).convert("fptosi", I32V).freeze().convert("bitcast", F32V)


def _from_bf16(halves: Value) -> Value:
    return (halves.convert("zext", I32V) << 16).convert("bitcast", F32V)


def _sum(vectors: list[Value]) -> Value:
    """In pairs."""
    while len(vectors) > 1:
        vectors = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@cache
def sketch(isa: Isa, layout: PageLayout) -> Native:
    return compile_kernel(sketch_source(layout), isa)
