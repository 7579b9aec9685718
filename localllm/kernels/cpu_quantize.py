"""Activations to INT8, as the matrix kernels read them, on the way out of the operation that made them.

Symmetric, one scale for a row and a group of columns: x = x_scale * q, q in -127..127. Beside q stand x_scale, what a
weight's own offset multiplies (x_bias = x_scale * sum of q) and what takes back 128 added to every byte of a weight
(x_offset = -128 * sum of q). A NaN or an infinity makes its group's scale a NaN: nothing hides it.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32V, I64, LANES, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import MOST_ROWS, Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.expert_block import ExpertBlock, load_word
from localllm.kernels.sizes import Glu

Input = Literal["plain", "norm", "gated"]
Rows = Literal["all", "grouped", "gathered"]
NO_GLU = Glu("")
SMALLEST = 1e-30  # a group whose largest value is below this is all zeros: 127 / it would overflow


def quantize_source(group: int, kind: Input, glu: Glu = NO_GLU, rows: Rows = "all") -> Kernel:
    """plain: x [T, features]. norm: x / rms(x) * weight. gated: what `glu` makes of gates x[:, :features] and of what
    goes up, x[:, features:], or of that alone.

    x fp32, `stride` floats a row. q, x_scale, x_bias, x_offset: as `cpu_matmul` reads them in blocks of `rows` rows.
    shape: a pointer to {T, rows}. Threads share out the groups of blocks, whose rows lie beside each other: sharing out
    rows would have two cores write into every cache line (66 us for 8 rows of 2048, where this takes 8).

    rows: "all" of x, one after the other, or those of blocks as `cpu_experts.group` made them, which may not be full.
    Then shape points to {number of blocks, rows, the first block}; row r of block b is x's row b * rows + r
    ("grouped"), or that of its token ("gathered"). What would belong to rows that a block lacks is left as it was.
    """
    blocks = "" if rows == "all" else "blocks tokens"
    k = Kernel("quantize", f"x weight q x_scale x_bias x_offset shape {blocks} | groups stride eps")
    a = k.arg
    count, block_rows = a.shape.load(I64, 8), a.shape.at(8).load(I64, 8)
    num_blocks = (count + block_rows - 1) / block_rows if rows == "all" else count
    inverses = k.stack(F32, MOST_ROWS)
    with k.share_pairs(num_blocks, a.groups) as (own_block, first, last):
        block = own_block if rows == "all" else own_block + a.shape.at(16).load(I64, 8)
        first_row = block * block_rows
        filled = k.smaller(block_rows, count - first_row) if rows == "all" else ExpertBlock.at(k, block).rows
        if kind == "norm":
            with k.range(k.i64(0), filled) as r:
                source = _source(k, rows, first_row + r)
                inverses.at(r * 4).store(inverse_rms(k, source, a.groups * group))
        with k.range(first, last) as g, k.range(k.i64(0), filled) as r:
            x = _source(k, rows, first_row + r)
            values = [
                _value(k, kind, glu, x, (g * group + LANES * i) * 4, inverses.at(r * 4), a.groups * group)
                for i in range(group // LANES)
            ]
            _store(k, values, (block * a.groups + g) * block_rows, r, block_rows)
    return k


def _source(k: Kernel, rows: Rows, row: Value) -> Value:
    """Where the row of x is that becomes this row of the blocks."""
    a = k.arg
    source = load_word(a.tokens, row) if rows == "gathered" else row
    x: Value = a.x.at(source * a.stride * 4)
    return x


def _value(k: Kernel, kind: Input, glu: Glu, x: Value, at: Value, inverse: Value, features: Value) -> Value:
    """16 values of what is quantized, `at` bytes into the row."""
    value = x.at(at).load(F32V)
    if kind == "gated":
        return _gated(k, glu, value, x.at(features * 4).at(at).load(F32V) if glu.has_gate else None)
    if kind == "norm":
        weight: Value = k.arg.weight.at(at).load(F32V)
        return value * inverse.load(F32).splat() * weight
    return value


def _gated(k: Kernel, glu: Glu, value: Value, up: Value | None) -> Value:
    if up is None:
        return cpu_math.ACTIVATIONS[glu.activation](k, value)
    if glu.limit is not None:  # in this order a NaN stays one
        value = k.smaller(k.f32v(glu.limit), value)
        up = k.smaller(k.f32v(glu.limit), k.larger(k.f32v(-glu.limit), up))
    up = up + glu.up_offset if glu.up_offset else up
    return cpu_math.ACTIVATIONS[glu.activation](k, value) * up


def _store(k: Kernel, values: list[Value], group_rows: Value, row: Value, block_rows: Value) -> None:
    """A row's group: its codes, scale, bias and offset. group_rows: rows of all groups before this one."""
    a = k.arg
    scale, inverse = int8_scales(k, values)
    codes = [k.unary("rint", value * inverse.splat()).convert("fptosi", I32V) for value in values]
    sums = codes[0]
    for code in codes[1:]:
        sums = sums + code
    total = cpu_math.total(k, sums)
    at = (group_rows + row) * 4
    a.x_scale.at(at).store(scale)
    a.x_bias.at(at).store(scale * total.convert("sitofp", F32))
    a.x_offset.at(at).store(total * -128)
    octets = a.q.at((group_rows * (len(values) * LANES // 8) + row) * 8)
    for i, code in enumerate(codes):
        pair = code.convert("trunc", vector_of("i8")).convert("bitcast", vector_of(I64, 2))
        for half in (0, 1):
            octets.at(block_rows * (8 * (2 * i + half))).store(k.lane(pair, half), 8)


def inverse_rms(k: Kernel, x: Value, features: Value) -> Value:
    """1 / sqrt(mean of squares + eps), eps being the bits of a float; features % 16 == 0."""
    squares = k.variable(k.f32v(0))
    with k.range(k.i64(0), features, LANES) as i:
        value = x.at(i * 4).load(F32V)
        squares.set(k.fma(value, value, squares.get()))
    mean = cpu_math.total(k, squares.get()) / features.convert("uitofp", F32)
    eps = k.arg.eps.convert("trunc", "i32").convert("bitcast", F32)
    return k.constant(F32, 1.0) / k.unary("sqrt", mean + eps)


def int8_scales(k: Kernel, values: list[Value]) -> tuple[Value, Value]:
    """x_scale, and what x is multiplied by: 127 / largest |x|."""
    peaks, not_finite = k.unary("fabs", values[0]), values[0] * 0.0
    for value in values[1:]:
        peaks = k.larger(k.unary("fabs", value), peaks)
        not_finite = k.fma(value, k.f32v(0), not_finite)
    peak = cpu_math.largest(k, peaks)
    is_zero = peak.compare("olt", SMALLEST)
    zero = k.constant(F32, 0.0)
    scale = is_zero.choose(zero, peak * (1.0 / 127.0)) + cpu_math.total(k, not_finite)
    return scale, is_zero.choose(zero, k.constant(F32, 127.0) / peak)


@cache
def quantize(isa: Isa, group: int, kind: Input, glu: Glu = NO_GLU, rows: Rows = "all") -> Native:
    return compile_kernel(quantize_source(group, kind, glu, rows), isa)


def norm_source(*, adds: bool) -> Kernel:
    """y = x / rms(x) * weight, or y = scale * (y + it) where `adds`; y may be x.

    x, y fp32, x_stride and y_stride floats a row; weight fp32 [features]. shape: a pointer to {T}. eps, scale: the bits
    of a float. Threads share out the rows.
    """
    k = Kernel("norm", "x weight y shape | features x_stride y_stride eps scale")
    a = k.arg
    begin, end = k.share(a.shape.load(I64, 8))
    with k.range(begin, end) as row:
        x, y = a.x.at(row * a.x_stride * 4), a.y.at(row * a.y_stride * 4)
        inverse = inverse_rms(k, x, a.features).splat()
        scale = a.scale.convert("trunc", "i32").convert("bitcast", F32).splat()
        with k.range(k.i64(0), a.features, LANES) as i:
            value = x.at(i * 4).load(F32V) * inverse * a.weight.at(i * 4).load(F32V)
            y.at(i * 4).store((value + y.at(i * 4).load(F32V)) * scale if adds else value)
    return k


def sigmoid_gate_source(each: int) -> Kernel:
    """y *= sigmoid(x), fp32, x_stride and y_stride floats a row; an x is of so many features of y: 1, or whole vectors.
    shape: a pointer to {T}. Threads share out the rows."""
    k = Kernel("sigmoid_gate", "x y shape | features x_stride y_stride")
    a = k.arg
    begin, end = k.share(a.shape.load(I64, 8))
    with k.range(begin, end) as row, k.range(k.i64(0), a.features, LANES) as i:
        x, y = a.x.at((row * a.x_stride + i / each) * 4), a.y.at((row * a.y_stride + i) * 4)
        gate = x.load(F32V) if each == 1 else x.load(F32).splat()
        y.store(y.load(F32V) * cpu_math.sigmoid(k, gate))
    return k


def add_source() -> Kernel:
    """y += x, fp32 [T, features]. shape: a pointer to {T}. Threads share out the rows."""
    k = Kernel("add", "x y shape | features")
    a = k.arg
    begin, end = k.share(a.shape.load(I64, 8))
    with k.range(begin * a.features, end * a.features, LANES) as i:
        y = a.y.at(i * 4)
        y.store(y.load(F32V) + a.x.at(i * 4).load(F32V))
    return k


@cache
def add(isa: Isa) -> Native:
    return compile_kernel(add_source(), isa)


@cache
def sigmoid_gate(isa: Isa, each: int = 1) -> Native:
    return compile_kernel(sigmoid_gate_source(each), isa)


@cache
def norm(isa: Isa, *, adds: bool) -> Native:
    return compile_kernel(norm_source(adds=adds), isa)
