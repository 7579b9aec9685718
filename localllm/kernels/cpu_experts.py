"""Experts of a mixture on the CPU: each token's rows brought to the experts that were chosen for it, and back.

`group` sorts pairs of a token and a slot by expert into blocks of a few rows, `cpu_quantize` fills the blocks,
`expert_matmul` multiplies each with its expert's matrix, and `combine` adds up what belongs to a token. All of it is
told by pointers how many tokens there are, so that a tape runs any number of them. Who the experts of a token are
says `cpu_router`.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I64, LANES, PTR, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_matmul import PREFETCH_BYTES, TiledMatrix, Units
from localllm.kernels.expert_block import ExpertBlock, load_word, store_word
from localllm.kernels.sizes import Weights

Shared = Literal["none", "plain", "gated"]


def group_source(num_experts: int, block_rows: int) -> Kernel:
    """experts int32 [T, top_k] -> blocks of at most `block_rows` rows of one expert, in the order of the experts and,
    within one, of the pairs.

    blocks int32 [most_blocks, 4]: see `expert_block`. tokens int32 [most_blocks, block_rows]: of which token a row is;
    what a block lacks is left as it was. places int32 [T, top_k]: the row of each pair. tokens_shape: a pointer to {T};
    shape: one to where {number of blocks, block_rows} is written, before the number of the first one. One thread does
    it: 8 pairs of 128 experts take 0.2 us.
    """
    k = Kernel("group", "experts blocks tokens places tokens_shape shape | top_k")
    a = k.arg
    counts = k.stack(I64, num_experts)  # and then, of each expert, the row for its next pair
    pairs = a.tokens_shape.load(I64, 8) * a.top_k
    with k.when(k.thread.compare("eq", 0)):
        with k.range(k.i64(0), k.i64(num_experts)) as expert:
            counts.at(expert * 8).store(k.i64(0), 8)
        with k.range(k.i64(0), pairs) as pair:
            count = counts.at(load_word(a.experts, pair) * 8)
            count.store(count.load(I64, 8) + 1, 8)
        blocks = _lay_out(k, counts, num_experts, block_rows)
        a.shape.store(blocks, 8)
        a.shape.at(8).store(k.i64(block_rows), 8)
        with k.range(k.i64(0), pairs) as pair:
            next_row = counts.at(load_word(a.experts, pair) * 8)
            row = next_row.load(I64, 8)
            store_word(a.places, pair, row)
            store_word(a.tokens, row, pair / a.top_k)
            next_row.store(row + 1, 8)
    return k


def _lay_out(k: Kernel, counts: Value, num_experts: int, block_rows: int) -> Value:
    """Write the blocks, put each expert's first row in the place of its count; return the number of blocks."""
    blocks = k.variable(k.i64(0))
    with k.range(k.i64(0), k.i64(num_experts)) as expert:
        at = counts.at(expert * 8)
        count, first = at.load(I64, 8), blocks.get()
        own = (count + (block_rows - 1)) / block_rows
        with k.range(k.i64(0), own) as i:
            rows = k.smaller(count - i * block_rows, k.i64(block_rows))
            ExpertBlock(expert, rows, first, own).store(k, first + i)
        at.store(first * block_rows, 8)
        blocks.set(first + own)
    return blocks.get()


def expert_matmul_source(
    isa: Isa, weights: Weights, block_rows: int, *, has_bias: bool = False, gathers: bool = False
) -> Kernel:
    """y = x @ W.T, each block of x times the matrix of its expert, to the bits of `cpu_matmul`.

    table int64 [num_experts]: the address of each expert's record; qweight, scale, bias, linear_bias: the bytes in a
    record before those of this matrix, all multiples of 64. x, x_scale, x_bias, x_offset: as there, with blocks of
    `block_rows` rows. blocks, shape, tokens: see `group`. y fp32 [blocks * block_rows, features]; rows that a block
    lacks hold anything. gathers, for blocks of one row: x has a row for each token, which all its experts read.

    A tile is read once for all blocks of its expert. Threads share out tiles of blocks, so that each has about as much
    to do, and walks its experts' records as linear streams, however unevenly the experts were chosen. One thread (Zen
    5) reads 8 of 128 experts, INT4 1536 x 2048 and 2048 x 768, at 0.83 and 0.80 of its plain read, a single matrix of
    as many bytes at 0.85. As the end of each is read the next one's beginning is fetched: 0.76 of 2048 x 768 without.
    """
    assert block_rows == 1 or not gathers
    k = Kernel(
        "expert_matmul",
        "table blocks shape tokens x x_scale x_bias x_offset y | qweight scale bias linear_bias tiles groups features",
    )
    a = k.arg
    units = Units(k, isa, weights, block_rows, adds=False)
    skipped = a.shape.at(16).load(I64, 8) * units.count
    with k.balanced(a.shape.load(I64, 8) * units.count) as own_item:
        item = own_item + skipped
        expert = ExpertBlock.at(k, item / units.count)
        own = item - expert.first * units.count
        unit, number = own / expert.blocks, expert.first + own % expert.blocks
        matrix = _matrix(k, expert, units, unit, has_bias)
        x_block = load_word(a.tokens, number) if gathers else number
        rows = ExpertBlock.at(k, number).rows
        smaller = 0
        for size in _sizes(block_rows):
            with k.when((rows - (smaller + 1)).compare("ult", size - smaller)):
                units.multiply(matrix, unit, x_block, number, size)
            smaller = size
    return k


