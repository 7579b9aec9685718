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

from dataclasses import dataclass
from functools import cache

from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, LANES, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import PAIRS_A_SUM, Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.sizes import Weights

PREFETCH_BYTES = 16384  # a tile of 2048 columns; 4 KB ahead reads 3 to 5 % less
NIBBLES = 0x0F0F0F0F
SIGN_BITS = -0x7F7F7F80  # 0x80808080: a signed byte plus 128
HALVES = 2  # of eight columns: one dot product has four


def matmul_source(isa: Isa, weights: Weights, group: int, rows: int, *, adds: bool, has_bias: bool) -> Kernel:
    """The kernel for blocks of `rows` rows of x.

    qweight, scale, bias: see `tile16`. x int8 [blocks, K/8, rows, 8]; x_scale and x_bias fp32, x_offset int32
    [blocks, K/G, rows]: see `cpu_quantize`. y fp32 [blocks * rows, features]: written, or added to. linear_bias fp32
    [features]. blocks: a pointer to their number, which may change from run to run.
    """
    k = Kernel("matmul", "qweight scale bias linear_bias x x_scale x_bias x_offset y blocks | tiles groups features")
    a = k.arg
    blocks = a.blocks.load("i64", 8)
    units = Units(k, isa, weights, group, rows, adds=adds)
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

    The kernel has the words x, x_scale, x_bias, x_offset, y, tiles, groups, features.
    """

    def __init__(self, k: Kernel, isa: Isa, weights: Weights, group: int, block_rows: int, *, adds: bool) -> None:
        self.k, self.isa, self.weights, self.group, self.block_rows = k, isa, weights, group, block_rows
        self.adds = adds
        self.tiles = isa.tiles_side_by_side(block_rows)
        # Of a tile's weights, as many as lie one behind the other.
        self.tile_bytes = k.arg.groups * (group * (8 if weights == "int4" else 16))
        self.count = (k.arg.tiles + (self.tiles - 1)) / self.tiles
        self._sums = [[k.stack(F32V) for _ in range(block_rows)] for _ in range(self.tiles)]

    def multiply(self, matrix: TiledMatrix, unit: Value, x_block: Value, y_block: Value, rows: int) -> None:
        """The first `rows` rows of a block of x, into a block of y."""
        k, a = self.k, self.k.arg
        inner = _int4_group if self.weights == "int4" else _int8_group
        sums = [row[:rows] for row in self._sums]
        # Where the last unit lacks tiles the last one takes their places: its sums are computed again, and stored once.
        first = unit * self.tiles
        tiles = [k.smaller(first + t, a.tiles - 1) for t in range(self.tiles)]
        for slot in (slot for row in sums for slot in row):
            slot.store(k.f32v(0), 64)
        with k.range(k.i64(0), a.groups) as g:
            x_at = (x_block * a.groups + g) * self.block_rows
            inner(k, self.isa, matrix, Group(self.group, self.block_rows, g, x_at), tiles, sums)
        for t, tile in enumerate(tiles):
            with k.when((first + t).compare("ult", a.tiles)):
                self._store(matrix, tile, y_block * self.block_rows, sums[t])

    def _store(self, matrix: TiledMatrix, tile: Value, first_row: Value, sums: list[Value]) -> None:
        a = self.k.arg
        if self.weights == "int8":
            scale = matrix.scale.at(tile * 64).load(F32V, 64)
        for m, slot in enumerate(sums):
            y_at = a.y.at(((first_row + m) * a.features + tile * 16) * 4)
            total = slot.load(F32V, 64)
            total = total * scale if self.weights == "int8" else total
            if matrix.linear_bias is not None:
                total = total + matrix.linear_bias.at(tile * 64).load(F32V)
            y_at.store(total + y_at.load(F32V) if self.adds else total)


@dataclass(frozen=True)
class Group:
    """A group of `size` columns, `number` in its row; of x, in a block of `block_rows` rows, `x_at` rows of groups come
    before."""

    size: int
    block_rows: int
    number: Value
    x_at: Value

    def x(self, octet: Value, row: int, half: int) -> Value:
        """Four columns of a row of x, half an octet, in every lane."""
        x: Value = self.number.kernel.arg.x.at(self.x_at * self.size)
        return x.at(octet * (8 * self.block_rows)).at(8 * row + 4 * half).load(I32).splat()

    def of_row(self, words: Value, row: int) -> Value:
        """Where a row's x_scale, x_bias or x_offset is."""
        return words.at(self.x_at * 4).at(4 * row)


