"""Intel's AMX, as the CPU kernels use it: 16 rows of 64 bytes times 64 x 16 bytes in one instruction."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

from localllm.kernels.cpu_ir import I32V, Kernel, Value

_ROWS, _ROW_BYTES = 16, 64
_SYS_ARCH_PRCTL, _REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18  # Linux, x86-64


@cache
def has_amx() -> bool:
    """Return whether this process may use AMX; on Linux it has to ask, once."""
    from llvmlite import binding as llvm

    features = llvm.get_host_cpu_features()
    if platform.system() != "Linux" or not all(features.get(name) for name in ("amx-tile", "amx-int8")):
        return False
    ask = ctypes.CDLL(None).syscall
    return bool(ask(_SYS_ARCH_PRCTL, _REQ_XCOMP_PERM, _TILE_DATA) == 0)


class AmxTiles:
    """Tiles of up to 16 rows of 64 bytes: four of sums, two of rows, two of columns. The rows of the first of `ROWS`
    go with the first two of `SUMS`, those of the second with the others."""

    SUMS, ROWS, COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)

    def __init__(self, k: Kernel) -> None:
        self.k = k
        self._config = k.stack(I32V)

    def configure(self, second_rows: Value) -> None:
        """Say how large the tiles are, before anything else. second_rows: 1 to 16, of the second of `ROWS`; the fewer,
        the faster are its products."""
        k = self.k
        widths = _ROW_BYTES.to_bytes(2, "little") * 8
        palette = bytes([1]) + bytes(15) + widths + bytes(16) + bytes([_ROWS] * 8) + bytes(8)
        for at in range(0, len(palette), 8):
            self._config.at(at).store(k.i64(int.from_bytes(palette[at : at + 8], "little")), 8)
        for tile in (*self.SUMS[2:], self.ROWS[1]):
            self._config.at(48 + tile).store(second_rows.convert("trunc", "i8"), 1)
        k.call("void", "llvm.x86.ldtilecfg", self._config)

    def release(self) -> None:
        self.k.call("void", "llvm.x86.tilerelease")

    def clear(self, tile: int) -> None:
        self.k.call("void", "llvm.x86.tilezero", self._number(tile))

    def load(self, tile: int, at: Value, stride: int) -> None:
        """16 rows of 64 bytes, `stride` bytes from each other; of columns, a row has four bytes of each."""
        self.k.call("void", "llvm.x86.tileloadd64", self._number(tile), at, self.k.i64(stride))

    def multiply(self, sums: int, rows: int, columns: int, *, is_signed: bool) -> None:
        """Add rows . columns to the sums. is_signed: whether the bytes of rows are; those of columns are."""
        name = "llvm.x86.tdpbssd" if is_signed else "llvm.x86.tdpbusd"
        self.k.call("void", name, *map(self._number, (sums, rows, columns)))

    def store(self, tile: int, at: Value, stride: int) -> None:
        """Rows of 16 int32, `stride` bytes from each other."""
        self.k.call("void", "llvm.x86.tilestored64", self._number(tile), at, self.k.i64(stride))

    def _number(self, tile: int) -> Value:
        return self.k.constant("i8", tile)
