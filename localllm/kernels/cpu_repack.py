"""Blocks of GGUF files into the tiles that our kernels read, without a pass over single codes between them.

16 rows are read a 32-bit word at a time: four bytes that stay beside each other in every layout. Types whose codes or
scales lie in other ways are read by torch (`models/checkpoints/gguf_types.py`). One core (Zen 5) brings 18 billion
4-bit codes a second into tiles, 10 of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from localllm.kernels.cpu_ir import F32V, I32, LANES, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.sizes import INT8_WORD, TILE, WORD

_NIBBLES, _PAIRS = 0x0F0F0F0F, 0x03030303
_SIGN_BITS, _MIDDLE = -0x7F7F7F80, 0x20202020  # of each byte: 128, and 32
_HALFS, _I16V = vector_of("half"), vector_of("i16")


@dataclass(frozen=True)
class BlockForm:
    """Where codes and scales are in a block of `columns` columns, in `num_bytes` bytes.

    codes: "halves": the low nibbles of so many bytes are as many columns, their high nibbles the next ones. "bytes": a
    byte a code. "six": Q6_K's, 64 bytes of low nibbles for 128 columns, and 32 bytes of two bits, which follow those of
    the whole block.
    begin, run: the byte at which codes begin, and the bytes of one run of them.
    scales: "half": an fp16 at the beginning of the block. "two": a second one, the bias. "k4": Q4_K's, of 6 bits each,
    with minimums. "k6": Q6_K's, a signed byte each, and one fp16 at the end.
    """

    columns: int
    num_bytes: int
    codes: Literal["halves", "bytes", "six"]
    begin: int
    run: int
    scales: Literal["half", "two", "k4", "k6"]

    @property
    def run_columns(self) -> int:
        return self.run * (1 if self.codes == "bytes" else 2)

    @property
    def groups(self) -> int:
        """Scales of a block."""
        return {"half": 1, "two": 1, "k4": 8, "k6": 16}[self.scales]

    @property
    def vectors(self) -> int:
        """Vectors of 16 rows that a run makes: of 8 columns in nibbles, or of 4 in bytes."""
        return self.run_columns // (WORD if self.codes == "halves" else INT8_WORD)


def repack_source(form: BlockForm) -> Kernel:
    """blocks uint8 [rows, row_bytes] -> qweight, scale and bias of `tile16`, or of `int8`. order: int64 [tiles * 16],
    the row of each row of the tiles. row_blocks: blocks of a row."""
    k = Kernel("repack", "blocks order qweight scale bias | tiles row_blocks row_bytes")
    a = k.arg
    with k.share_pairs(a.tiles, a.row_blocks) as (tile, first, last):
        order = a.order.at(tile * (8 * TILE))
        rows = _Rows(k, [a.blocks.at(order.at(8 * lane).load("i64", 8) * a.row_bytes) for lane in range(LANES)])
        with k.range(first, last) as block:
            own, number = rows.at(block * form.num_bytes), tile * a.row_blocks + block
            _SCALES[form.scales](own, number * (form.groups * 2 * TILE))
            runs = form.columns // form.run_columns
            for run in range(runs):
                out = a.qweight.at((number * runs + run) * (64 * form.vectors))
                codes = own.at(k.i64(form.begin + run * form.run))
                if form.codes == "halves":
                    _halves(codes, out, form.run)
                elif form.codes == "bytes":
                    for vector in range(form.vectors):
                        out.at(64 * vector).store(codes.words(4 * vector), 64)
                else:
                    _six_bits(codes, own.at(k.i64(runs * form.run + run * form.run // 2)), out)
    return k


@dataclass(frozen=True)
class _Rows:
    """Where something is in each of 16 rows."""

    k: Kernel
    lanes: list[Value]

    def at(self, offset: Value) -> _Rows:
        return _Rows(self.k, [lane.at(offset) for lane in self.lanes])

    def words(self, offset: int, kind: str = I32) -> Value:
        """The word of each row that is so many bytes on."""
        vector = vector_of(kind)
        words = self.k.constant(vector, 0)
        for lane, row in enumerate(self.lanes):
            word = row.at(offset).load(kind, 1)
            words = self.k.emit(vector, f"insertelement {vector} {words.text}, {kind} {word.text}, i32 {lane}")
        return words

    def halfs(self, offset: int) -> Value:
        return self.words(offset, "i16").convert("bitcast", _HALFS)


def _halves(codes: _Rows, out: Value, run: int) -> None:
    for octet in range(run // 8):
        first, second = codes.words(8 * octet), codes.words(8 * octet + 4)
        low = (first & _NIBBLES) | ((second & _NIBBLES) << 4)
        high = ((first >> 4) & _NIBBLES) | (second & ~_NIBBLES)
        out.at(64 * octet).store(low, 64)
        out.at(64 * (run // 8 + octet)).store(high, 64)


def _six_bits(low: _Rows, high: _Rows, out: Value) -> None:
    """Four parts of 32 columns, of which two share the bytes of their low nibbles."""
    for word in range(8):
        pairs = high.words(4 * word)
        for half in (0, 1):
            nibbles = low.words(32 * half + 4 * word)
            for upper in (0, 1):
                part = half + 2 * upper
                code = ((nibbles >> (4 * upper)) & _NIBBLES) | (((pairs >> (2 * part)) & _PAIRS) << 4)
                signed = ((code | _SIGN_BITS) - _MIDDLE) ^ _SIGN_BITS
                out.at(64 * (8 * part + word)).store(signed, 64)


def _half_scale(block: _Rows, at: Value) -> None:
    block.k.arg.scale.at(at).store(block.halfs(0), 32)


def _two_halves(block: _Rows, at: Value) -> None:
    _half_scale(block, at)
    block.k.arg.bias.at(at).store(block.halfs(2), 32)


def _k4_scales(block: _Rows, at: Value) -> None:
    """Eight scales and eight minimums in 12 bytes: six bits of the first four in bytes of their own, four bits of the
    others in the last four bytes, and two on top of the first ones."""
    a, factor, least = block.k.arg, block.halfs(0).convert("fpext", F32V), block.halfs(2).convert("fpext", F32V)
    scales, minimums, rest = block.words(4), block.words(8), block.words(12)
    for group in range(8):
        shift = 8 * (group % 4)
        if group < 4:
            scale, minimum = (scales >> shift) & 63, (minimums >> shift) & 63
        else:
            scale = ((rest >> shift) & 15) | (((scales >> (shift + 6)) & 3) << 4)
            minimum = ((rest >> (shift + 4)) & 15) | (((minimums >> (shift + 6)) & 3) << 4)
        place = at + group * (2 * TILE)
        a.scale.at(place).store((factor * scale.convert("sitofp", F32V)).convert("fptrunc", _HALFS), 32)
        bias = block.k.f32v(-0.0) - least * minimum.convert("sitofp", F32V)
        a.bias.at(place).store(bias.convert("fptrunc", _HALFS), 32)


def _k6_scales(block: _Rows, at: Value) -> None:
    factor = block.halfs(208).convert("fpext", F32V)
    for word in range(4):
        scales = block.words(192 + 4 * word)
        for byte in range(4):
            scale = (scales << (24 - 8 * byte)).shift_signed(24).convert("sitofp", F32V)
            place = at + (4 * word + byte) * (2 * TILE)
            block.k.arg.scale.at(place).store((factor * scale).convert("fptrunc", _HALFS), 32)


_SCALES = {"half": _half_scale, "two": _two_halves, "k4": _k4_scales, "k6": _k6_scales}


@cache
def _kernel(isa: Isa, form: BlockForm) -> Native:
    return compile_kernel(repack_source(form), isa)


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
