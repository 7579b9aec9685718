"""Adapters (LoRA) on the CPU: what thin matrices add to the rows of a batch, each row by its own adapters.

`shrink` brings a row down to the ranks, t = scale * (A x), from the INT8 form in which the packed matrix took it;
`expand` adds B t to what the packed matrix made of it. One set of tables says which rows have which adapters, in all
layers; records say where an adapter's matrices for one layer are (S-LoRA, arXiv:2311.03285; Punica, arXiv:2310.18547).
A row has the same bits whatever rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce

from localllm.kernels.cpu_ir import F32, F32V, I32, I64, PTR, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_matmul import X_OFFSET, Group, GroupWeights, dots
from localllm.kernels.sizes import TILE, Weights

# Of a batch: segments, uses, the most rows of a segment, the most tiles of ranks; addresses of the tables and of room
# for t; adapters, of each of which a site has a record.
SHAPE_WORDS = ("segments", "uses", "rows", "rank_tiles", "segment_table", "use_table", "t", "records", "adapters")
# Rows that have the same adapters, and the first of these.
SEGMENT_WORDS = ("first_row", "rows", "first_use", "uses")
# Of one adapter: its number among the batch's, the first float of its t, and the bits of what multiplies it.
USE_WORDS = ("first_row", "rows", "adapter", "t", "scale")
# Of one adapter in one layer; the tables are addresses. See `low_rank_record`.
RECORD_WORDS = ("rank_tiles", "num_parts", "a", "a_scale", "parts", "b", "b_scale")
# Of a part of the output that takes ranks of its own: its tiles, those ranks, and where it begins in B.
PART_WORDS = ("first_tile", "end_tile", "first_rank", "ranks", "first_byte")
CHAINS = 2  # of sums over ranks, of which each part of a record has a multiple
_ROWS_AT_ONCE = 4  # that a weight is read for once
_AHEAD_BYTES = 4096
_SPAN = 8  # tiles that a thread takes at a time: to look them up costs as much as 16 ranks of one


def shrink_source(isa: Isa, group: int, block_rows: int) -> Kernel:
    """t = scale * a_scale * (A . x), fp32 [rows, rank_tiles * 16] of each use.

    shape int64: see SHAPE_WORDS. x, x_scale, x_offset: as `cpu_matmul` reads them, in blocks of `block_rows` rows and
    groups of `group` columns; groups: of them. site: the layer's number in the table of records.
    """
    k = Kernel("shrink", "shape x x_scale x_offset | groups site")
    a = k.arg
    batch = _Words(k, a.shape, SHAPE_WORDS)
    blocks = (batch.number("rows") + (block_rows - 2)) / block_rows + 1  # that a use may begin and end in
    each = blocks * batch.number("rank_tiles")
    with k.balanced(batch.number("uses") * each) as unit:
        use = _Words(k, batch.pointer("use_table"), USE_WORDS, unit / each)
        tile, first = unit % each / blocks, use.number("first_row")
        block = first / block_rows + unit % each % blocks
        begin = k.larger(first, block * block_rows)
        end = k.smaller(first + use.number("rows"), (block + 1) * block_rows)
        record = _record(k, batch, use.number("adapter"))
        is_there = record.address.compare("ne", 0)
        with k.when(is_there & begin.compare("ult", end)):
            tiles = record.number("rank_tiles")
            with k.when(tile.compare("ult", tiles)):
                t = batch.pointer("t").at((use.number("t") + tile * TILE) * 4)
                factor = record.pointer("a_scale").at(tile * (TILE * 4)).load(F32V)
                factor = factor * use.at("scale").load(F32).splat()
                whole = begin + (end - begin) / _ROWS_AT_ONCE * _ROWS_AT_ONCE
                for rows, span in ((_ROWS_AT_ONCE, (begin, whole)), (1, (whole, end))):
                    with k.range(*span, rows) as row:
                        x = _BlockRows(group, block_rows, block, row - block * block_rows, rows)
                        for i, total in enumerate(_products(k, isa, x, record, tile)):
                            t.at((row - first + i) * tiles * (TILE * 4)).store(total * factor)
    return k


@dataclass(frozen=True)
class _BlockRows:
    """Rows of x: how many, and the first one within its block."""

    group: int
    block_rows: int
    block: Value
    first: Value
    rows: int


def _products(k: Kernel, isa: Isa, rows: _BlockRows, record: _Record, tile: Value) -> list[Value]:
    """16 ranks of A times each of the rows, without A's scale."""
    a = k.arg
    weights = Weights(8, rows.group, has_bias=False)
    assert weights.offset == X_OFFSET
    totals = [k.variable(k.f32v(0)) for _ in range(rows.rows)]
    with k.range(k.i64(0), a.groups) as g:
        x = Group(rows.group, rows.block_rows, g, (rows.block * a.groups + g) * rows.block_rows, rows.first)
        codes = record.pointer("a").at((tile * a.groups + g) * weights.group_bytes)
        offsets = [x.of_row(a.x_offset, row).load(I32).splat() for row in range(rows.rows)]
        (products,) = dots(x, [GroupWeights(isa, weights, codes, k.i64(_AHEAD_BYTES))], offsets)
        for row, (total, product) in enumerate(zip(totals, products, strict=True)):
            scale = x.of_row(a.x_scale, row).load(F32).splat()
            total.set(k.fma(scale, product.convert("sitofp", F32V), total.get()))
    return [total.get() for total in totals]


