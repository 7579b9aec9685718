"""y = x @ W.T for INT4 or INT8 weights and INT8 activations on the CPU, at the speed at which W can be read.

One 64-byte vector of tile16 is 16 features x 8 columns of nibbles, or 16 x 4 of bytes: its low nibbles are four bytes
a lane for one dot product, its high nibbles for another. Sums inside a group are whole numbers; across groups they are
fp32, in an order that depends on K alone: a row of x gives the same bits whatever rows stand beside it.

One thread walks its features as one linear stream: 0.92 to 1.0 of a plain read for 1 to 8 rows (2 cores, Zen 5), where
four tiles side by side gave 0.64; an Intel Xeon reads best with four (0.97), as its prefetchers follow more streams.

AVX2 alone takes three instructions for a dot product of four bytes where others take one. Sums that stay in 16 bits for
a while need two: 157 instead of 115 billion products a second of INT4, 73 instead of 53 of INT8 (one core, Zen 5). What
bounds them is arithmetic: 198 are computed where neither scales nor memory are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, LANES, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import PAIRS_A_SUM, Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.sizes import Weights

PREFETCH_BYTES = 16384  # a tile of 2048 columns; 4 KB ahead reads 3 to 5 % less
NIBBLES = 0x0F0F0F0F
SIGN_BITS = -0x7F7F7F80  # 0x80808080: a signed byte plus 128
X_OFFSET = 128  # what x_offset takes back of every byte
HALVES = 2  # of eight columns: one dot product has four


def matmul_source(isa: Isa, weights: Weights, rows: int, *, adds: bool, has_bias: bool) -> Kernel:
    """The kernel for blocks of `rows` rows of x.

    qweight, scale, bias: see `tile16`. x int8 [blocks, K/8, rows, 8]; x_scale and x_bias fp32, x_offset int32
    [blocks, K/G, rows]: see `cpu_quantize`. y fp32 [blocks * rows, features]: written, or added to. linear_bias fp32
    [features]. blocks: a pointer to their number, which may change from run to run.
    """
    k = Kernel("matmul", "qweight scale bias linear_bias x x_scale x_bias x_offset y blocks | tiles groups features")
    a = k.arg
    blocks = a.blocks.load("i64", 8)
    units = Units(k, isa, weights, rows, adds=adds)
    matrix = TiledMatrix(a.qweight, a.scale, a.bias, a.linear_bias if has_bias else None, k.i64(PREFETCH_BYTES))
    with k.balanced(units.count) as unit, k.range(k.i64(0), blocks) as block:
        units.multiply(matrix, unit, block, block, rows)
    return k


@dataclass(frozen=True)
class TiledMatrix:
    """Addresses of a matrix: see `tile16`. linear_bias: fp32 [features], where it has one. ahead: how many bytes after
    what is read of qweight is what will be soon."""

    qweight: Value
    scale: Value
    bias: Value
    linear_bias: Value | None
    ahead: Value


class Units:
    """What a thread does at a time: a tile of the matrix, or several side by side, times a block of rows.

    The kernel has the words x, x_scale, x_bias, x_offset, y, tiles, groups, features. run_tiles: of so many tiles,
    where that is not 0, a unit has none beside those of the next run.
    """

    def __init__(
        self, k: Kernel, isa: Isa, weights: Weights, block_rows: int, *, adds: bool, run_tiles: int = 0
    ) -> None:
        self.k, self.isa, self.weights, self.block_rows = k, isa, weights, block_rows
        self.adds = adds
        self.tiles = math.gcd(isa.tiles_side_by_side(block_rows), run_tiles)
        # Of a tile's weights, as many as lie one behind the other.
        self.tile_bytes = k.arg.groups * weights.group_bytes
        self.count = (k.arg.tiles + (self.tiles - 1)) / self.tiles
        self._sums = [[k.stack(F32V) for _ in range(block_rows)] for _ in range(self.tiles)]

    def multiply(
        self,
        matrix: TiledMatrix,
        unit: Value,
        x_block: Value,
        y_block: Value,
        rows: int,
        *,
        groups_before: Value | None = None,
    ) -> None:
        """The first `rows` rows of a block of x, into a block of y. groups_before: the groups of x in front of these
        columns, where they are not those of the blocks."""
        k, a = self.k, self.k.arg
        before = x_block * a.groups if groups_before is None else groups_before
        sums = [row[:rows] for row in self._sums]
        # Where the last unit lacks tiles the last one takes their places: its sums are computed again, and stored once.
        first = unit * self.tiles
        tiles = [k.smaller(first + t, a.tiles - 1) for t in range(self.tiles)]
        for slot in (slot for row in sums for slot in row):
            slot.store(k.f32v(0), 64)
        with k.range(k.i64(0), a.groups) as g:
            x_at = (before + g) * self.block_rows
            group = Group(self.weights.columns, self.block_rows, g, x_at)
            _add_group(k, self.isa, self.weights, matrix, group, tiles, sums)
        for t, tile in enumerate(tiles):
            with k.when((first + t).compare("ult", a.tiles)):
                self._store(matrix, tile, y_block * self.block_rows, sums[t])

    def _store(self, matrix: TiledMatrix, tile: Value, first_row: Value, sums: list[Value]) -> None:
        a = self.k.arg
        has_row_scale = self.weights.group is None
        if has_row_scale:
            scale = matrix.scale.at(tile * 64).load(F32V, 64)
        for m, slot in enumerate(sums):
            y_at = a.y.at(((first_row + m) * a.features + tile * 16) * 4)
            total = slot.load(F32V, 64)
            total = total * scale if has_row_scale else total
            if matrix.linear_bias is not None:
                total = total + matrix.linear_bias.at(tile * 64).load(F32V)
            y_at.store(total + y_at.load(F32V) if self.adds else total)


@dataclass(frozen=True)
class Group:
    """A group of `size` columns, `number` in its row; of x, in a block of `block_rows` rows, `x_at` rows of groups come
    before. first_row: of the block, from which on rows are counted; None: the block's first."""

    size: int
    block_rows: int
    number: Value
    x_at: Value
    first_row: Value | None = None

    def x(self, octet: Value, row: int, half: int) -> Value:
        """Four columns of a row of x, half an octet, in every lane."""
        x: Value = self.number.kernel.arg.x.at(self.x_at * self.size)
        x = x if self.first_row is None else x.at(self.first_row * 8)
        return x.at(octet * (8 * self.block_rows)).at(8 * row + 4 * half).load(I32).splat()

    def of_row(self, words: Value, row: int) -> Value:
        """Where a row's x_scale, x_bias or x_offset is."""
        first = self.x_at if self.first_row is None else self.x_at + self.first_row
        return words.at(first * 4).at(4 * row)