@dataclass(frozen=True)
class GroupWeights:
    """A tile's weights of one group: 64 bytes of INT4 for eight columns, or 128 of INT8. ahead: as in `TiledMatrix`."""

    isa: Isa
    weights: Weights
    begin: Value
    ahead: Value

    @property
    def octet_bytes(self) -> int:
        return 64 if self.weights == "int4" else 128

    @property
    def planes(self) -> int:
        """Return how many sums make up a product: 2 where bytes are taken apart, the second counting 16 times."""
        return 1 if self.weights == "int4" or self.isa.multiplies_whole_bytes else 2

    def operands(self, octet: Value, plane: int) -> tuple[Value, Value]:
        """What the halves of an octet of x are multiplied with, for one of the planes."""
        at = self.begin.at(octet * self.octet_bytes)
        if self.weights == "int4":
            word = at.load(I32V, 64)
            return word & NIBBLES, (word >> 4) & NIBBLES
        first, second = (at.at(64 * half).load(I32V, 64) ^ SIGN_BITS for half in range(HALVES))
        if self.isa.multiplies_whole_bytes:
            return first, second
        return (first >> (4 * plane)) & NIBBLES, (second >> (4 * plane)) & NIBBLES

    def fetch(self, octet: Value) -> None:
        """Begin to fetch what is as far behind this octet as `ahead` says."""
        for line in range(0, self.octet_bytes, 64):
            octet.kernel.prefetch(self.begin.at(octet * self.octet_bytes).at(line).at(self.ahead))


def _int4_group(
    k: Kernel, isa: Isa, matrix: TiledMatrix, group: Group, tiles: list[Value], sums: list[list[Value]]
) -> None:
    """sums += x_scale * scale * (q . x) + bias * x_bias of one group of columns."""
    a = k.arg
    zeros = [k.constant(I32V, 0) for _ in sums[0]]
    totals = dots(group, [_weights(isa, "int4", matrix, group, tile) for tile in tiles], zeros)
    for t, tile in enumerate(tiles):
        at = (tile * a.groups + group.number) * 32
        scale = matrix.scale.at(at).load(vector_of("half"), 32).convert("fpext", F32V)
        bias = matrix.bias.at(at).load(vector_of("half"), 32).convert("fpext", F32V)
        for m, slot in enumerate(sums[t]):
            x_scale = group.of_row(a.x_scale, m).load(F32).splat()
            x_bias = group.of_row(a.x_bias, m).load(F32).splat()
            dot = totals[t][m].convert("sitofp", F32V)
            slot.store(k.fma(scale * x_scale, dot, k.fma(bias, x_bias, slot.load(F32V, 64))), 64)


def _int8_group(
    k: Kernel, isa: Isa, matrix: TiledMatrix, group: Group, tiles: list[Value], sums: list[list[Value]]
) -> None:
    """sums += x_scale * (q . x) of one group of columns; q + 128 is what is multiplied, x_offset takes it back."""
    offsets = [group.of_row(k.arg.x_offset, m).load(I32).splat() for m in range(len(sums[0]))]
    totals = dots(group, [_weights(isa, "int8", matrix, group, tile) for tile in tiles], offsets)
    for t, row in enumerate(sums):
        for m, slot in enumerate(row):
            x_scale = group.of_row(k.arg.x_scale, m).load(F32).splat()
            slot.store(k.fma(x_scale, totals[t][m].convert("sitofp", F32V), slot.load(F32V, 64)), 64)


def _weights(isa: Isa, weights: Weights, matrix: TiledMatrix, group: Group, tile: Value) -> GroupWeights:
    before = (tile * group.number.kernel.arg.groups + group.number) * group.size  # columns
    return GroupWeights(isa, weights, matrix.qweight.at(before * (8 if weights == "int4" else 16)), matrix.ahead)


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
def matmul(isa: Isa, weights: Weights, group: int, rows: int, *, adds: bool = False, has_bias: bool = False) -> Native:
    return compile_kernel(matmul_source(isa, weights, group, rows, adds=adds, has_bias=has_bias), isa)


def rows_a_block(isa: Isa, rows: int) -> int:
    """Return how many rows of x the kernel takes at a time: as even as can be, so that few of them are empty."""
    blocks = -(-rows // isa.max_rows)
    return -(-rows // blocks)


@cache
def is_available() -> bool:
    """Return whether this machine compiles and runs the kernels; asking compiles one of them (15-150 ms, once)."""
    return compiles(lambda: matmul(best_isa(), "int4", 64, 1))
