"""bf16 weights kept in 12 bits, on the CPU: rows are unpacked into the first cache, and multiplied from there.

Unpacking takes 5 instructions for 32 weights (AVX512-BW), and what is multiplied is bf16 again: sums are those of
`cpu_gemv`, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from localllm.kernels import cpu_gemv
from localllm.kernels.bf12 import UNIT, UNIT_BYTES
from localllm.kernels.cpu_ir import I32, I64, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.tile16 import TILE

PREFETCH_BYTES = 4096
_LANES = 32
_I16, _I16V = "i16", vector_of("i16", _LANES)
_MANTISSA_AND_SIGN = -0x7F81  # 0x807f
_WORDS = "packed row exceptions"
_SIZES = "out_features units capacity"


def unpack_source(isa: Isa) -> Kernel:
    """packed, row, exceptions: see `bf12`. y bf16 [out_features, units * 128]. Threads share out the rows."""
    k = Kernel("unpack", f"{_WORDS} y | {_SIZES}")
    a = k.arg
    begin, end = k.share(a.out_features)
    with k.range(begin, end) as n:
        _unpack_row(k, isa, n, a.y.at(n * (a.units * (2 * UNIT))))
    return k


def gemv_source(isa: Isa, rows: int) -> Kernel:
    """x bf16 [rows, K], y bf16 [rows, N]; scratch: room for a row of bf16 for each thread."""
    k = Kernel("gemv_bf12", f"x {_WORDS} scratch y | {_SIZES} in_features")
    a = k.arg
    weights = a.scratch.at(k.thread * (a.units * (2 * UNIT)))
    begin, end = k.share(a.out_features)
    with k.range(begin, end) as n:
        _unpack_row(k, isa, n, weights)
        cpu_gemv.multiply_row(k, rows, n, weights)
    return k


def _unpack_row(k: Kernel, isa: Isa, n: Value, y: Value) -> None:
    a = k.arg
    packed, row = a.packed.at(n * (a.units * UNIT_BYTES)), a.row.at(n * 12)
    base, first, last = (row.at(4 * word).load(I32) for word in range(3))
    exponents = _exponents(k, isa, base.convert("trunc", _I16))
    with k.range(k.i64(0), a.units) as unit:
        at = packed.at(unit * UNIT_BYTES)
        for line in (0, 64, 128):
            k.prefetch(at.at(PREFETCH_BYTES + line))
        codes, *pairs = (at.at(line).load(_I16V, 64) for line in (0, 64, 128))
        for group in range(4):
            pair = pairs[group // 2]
            rest = (pair if group % 2 else pair << 8).shift_signed(8) & _MANTISSA_AND_SIGN
            value = rest | exponents(codes >> (4 * group) if group else codes)
            y.at(unit * (2 * UNIT) + group * (2 * _LANES)).store(value, 2)
    # A file that is written to while it is mapped gives wrong numbers, and must not reach beyond the row.
    tile, most = a.exceptions.at(n / TILE * a.capacity * 4), a.units * UNIT - 1
    with k.range(first.convert("zext", I64), k.smaller(last.convert("zext", I64), a.capacity)) as i:
        exception = tile.at(i * 4).load(I32)
        column = k.smaller((exception >> 16).convert("zext", I64), most)
        y.at(column * 2).store(exception.convert("trunc", _I16), 2)


def _exponents(k: Kernel, isa: Isa, base: Value) -> Callable[[Value], Value]:
    """Return the exponents of a vector of codes in the lowest 4 bits, in their place. base: i16, the meaning of code
    0."""
    bases = base.splat(_LANES)
    if isa.name == "avx512-vnni":  # a table, of which the fifth bit chooses nothing
        lanes = Value(k, _I16V, "<" + ", ".join(f"i16 {lane % 16}" for lane in range(_LANES)) + ">")
        table = lanes.compare("eq", 0).choose(k.constant(_I16V, 0), (lanes + bases) << 7)
        return lambda codes: k.call(_I16V, "llvm.x86.avx512.permvar.hi.512", table, codes)

    def computed(codes: Value) -> Value:
        code = codes & 15
        return code.compare("eq", 0).choose(k.constant(_I16V, 0), (code + bases) << 7)

    return computed


@cache
def _gemv(isa: Isa, rows: int) -> Native:
    return compile_kernel(gemv_source(isa, rows), isa)


@cache
def _unpack(isa: Isa) -> Native:
    return compile_kernel(unpack_source(isa), isa)


@cache
def is_available() -> bool:
    """Return whether this machine compiles the kernels; asking compiles one (15-150 ms, once)."""
    return compiles(lambda: _unpack(best_isa()))


@cache
def supports(rows: int, out_features: int, in_features: int) -> bool:
    """Return whether `gemv` takes it on this machine; asking compiles the kernel."""
    return cpu_gemv.supports(rows, out_features, in_features) and compiles(lambda: _gemv(best_isa(), rows))


def gemv(
    x: Tensor, packed: Tensor, row: Tensor, exceptions: Tensor, out_features: int, isa: Isa | None = None
) -> Tensor:
    """y = x @ W.T, the bits of `cpu_gemv` on W. x [M, K] bf16, contiguous, 1 <= M <= 8, K % 32 == 0. Returns [M, N]."""
    M, K = x.shape
    U = packed.shape[2]
    y = torch.empty((M, out_features), dtype=torch.bfloat16)
    scratch = torch.empty(torch.get_num_threads() * U * UNIT, dtype=torch.bfloat16)
    kernel = _gemv(isa or best_isa(), M)
    tensors = {"x": x, "packed": packed, "row": row, "exceptions": exceptions, "scratch": scratch, "y": y}
    sizes = {"out_features": out_features, "units": U, "capacity": exceptions.shape[1], "in_features": K}
    Tape([kernel.step(**tensors, **sizes)]).run()
    return y


def unpack(packed: Tensor, row: Tensor, exceptions: Tensor, isa: Isa | None = None) -> Tensor:
    """bf16 [tiles * 16, units * 128]."""
    tiles, rows, U, _ = packed.shape
    y = torch.empty((tiles * rows, U * UNIT), dtype=torch.bfloat16)
    kernel = _unpack(isa or best_isa())
    tensors = {"packed": packed, "row": row, "exceptions": exceptions, "y": y}
    sizes = {"out_features": tiles * rows, "units": U, "capacity": exceptions.shape[1]}
    Tape([kernel.step(**tensors, **sizes)]).run()
    return y