def expand_source() -> Kernel:
    """y += b_scale * (B . t) for each adapter of a row, in their order.

    shape, site: as in `shrink_source`. y fp32, `features` floats a row; tiles: of its features, 16 each.
    """
    k = Kernel("expand", "shape y | features tiles site")
    a = k.arg
    batch = _Words(k, a.shape, SHAPE_WORDS)
    spans = (a.tiles + (_SPAN - 1)) / _SPAN
    with k.balanced(batch.number("segments") * spans) as unit:
        begin = unit % spans * _SPAN
        end = k.smaller(begin + _SPAN, a.tiles)
        segment = _Words(k, batch.pointer("segment_table"), SEGMENT_WORDS, unit / spans)
        first, rows = segment.number("first_use"), segment.number("rows")
        y = a.y.at(segment.number("first_row") * a.features * 4)
        with k.range(first, first + segment.number("uses")) as number:
            use = _Words(k, batch.pointer("use_table"), USE_WORDS, number)
            record = _record(k, batch, use.number("adapter"))
            with k.when(record.address.compare("ne", 0)):
                stride = record.number("rank_tiles") * TILE
                adapted = _Rows(batch.pointer("t").at(use.number("t") * 4), stride, y)
                whole = rows / _ROWS_AT_ONCE * _ROWS_AT_ONCE
                # All of the span for some rows, then for the next: y's rows are pages apart.
                with k.range(k.i64(0), whole, _ROWS_AT_ONCE) as row:
                    _add_span(k, record, (begin, end), adapted, [row + i for i in range(_ROWS_AT_ONCE)])
                with k.range(whole, rows) as row:
                    _add_span(k, record, (begin, end), adapted, [row])
    return k


@dataclass(frozen=True)
class _Rows:
    """The rows of a segment. t: of the first one; stride: floats from one row's to the next's; y: the first one."""

    t: Value
    stride: Value
    y: Value


def _add_span(k: Kernel, record: _Record, span: tuple[Value, Value], rows: _Rows, numbers: list[Value]) -> None:
    """y of these rows += what a record has for the tiles [begin, end)."""
    parts, b, scales = (record.pointer(name) for name in ("parts", "b", "b_scale"))
    with k.range(k.i64(0), record.number("num_parts")) as own:
        part = _Words(k, parts, PART_WORDS, own)
        first_tile, ranks = part.number("first_tile"), part.number("ranks")
        begin, codes = k.larger(span[0], first_tile), b.at(part.number("first_byte"))
        sources = [rows.t.at((number * rows.stride + part.number("first_rank")) * 4) for number in numbers]
        with k.range(begin, k.smaller(span[1], part.number("end_tile"))) as tile:
            totals = _tile_totals(k, codes.at((tile - first_tile) * ranks * TILE), ranks, sources)
            scale = scales.at(tile * (TILE * 4)).load(F32V)
            for number, total in zip(numbers, totals, strict=True):
                y = rows.y.at((number * k.arg.features + tile * TILE) * 4)
                y.store(k.fma(scale, total, y.load(F32V)))


def _tile_totals(k: Kernel, codes: Value, ranks: Value, sources: list[Value]) -> list[Value]:
    """16 rows of B, without their scales, times t of each row."""
    sums = [[k.variable(k.f32v(0)) for _ in range(CHAINS)] for _ in sources]
    with k.range(k.i64(0), ranks, CHAINS) as rank:
        for chain in range(CHAINS):
            at = codes.at((rank + chain) * TILE)
            if chain == 0:
                k.prefetch(at.at(_AHEAD_BYTES))
            code = at.load(vector_of("i8"), 16)
            weight = code.convert("sext", vector_of(I32)).convert("sitofp", F32V)
            for source, totals in zip(sources, sums, strict=True):
                t = source.at((rank + chain) * 4).load(F32).splat()
                totals[chain].set(k.fma(weight, t, totals[chain].get()))
    return [reduce(lambda total, each: total + each, [each.get() for each in totals]) for totals in sums]


class _Words:
    """A row of a table of 64-bit words."""

    def __init__(self, k: Kernel, table: Value, names: tuple[str, ...], number: Value | None = None) -> None:
        self._names = names
        self._begin = table if number is None else table.at(number * (8 * len(names)))
        self.k = k

    def at(self, name: str) -> Value:
        return self._begin.at(8 * self._names.index(name))

    def number(self, name: str) -> Value:
        return self.at(name).load(I64, 8)

    def pointer(self, name: str) -> Value:
        return self.at(name).load(PTR, 8)


class _Record(_Words):
    """Where an adapter's matrices for the layer are. address: 0 where it has none."""

    def __init__(self, k: Kernel, at: Value) -> None:
        super().__init__(k, at.load(PTR, 8), RECORD_WORDS)
        self.address = at.load(I64, 8)


def _record(k: Kernel, batch: _Words, adapter: Value) -> _Record:
    number = k.arg.site * batch.number("adapters") + adapter
    return _Record(k, batch.pointer("records").at(number * 8))


@cache
def shrink(isa: Isa, group: int, block_rows: int) -> Native:
    return compile_kernel(shrink_source(isa, group, block_rows), isa)


@cache
def expand(isa: Isa) -> Native:
    return compile_kernel(expand_source(), isa)
