"""Blocks of GGUF files into the tiles that our kernels read, without a pass over single codes between them.

16 rows are read a 32-bit word at a time: four bytes that stay beside each other in every layout. One core (Zen 5)
brings 18 billion 4-bit codes a second into tiles, 10 of bytes; torch's operators 0.5, and a hundredth of that beside
other work, as each waits for all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from localllm.kernels.cpu_ir import F32V, I32, I32V, LANES, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.sizes import TILE

_NIBBLES, _PAIRS, _ONES = 0x0F0F0F0F, 0x03030303, 0x01010101
_SPREAD = 0x00204081  # times four bits: each in a byte of its own, beside what `_ONES` masks out
_SIGN_BITS = -0x7F7F7F80  # of each byte
_HALFS = vector_of("half")

Codes = Literal["halves", "bytes", "five", "five-k", "six-k", "two-k", "three-k"]
Scales = Literal["half", "two", "k2", "k3", "k4", "k6", "xs", "e8m0", "e4m3"]
_GROUPS: Mapping[Scales, int] = MappingProxyType(
    {"half": 1, "two": 1, "k2": 16, "k3": 16, "k4": 8, "k6": 16, "xs": 8, "e8m0": 1, "e4m3": 4}
)


@dataclass(frozen=True)
class BlockForm:
    """Where codes and scales are in a block of `columns` columns, in `num_bytes` bytes.

    codes: how they lie from byte `begin` on. "halves": the low nibbles of `run` bytes are as many columns, their high
    nibbles the next ones. "bytes": a byte a code. The others are named by their bits, "k" for the types with 256
    columns.
    scales: how those of the block's groups lie. "half": an fp16 at its beginning. "two": a second one, the bias.
    "e8m0", "e4m3": a byte each, as MXFP4 and NVFP4 have them. The others are those of Q2_K, Q3_K, Q4_K, Q6_K, IQ4_XS.
    """

    columns: int
    num_bytes: int
    codes: Codes
    begin: int
    scales: Scales
    run: int = 16

    @property
    def groups(self) -> int:
        """Scales of a block."""
        return _GROUPS[self.scales]

    @property
    def is_nibbles(self) -> bool:
        """Return whether tiles have 4 bits a code, else 8."""
        return self.codes in ("halves", "two-k", "three-k")

    @property
    def tile_bytes(self) -> int:
        """Bytes of the codes of a block's columns in 16 rows."""
        return self.columns * (TILE // 2 if self.is_nibbles else TILE)


def repack_source(form: BlockForm) -> Kernel:
    """blocks uint8 [rows, row_bytes] -> qweight, scale and bias of `tile16`, or of `int8`. order: int64 [tiles * 16],
    the row of each row of the tiles. row_blocks: blocks of a row."""
    k = Kernel("repack", "blocks order qweight scale bias | tiles row_blocks row_bytes")
    a = k.arg
    with k.share_pairs(a.tiles, a.row_blocks) as (tile, first, last):
        order = a.order.at(tile * (8 * TILE))
        rows = _Rows(k, [a.blocks.at(order.at(8 * lane).load("i64", 8) * a.row_bytes) for lane in range(LANES)])
        with k.range(first, last) as number:
            block, place = rows.at(number * form.num_bytes), tile * a.row_blocks + number
            groups = place * (form.groups * 2 * TILE)
            _SCALES[form.scales](block, _Groups(k, a.scale.at(groups), a.bias.at(groups)))
            _CODES[form.codes](form, block, a.qweight.at(place * form.tile_bytes))
    return k


@dataclass(frozen=True)
class _Rows:
    """A block of each of 16 rows."""

    k: Kernel
    lanes: list[Value]

    def at(self, offset: Value) -> _Rows:
        return _Rows(self.k, [lane.at(offset) for lane in self.lanes])

    def words(self, offset: int, kind: str = I32) -> Value:
        """The word of each row at this byte."""
        vector = vector_of(kind)
        words = self.k.constant(vector, 0)
        for lane, row in enumerate(self.lanes):
            word = row.at(offset).load(kind, 1)
            words = self.k.emit(vector, f"insertelement {vector} {words.text}, {kind} {word.text}, i32 {lane}")
        return words

    def halfs(self, offset: int) -> Value:
        """The fp16 at this byte, widened."""
        return self.words(offset, "i16").convert("bitcast", _HALFS).convert("fpext", F32V)


@dataclass(frozen=True)
class _Groups:
    """Where the scales and biases of a block's groups go."""

    k: Kernel
    scale: Value
    bias: Value

    def store(self, group: int, scale: Value, bias: Value | None = None) -> None:
        """Store fp32 values as fp16."""
        self.scale.at(group * (2 * TILE)).store(scale.convert("fptrunc", _HALFS), 32)
        if bias is not None:
            self.bias.at(group * (2 * TILE)).store(bias.convert("fptrunc", _HALFS), 32)


# Codes. A vector of tiles has four columns of bytes, or eight of nibbles, whose first four are the low ones.


def _nibbles(first: Value, second: Value) -> Value:
    return first | (second << 4)


def _halves(form: BlockForm, block: _Rows, out: Value) -> None:
    for run in range(form.columns // (2 * form.run)):
        for octet in range(form.run // 8):
            at = form.begin + run * form.run + 8 * octet
            first, second = block.words(at), block.words(at + 4)
            vector = 64 * (run * (form.run // 4) + octet)
            out.at(vector).store(_nibbles(first & _NIBBLES, second & _NIBBLES), 64)
            high = ((first >> 4) & _NIBBLES) | (second & ~_NIBBLES)
            out.at(vector + 64 * (form.run // 8)).store(high, 64)


def _bytes(form: BlockForm, block: _Rows, out: Value) -> None:
    for word in range(form.columns // 4):
        out.at(64 * word).store(block.words(form.begin + 4 * word), 64)


def _less(codes: Value, zero: int) -> Value:
    """Each byte, of 0..127, less a number, as a signed byte."""
    return ((codes | _SIGN_BITS) - zero * _ONES) ^ _SIGN_BITS


def _five(form: BlockForm, block: _Rows, out: Value) -> None:
    """Q5_0 and Q5_1: the fifth bits of 32 columns are a word in front of the nibbles."""
    fifths = block.words(form.begin - 4)
    for word in range(4):
        low = block.words(form.begin + 4 * word)
        for half, nibbles in enumerate((low & _NIBBLES, (low >> 4) & _NIBBLES)):
            bits = (((fifths >> (16 * half + 4 * word)) & 15) * _SPREAD) & _ONES
            code = nibbles | (bits << 4)
            out.at(64 * (4 * half + word)).store(_less(code, 16) if form.scales == "half" else code, 64)


def _five_k(form: BlockForm, block: _Rows, out: Value) -> None:
    """Q5_K: nibbles as in Q4_K; a byte before them has the fifth bits of eight columns, 32 apart."""
    for word in range(8):
        fifths = block.words(form.begin - 32 + 4 * word)
        for run in range(4):
            low = block.words(form.begin + 32 * run + 4 * word)
            for half, nibbles in enumerate((low & _NIBBLES, (low >> 4) & _NIBBLES)):
                part = 2 * run + half
                out.at(64 * (8 * part + word)).store(nibbles | (((fifths >> part) & _ONES) << 4), 64)


def _six_k(_form: BlockForm, block: _Rows, out: Value) -> None:
    """Q6_K: of 128 columns, 64 bytes of nibbles in halves, and behind those of the block 32 bytes of two bits."""
    for run in range(2):
        for word in range(8):
            pairs = block.words(128 + 32 * run + 4 * word)
            for half in (0, 1):
                low = block.words(64 * run + 32 * half + 4 * word)
                for upper, nibbles in enumerate((low & _NIBBLES, (low >> 4) & _NIBBLES)):
                    part = half + 2 * upper
                    code = nibbles | (((pairs >> (2 * part)) & _PAIRS) << 4)
                    out.at(64 * (32 * run + 8 * part + word)).store(_less(code, 32), 64)


def _two_k(form: BlockForm, block: _Rows, out: Value) -> None:
    """Q2_K: the four pairs of bits of a byte are columns 32 apart. Q3_K: a third bit, of columns 32 apart in a byte of
    the first 32; 4 is added, as the table of its values begins at -8 and they at -4."""
    for run in range(2):
        for octet in range(4):
            at = form.begin + 32 * run + 8 * octet
            words = [block.words(at), block.words(at + 4)]
            thirds = [block.words(8 * octet), block.words(8 * octet + 4)] if form.codes == "three-k" else None
            for part in range(4):
                codes = [(word >> (2 * part)) & _PAIRS for word in words]
                if thirds is not None:
                    bits = [((third >> (4 * run + part)) & _ONES) << 2 for third in thirds]
                    codes = [(code | bit) + 4 * _ONES for code, bit in zip(codes, bits, strict=True)]
                out.at(64 * (16 * run + 4 * part + octet)).store(_nibbles(*codes), 64)


_CODES: Mapping[Codes, Callable[[BlockForm, _Rows, Value], None]] = MappingProxyType(
    {
        "halves": _halves,
        "bytes": _bytes,
        "five": _five,
        "five-k": _five_k,
        "six-k": _six_k,
        "two-k": _two_k,
        "three-k": _two_k,
    }
)

# Scales


def _number(value: Value) -> Value:
    return value.convert("sitofp", F32V)


def _half(block: _Rows, groups: _Groups) -> None:
    groups.store(0, block.halfs(0))


def _two(block: _Rows, groups: _Groups) -> None:
    groups.store(0, block.halfs(0), block.halfs(2))


def _minus(k: Kernel, value: Value) -> Value:
    return k.f32v(-0.0) - value


def _k2(block: _Rows, groups: _Groups) -> None:
    factor, least = block.halfs(80), block.halfs(82)
    for group in range(16):
        byte = block.words(group, "i8").convert("zext", I32V)
        groups.store(group, factor * _number(byte & 15), _minus(block.k, least * _number(byte >> 4)))


def _k3(block: _Rows, groups: _Groups) -> None:
    """Four bits of the first eight and of the last eight in the nibbles of eight bytes, then two more of each."""
    factor = block.halfs(108)
    low, high = [block.words(96), block.words(100)], block.words(104)
    for group in range(16):
        nibble = (low[group % 8 // 4] >> (8 * (group % 4) + 4 * (group // 8))) & 15
        pair = (high >> (8 * (group % 4) + 2 * (group // 4))) & 3
        groups.store(group, factor * _number((nibble | (pair << 4)) - 32))


def _k4(block: _Rows, groups: _Groups) -> None:
    """Eight scales and eight minimums in 12 bytes: six bits of the first four in bytes of their own, four bits of the
    others in the last four bytes, and two on top of the first ones."""
    factor, least = block.halfs(0), block.halfs(2)
    scales, minimums, rest = block.words(4), block.words(8), block.words(12)
    for group in range(8):
        shift = 8 * (group % 4)
        if group < 4:
            scale, minimum = (scales >> shift) & 63, (minimums >> shift) & 63
        else:
            scale = ((rest >> shift) & 15) | (((scales >> (shift + 6)) & 3) << 4)
            minimum = ((rest >> (shift + 4)) & 15) | (((minimums >> (shift + 6)) & 3) << 4)
        groups.store(group, factor * _number(scale), _minus(block.k, least * _number(minimum)))


def _k6(block: _Rows, groups: _Groups) -> None:
    factor = block.halfs(208)
    for group in range(16):
        byte = block.words(192 + group, "i8").convert("sext", I32V)
        groups.store(group, factor * _number(byte))


def _xs(block: _Rows, groups: _Groups) -> None:
    factor, high, low = block.halfs(0), block.words(2, "i16").convert("zext", I32V), block.words(4)
    for group in range(8):
        scale = ((low >> (4 * group)) & 15) | (((high >> (2 * group)) & 3) << 4)
        groups.store(group, factor * _number(scale - 32))


def _e8m0(block: _Rows, groups: _Groups) -> None:
    """2^(byte - 128), half of what it means, as the table has twice FP4's values; below 2^-126 it is nothing."""
    exponent = block.words(0, "i8").convert("zext", I32V)
    bits = (exponent - 1) << 23
    groups.store(0, exponent.compare("ult", 2).choose(block.k.constant(I32V, 0), bits).convert("bitcast", F32V))


def _e4m3(block: _Rows, groups: _Groups) -> None:
    """Half of what the byte means without its sign, as the table has twice FP4's values; 127 is no number, and means 0.
    Its bits in the place of fp16's make a number 2^-8 as large."""
    for group in range(4):
        byte = block.words(group, "i8").convert("zext", I32V)
        value = ((byte & 127) << 7).convert("trunc", vector_of("i16")).convert("bitcast", _HALFS).convert("fpext", F32V)
        groups.store(group, byte.compare("ne", 127).choose(value * 128.0, block.k.f32v(0)))


_SCALES: Mapping[Scales, Callable[[_Rows, _Groups], None]] = MappingProxyType(
    {
        "half": _half,
        "two": _two,
        "k2": _k2,
        "k3": _k3,
        "k4": _k4,
        "k6": _k6,
        "xs": _xs,
        "e8m0": _e8m0,
        "e4m3": _e4m3,
    }
)


@cache
def _kernel(isa: Isa, form: BlockForm) -> Native:
    # LLVM's passes take 1 to 4 s over thousands of words put into vectors, and make nothing of it faster.
    return compile_kernel(repack_source(form), isa, speed_level=0)


@cache
def supports(form: BlockForm) -> bool:
    """Return whether `repack` can run on this machine; asking compiles the kernel."""
    return compiles(lambda: _kernel(best_isa(), form))


def repack(blocks: Tensor, form: BlockForm, out: Mapping[str, Tensor], order: Tensor | None = None) -> None:
    """Fill `qweight`, `scale` and, where there is one, `bias` with the rows of blocks in this order, int64 [N].

    blocks: uint8 [N, blocks a row, block bytes], N % 16 == 0; all are contiguous. The caller asks `supports` first.
    """
    N, row_blocks, block_bytes = blocks.shape
    assert N % TILE == 0 and block_bytes == form.num_bytes and supports(form)
    assert all(len(tensor) == N // TILE and tensor.is_contiguous() for tensor in out.values())
    step = _kernel(best_isa(), form).step(
        blocks=blocks,
        order=torch.arange(N) if order is None else order,
        qweight=out["qweight"],
        scale=out["scale"],
        bias=out.get("bias", 0),
        tiles=N // TILE,
        row_blocks=row_blocks,
        row_bytes=row_blocks * block_bytes,
    )
    Tape([step]).run()