def _matrix(k: Kernel, expert: ExpertBlock, units: Units, unit: Value, has_bias: bool) -> TiledMatrix:
    """The matrix of an expert. Near its end, what will be read soon is the next one's beginning."""
    a = k.arg
    next_block = k.smaller(expert.first + expert.blocks, a.shape.at(16).load(I64, 8) + a.shape.load(I64, 8) - 1)
    next_expert = ExpertBlock.at(k, next_block).expert
    record, next_record = (a.table.at(number * 8) for number in (expert.expert, next_expert))
    distance = next_record.load(I64, 8) - record.load(I64, 8) - a.tiles * units.tile_bytes + PREFETCH_BYTES
    stays = ((unit * units.tiles) * units.tile_bytes + PREFETCH_BYTES).compare("ult", a.tiles * units.tile_bytes)
    ahead = stays.choose(k.i64(PREFETCH_BYTES), distance)
    parts = [record.load(PTR, 8).at(offset) for offset in (a.qweight, a.scale, a.bias, a.linear_bias)]
    return TiledMatrix(parts[0], parts[1], parts[2], parts[3] if has_bias else None, ahead)


def _sizes(block_rows: int) -> list[int]:
    """For how many rows code is written: a block with fewer takes the next, and computes rows that nobody reads."""
    return [size for size in (1, 2, 4, 8) if size < block_rows] + [block_rows]


def combine_source(*, adds: bool, shared: Shared = "none") -> Kernel:
    """x = the sum over slots of weights * y, in the order of the slots; or x += it, where `adds`.

    y fp32 [rows of blocks, features]; places int32 and weights fp32 [T, top_k]: see `group` and `cpu_router`; x fp32
    [T, features]. shape: a pointer to {T}. shared: an expert of all tokens, whose rows, fp32 [T, features], are added
    at last ("plain"), times the sigmoid of gate ("gated"), of which each row has one, `gate_stride` floats apart.
    Threads share out vectors of rows.
    """
    k = Kernel("combine", "y places weights shared gate x shape | features top_k gate_stride")
    a = k.arg
    vectors = a.features / LANES
    with k.share_pairs(a.shape.load(I64, 8), vectors) as (t, first, last):
        factor = k.f32v(1.0)
        if shared == "gated":
            factor = cpu_math.sigmoid(k, a.gate.at(t * a.gate_stride * 4).load(F32).splat())
        with k.range(first, last) as vector:
            at = vector * (LANES * 4)
            total = k.variable(k.f32v(0))
            with k.range(t * a.top_k, (t + 1) * a.top_k) as pair:
                weight = a.weights.at(pair * 4).load(F32).splat()
                row = a.y.at(load_word(a.places, pair) * a.features * 4)
                total.set(k.fma(weight, row.at(at).load(F32V), total.get()))
            row_at = (t * a.features) * 4
            if shared != "none":
                total.set(k.fma(factor, a.shared.at(row_at).at(at).load(F32V), total.get()))
            x = a.x.at(row_at).at(at)
            x.store(total.get() + x.load(F32V) if adds else total.get())
    return k


@cache
def group(isa: Isa, num_experts: int, block_rows: int) -> Native:
    return compile_kernel(group_source(num_experts, block_rows), isa)


@cache
def expert_matmul(
    isa: Isa, weights: Weights, block_rows: int, *, has_bias: bool = False, gathers: bool = False
) -> Native:
    source = expert_matmul_source(isa, weights, block_rows, has_bias=has_bias, gathers=gathers)
    return compile_kernel(source, isa)


@cache
def combine(isa: Isa, *, adds: bool, shared: Shared = "none") -> Native:
    return compile_kernel(combine_source(adds=adds, shared=shared), isa)
