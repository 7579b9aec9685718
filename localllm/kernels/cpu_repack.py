"""The codes of GGUF's blocks into the tiles that our kernels read, without a pass over single codes between them.

Blocks of 16 rows are read a 32-bit word at a time: four bytes that stay beside each other in every layout. Types whose
codes are spread in other ways are read by torch (`models/checkpoints/gguf_types.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from localllm.kernels.cpu_ir import I32, I32V, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, compile_kernel, compiles
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.sizes import INT8_WORD, TILE, WORD

_NIBBLES, _PAIRS = 0x0F0F0F0F, 0x03030303
_SIGN_BITS, _MIDDLE = -0x7F7F7F80, 0x20202020  # of each byte: 128, and 32


@dataclass(frozen=True)
class CodePlaces:
    """Where the codes of a block are. Its columns are in chunks of `columns`, each of so many bytes, `begin` bytes into
    the block and one behind the other.

    halves: the low nibbles of a chunk's bytes are its first columns, the high ones the others. bytes: a byte a code.
    six: Q6_K's, 64 bytes of low nibbles, and for two chunks, behind all of these, 32 bytes of two bits a code each.
    """

    kind: Literal["halves", "bytes", "six"]
    columns: int
    chunk_bytes: int
    begin: int


def repack_source(places: CodePlaces) -> Kernel:
    """blocks uint8 [tiles * 16, row_bytes] -> qweight of `tile16`, or of `int8`. chunks: of a row."""
    k = Kernel("repack", "blocks qweight | tiles chunks row_bytes block_chunks block_bytes")
    a = k.arg
    vectors = places.columns // (INT8_WORD if places.kind != "halves" else WORD)  # of a tile and a chunk
    with k.share_pairs(a.tiles, a.chunks) as (tile, first, last), k.range(first, last) as chunk:
        rows = a.blocks.at(tile * TILE * a.row_bytes)
        block, own = chunk / a.block_chunks, chunk % a.block_chunks
        codes = rows.at(block * a.block_bytes).at(own * places.chunk_bytes).at(places.begin)
        out = a.qweight.at((tile * a.chunks + chunk) * (64 * vectors))
        if places.kind == "halves":
            _halves(k, codes, out, places.chunk_bytes)
        elif places.kind == "bytes":
            for word in range(vectors):
                out.at(64 * word).store(_column(k, codes, 4 * word), 64)
        else:
            high = rows.at(block * a.block_bytes).at(own * (places.chunk_bytes // 2)).at(2 * places.chunk_bytes)
            _six_bits(k, codes, high, out)
    return k


def _column(k: Kernel, rows: Value, offset: int) -> Value:
    """The word of each of 16 rows that is so many bytes into it."""
    words = k.constant(I32V, 0)
    for lane in range(LANES):
        word = rows.at(k.arg.row_bytes * lane).at(offset).load(I32, 1)
        words = k.emit(I32V, f"insertelement {I32V} {words.text}, i32 {word.text}, i32 {lane}")
    return words


def _halves(k: Kernel, codes: Value, out: Value, chunk_bytes: int) -> None:
    for octet in range(chunk_bytes // 8):
        first, second = (_column(k, codes, 8 * octet + 4 * half) for half in (0, 1))
        low = (first & _NIBBLES) | ((second & _NIBBLES) << 4)
        high = ((first >> 4) & _NIBBLES) | (second & ~_NIBBLES)
        out.at(64 * octet).store(low, 64)
        out.at(64 * (chunk_bytes // 8 + octet)).store(high, 64)


def _six_bits(k: Kernel, low: Value, high: Value, out: Value) -> None:
    """Four runs of 32 columns, of which two share the bytes of their low nibbles."""
    for word in range(8):
        pairs = _column(k, high, 4 * word)
        for half in (0, 1):
            nibbles = _column(k, low, 32 * half + 4 * word)
            for upper in (0, 1):
                run = half + 2 * upper
                code = ((nibbles >> (4 * upper)) & _NIBBLES) | (((pairs >> (2 * run)) & _PAIRS) << 4)
                signed = ((code | _SIGN_BITS) - _MIDDLE) ^ _SIGN_BITS
                out.at(64 * (8 * run + word)).store(signed, 64)


@cache
def _kernel(isa: Isa, places: CodePlaces) -> Native:
    return compile_kernel(repack_source(places), isa)


@cache
def supports(places: CodePlaces) -> bool:
    """Return whether `repack` can run on this machine; asking compiles the kernel."""
    return compiles(lambda: _kernel(best_isa(), places))


def repack(blocks: Tensor, places: CodePlaces, columns: int) -> Tensor:
    """blocks uint8 [N, blocks a row, block bytes], contiguous, N % 16 == 0 -> qweight int32 [N/16, K/8, 16], or int8
    [N/16, K/4, 16, 4]. columns: of a block. The caller asks `supports` first."""
    N, count, block_bytes = blocks.shape
    K, tiles = count * columns, N // TILE
    assert N % TILE == 0 and blocks.is_contiguous() and supports(places)
    if places.kind == "halves":
        qweight = torch.empty((tiles, K // WORD, TILE), dtype=torch.int32)
    else:
        qweight = torch.empty((tiles, K // INT8_WORD, TILE, INT8_WORD), dtype=torch.int8)
    words = {"tiles": tiles, "row_bytes": count * block_bytes, "block_bytes": block_bytes}
    words |= {"chunks": K // places.columns, "block_chunks": columns // places.columns}
    Tape([_kernel(best_isa(), places).step(blocks=blocks, qweight=qweight, **words)]).run()
    return qweight