@dataclass(frozen=True)
class GroupWeights:
    """A tile's weights of one group: 64 bytes of 4-bit codes for eight columns, or 128 of bytes. ahead: as in
    `TiledMatrix`."""

    isa: Isa
    weights: Weights
    begin: Value
    ahead: Value

    @property
    def octet_bytes(self) -> int:
        return 16 * self.weights.bits

    @property
    def planes(self) -> int:
        """Return how many sums make up a product: 2 where bytes are taken apart, the second counting 16 times."""
        is_nibbles = self.weights.bits == 4 and not self.weights.is_looked_up
        return 1 if is_nibbles or self.isa.multiplies_whole_bytes else 2

    def operands(self, octet: Value, plane: int) -> tuple[Value, Value]:
        """What the halves of an octet of x are multiplied with, for one of the planes."""
        at = self.begin.at(octet * self.octet_bytes)
        if self.weights.bits == 4:
            word = at.load(I32V, 64)
            low, high = word & NIBBLES, (word >> 4) & NIBBLES
            if not self.weights.is_looked_up:
                return low, high
            table = octet.kernel.byte_lanes(self._table(plane))
            return self.isa.looked_up(octet.kernel, table, low), self.isa.looked_up(octet.kernel, table, high)
        first, second = (at.at(64 * half).load(I32V, 64) ^ SIGN_BITS for half in range(HALVES))
        if self.isa.multiplies_whole_bytes:
            return first, second
        return (first >> (4 * plane)) & NIBBLES, (second >> (4 * plane)) & NIBBLES

    def _table(self, plane: int) -> list[int]:
        """The unsigned bytes of the 16 codes, or one of their halves."""
        assert self.weights.table is not None
        values = [value + self.weights.offset for value in self.weights.table]
        return values if self.planes == 1 else [(value >> (4 * plane)) & 15 for value in values]

    def fetch(self, octet: Value) -> None:
        """Begin to fetch what is as far behind this octet as `ahead` says."""
        for line in range(0, self.octet_bytes, 64):
            octet.kernel.prefetch(self.begin.at(octet * self.octet_bytes).at(line).at(self.ahead))


