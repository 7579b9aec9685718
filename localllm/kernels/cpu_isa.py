"""The instruction sets that the CPU kernels are compiled for, and how each multiplies bytes."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from typing import Literal

from localllm.kernels.cpu_ir import I32V, Kernel, Value, vector_of

LLVM_TARGETS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


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
    def multiplies_whole_bytes(self) -> bool:
        """Return whether `dot` takes any unsigned byte; else 15 is the most, as pairs of products must fit 16 bits."""
        return self.name in ("avx512-vnni", "avx-vnni")

    def tiles_side_by_side(self, rows: int) -> int:
        """Streams of weights that a thread reads at once: see `cpu_matmul`."""
        return 4 if rows == 1 and self.name == "avx512-vnni" and not _is_amd() else 1

    def dot(self, kernel: Kernel, total: Value, unsigned: Value, signed: Value) -> Value:
        """total + the dot products of four bytes a lane, all <16 x i32>; see `multiplies_whole_bytes`."""
        if self.name == "avx512-vnni":
            return kernel.call(I32V, "llvm.x86.avx512.vpdpbusd.512", total, unsigned, signed)
        lanes = 4 if self.machine == "aarch64" else 8
        parts = []
        for first in range(0, 16, lanes):
            picked = list(range(first, first + lanes))
            part = [kernel.shuffle(value, value, picked) for value in (total, unsigned, signed)]
            parts.append(self._narrow_dot(kernel, *part))
        while len(parts) > 1:
            parts = [
                kernel.shuffle(low, high, list(range(2 * len_of(low))))
                for low, high in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]

    def _narrow_dot(self, kernel: Kernel, total: Value, unsigned: Value, signed: Value) -> Value:
        if self.name == "avx-vnni":
            return kernel.call(total.kind, "llvm.x86.avx512.vpdpbusd.256", total, unsigned, signed)
        if self.name == "avx2":
            pairs = kernel.call(
                vector_of("i16", 16),
                "llvm.x86.avx2.pmadd.ub.sw",
                unsigned.convert("bitcast", vector_of("i8", 32)),
                signed.convert("bitcast", vector_of("i8", 32)),
            )
            ones = kernel.constant(vector_of("i16", 16), 1)
            return total + kernel.call(total.kind, "llvm.x86.avx2.pmadd.wd", pairs, ones)
        octets = vector_of("i8", 16)
        operands = unsigned.convert("bitcast", octets), signed.convert("bitcast", octets)
        return kernel.call(total.kind, "llvm.aarch64.neon.sdot.v4i32.v16i8", total, *operands)


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
