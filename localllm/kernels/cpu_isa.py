"""The instruction sets that the CPU kernels are compiled for, and how each multiplies bytes."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from typing import Literal

from localllm.kernels.cpu_ir import I32V, Kernel, Value, vector_of

LLVM_TARGETS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}

PAIRS_A_SUM = 8  # see Isa.pairs


@dataclass(frozen=True)
class Isa:
    """needs: LLVM's names of what a CPU must have. max_rows: of activations, whose sums fit into the registers beside a
    tile of weights."""

    name: Literal["avx512-vnni", "avx-vnni", "avx2", "neon-dot"]
    machine: Literal["x86_64", "aarch64"]
    cpu: str  # as LLVM names it, the kernels use that and `needs` alone; "": this very CPU, all that it has
    needs: tuple[str, ...]
    max_rows: int

    @property
    def can_have_amx(self) -> bool:
        """Return whether kernels may use `cpu_amx`, if this CPU has AMX."""
        return self.name == "avx512-vnni"

    @property
    def multiplies_whole_bytes(self) -> bool:
        """Return whether `dot` takes any unsigned byte; else 15 is the most, as pairs of products must fit 16 bits."""
        return self.name in ("avx512-vnni", "avx-vnni")

    def tiles_side_by_side(self, rows: int) -> int:
        """Streams of weights that a thread reads at once: see `cpu_matmul`."""
        return 4 if rows == 1 and self.name == "avx512-vnni" and not _is_amd() else 1

    @property
    def sums(self) -> int:
        """Return how many vectors of 16 fp32 sums stay in registers, half of which they take.

        With 4 instead of 16, AVX2 attends to 2048 keys in 4.5 ms instead of 5.7 (TinyLlama's 22 layers, one core, Zen
        5): 8 chains of additions are what two units of four cycles each can do.
        """
        return 16 if self.name == "avx512-vnni" else 4

    @property
    def adds_in_16_bits(self) -> bool:
        """Return whether nibbles are multiplied with `pairs` and `widened`; else with `dot`."""
        return self.name == "avx2"

    def pairs(self, kernel: Kernel, unsigned: Value, signed: Value) -> Value:
        """Sums of two products of bytes, <32 x i16>, of <16 x i32>. unsigned: 0..15, signed: -127..127.

        None is beyond 2 * 15 * 127 = 3,810, so that PAIRS_A_SUM of them add up to 30,480 and fit 16 bits with a sign.
        """
        operands = [_parts(kernel, value.convert("bitcast", vector_of("i8", 64)), 32) for value in (unsigned, signed)]
        products = [
            kernel.call(vector_of("i16", 16), "llvm.x86.avx2.pmadd.ub.sw", *pair)
            for pair in zip(*operands, strict=True)
        ]
        return _joined(kernel, products)

    def widened(self, kernel: Kernel, pairs: Value) -> Value:
        """Sums of two neighbours, <16 x i32>."""
        ones = kernel.constant(vector_of("i16", 16), 1)
        parts = _parts(kernel, pairs, 16)
        return _joined(kernel, [kernel.call(vector_of("i32", 8), "llvm.x86.avx2.pmadd.wd", p, ones) for p in parts])

    def looked_up(self, kernel: Kernel, table: Value, nibbles: Value) -> Value:
        """The bytes of a table, <16 x i8>, in place of the nibbles 0..15 that the bytes of <16 x i32> are."""
        lanes = 64 if self.name == "avx512-vnni" else 16 if self.machine == "aarch64" else 32
        kind = vector_of("i8", lanes)
        bytes_of = kernel.shuffle(table, table, [*range(16)] * (lanes // 16))
        parts = []
        for part in _parts(kernel, nibbles.convert("bitcast", vector_of("i8", 64)), lanes):
            if self.machine == "aarch64":
                parts.append(kernel.call(kind, "llvm.aarch64.neon.tbl1.v16i8", bytes_of, part))
            else:
                name = "avx512.pshuf.b.512" if lanes == 64 else "avx2.pshuf.b"
                parts.append(kernel.call(kind, f"llvm.x86.{name}", bytes_of, part))
        return _joined(kernel, parts).convert("bitcast", I32V)

    def dot(self, kernel: Kernel, total: Value, unsigned: Value, signed: Value) -> Value:
        """total + the dot products of four bytes a lane, all <16 x i32>; see `multiplies_whole_bytes`."""
        if self.name == "avx512-vnni":
            return kernel.call(I32V, "llvm.x86.avx512.vpdpbusd.512", total, unsigned, signed)
        lanes = 4 if self.machine == "aarch64" else 8
        operands = [_parts(kernel, value, lanes) for value in (total, unsigned, signed)]
        return _joined(kernel, [self._narrow_dot(kernel, *part) for part in zip(*operands, strict=True)])

    def dot_words(self, kernel: Kernel, total: Value, words: Value, others: Value) -> Value:
        """total + the dot products of two words with signs a lane, all <16 x i32>, where `multiplies_whole_bytes`."""
        if self.name == "avx512-vnni":
            return kernel.call(I32V, "llvm.x86.avx512.vpdpwssd.512", total, words, others)
        operands = zip(*(_parts(kernel, value, 8) for value in (total, words, others)), strict=True)
        return _joined(kernel, [kernel.call(part[0].kind, "llvm.x86.avx512.vpdpwssd.256", *part) for part in operands])

    def _narrow_dot(self, kernel: Kernel, total: Value, unsigned: Value, signed: Value) -> Value:
        if self.name == "avx-vnni":
            return kernel.call(total.kind, "llvm.x86.avx512.vpdpbusd.256", total, unsigned, signed)
        octets = vector_of("i8", 16)
        operands = unsigned.convert("bitcast", octets), signed.convert("bitcast", octets)
        return kernel.call(total.kind, "llvm.aarch64.neon.sdot.v4i32.v16i8", total, *operands)


def _parts(kernel: Kernel, vector: Value, lanes: int) -> list[Value]:
    """A vector in pieces of so many lanes: LLVM keeps each in a register of its own."""
    return [kernel.shuffle(vector, vector, list(range(at, at + lanes))) for at in range(0, len_of(vector), lanes)]


def _joined(kernel: Kernel, parts: list[Value]) -> Value:
    """The opposite of `_parts`, of 2, 4, 8 ... pieces."""
    while len(parts) > 1:
        parts = [
            kernel.shuffle(low, high, list(range(2 * len_of(low))))
            for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def len_of(vector: Value) -> int:
    return int(vector.kind[1 : vector.kind.index(" ")])


_AVX2 = ("avx2", "fma", "f16c")
ISAS = (
    Isa(
        "avx512-vnni", "x86_64", "", (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"), max_rows=12
    ),
    Isa("avx-vnni", "x86_64", "x86-64", (*_AVX2, "avxvnni"), max_rows=4),
    Isa("avx2", "x86_64", "x86-64", _AVX2, max_rows=4),
    Isa("neon-dot", "aarch64", "", ("dotprod",), max_rows=4),
)
MOST_ROWS = max(isa.max_rows for isa in ISAS)


@cache
def _is_amd() -> bool:
    from llvmlite import binding as llvm

    return str(llvm.get_host_cpu_name()).startswith("znver")


@cache
def host_isas() -> tuple[Isa, ...]:
    """Return those that this CPU runs, the fastest first; empty where llvmlite is missing or does not load."""
    try:
        from llvmlite import binding as llvm
    except (ImportError, OSError):
        return ()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    features = llvm.get_host_cpu_features()
    return tuple(isa for isa in ISAS if isa.machine == machine and all(features.get(need) for need in isa.needs))