def _add_group(
    k: Kernel,
    isa: Isa,
    weights: Weights,
    matrix: TiledMatrix,
    group: Group,
    tiles: list[Value],
    sums: list[list[Value]],
) -> None:
    """sums += x_scale * scale * (value . x) + bias * x_bias of one group of columns, without scale where rows have one,
    and without bias where there is none. value + offset is what is multiplied; x_offset takes it back."""
    a = k.arg
    first = [k.constant(I32V, 0) for _ in sums[0]]
    if weights.offset:
        share = X_OFFSET // weights.offset  # a power of two
        offsets = [group.of_row(a.x_offset, m).load(I32) for m in range(len(first))]
        first = [offset.shift_signed(share.bit_length() - 1).splat() for offset in offsets]
    totals = dots(group, [_weights(isa, weights, matrix, group, tile) for tile in tiles], first)
    for t, tile in enumerate(tiles):
        at = (tile * a.groups + group.number) * 32
        scale = _halfs(matrix.scale.at(at)) if weights.group is not None else None
        bias = _halfs(matrix.bias.at(at)) if weights.has_bias else None
        for m, slot in enumerate(sums[t]):
            factor = group.of_row(a.x_scale, m).load(F32).splat()
            factor = factor if scale is None else scale * factor
            total = slot.load(F32V, 64)
            if bias is not None:
                total = k.fma(bias, group.of_row(a.x_bias, m).load(F32).splat(), total)
            slot.store(k.fma(factor, totals[t][m].convert("sitofp", F32V), total), 64)


def _halfs(at: Value) -> Value:
    return at.load(vector_of("half"), 32).convert("fpext", F32V)


def _weights(isa: Isa, weights: Weights, matrix: TiledMatrix, group: Group, tile: Value) -> GroupWeights:
    groups_before = tile * group.number.kernel.arg.groups + group.number
    return GroupWeights(isa, weights, matrix.qweight.at(groups_before * weights.group_bytes), matrix.ahead)


def dots(group: Group, tiles: list[GroupWeights], first: list[Value]) -> list[list[Value]]:
    """first + q . x, <16 x i32> for each tile and row. first: one value for each row."""
    if tiles[0].isa.adds_in_16_bits:
        return [_total(first, *(_pair_dots(group, tile, n, len(first)) for n in range(tile.planes))) for tile in tiles]
    k = group.number.kernel
    zeros = [k.constant(I32V, 0) for _ in first]
    totals = [[[k.variable(value) for value in start] for start in (first, zeros)[: tile.planes]] for tile in tiles]
    with k.range(k.i64(0), k.i64(group.size // 8)) as octet:
        halves = [[group.x(octet, m, half) for m in range(len(first))] for half in range(HALVES)]
        for tile, planes in zip(tiles, totals, strict=True):
            tile.fetch(octet)
            for plane, rows in enumerate(planes):
                for half, unsigned in enumerate(tile.operands(octet, plane)):
                    for total, x in zip(rows, halves[half], strict=True):
                        total.set(tile.isa.dot(k, total.get(), unsigned, x))
    values = [[[total.get() for total in rows] for rows in planes] for planes in totals]
    return [planes[0] if len(planes) == 1 else _total(zeros, *planes) for planes in values]


def _total(first: list[Value], low: list[Value], *high: list[Value]) -> list[Value]:
    """first + low + 16 * high, row by row."""
    total = [a + b for a, b in zip(first, low, strict=True)]
    return [a + (b << 4) for a, b in zip(total, high[0], strict=True)] if high else total


def _pair_dots(group: Group, tile: GroupWeights, plane: int, rows: int) -> list[Value]:
    """q . x of one plane, PAIRS_A_SUM dot products added in 16 bits before they go to 32.

    All but the first of their columns are a loop that stays one: unrolled, LLVM loads so far ahead that the sums no
    longer fit into registers (131 billion products a second instead of 157, of 4 rows).
    """
    k, isa = group.number.kernel, tile.isa
    totals = [k.constant(I32V, 0) for _ in range(rows)]

    def add(octet: Value) -> None:
        if plane == 0:
            tile.fetch(octet)
        for half, unsigned in enumerate(tile.operands(octet, plane)):
            for m, pair_sum in enumerate(sums):
                pair_sum.add(isa.pairs(k, unsigned, group.x(octet, m, half)))

    for begin in range(0, group.size // 8, PAIRS_A_SUM // HALVES):
        end = min(begin + PAIRS_A_SUM // HALVES, group.size // 8)
        sums = [k.variable(k.constant(vector_of("i16", 2 * LANES), 0)) for _ in range(rows)]
        add(k.i64(begin))
        with k.range(k.i64(begin + 1), k.i64(end), rolled=True) as octet:
            add(octet)
        totals = [total + isa.widened(k, pair_sum.get()) for total, pair_sum in zip(totals, sums, strict=True)]
    return totals


@cache
def matmul(isa: Isa, weights: Weights, rows: int, *, adds: bool = False, has_bias: bool = False) -> Native:
    return compile_kernel(matmul_source(isa, weights, rows, adds=adds, has_bias=has_bias), isa)


def rows_a_block(isa: Isa, rows: int) -> int:
    """Return how many rows of x the kernel takes at a time: as even as can be, so that few of them are empty."""
    blocks = -(-rows // isa.max_rows)
    return -(-rows // blocks)


@cache
def is_available() -> bool:
    """Return whether this machine compiles and runs the kernels; asking compiles one of them (15-150 ms, once)."""
    return compiles(lambda: matmul(best_isa(), Weights(), 1))
