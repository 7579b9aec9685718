"""AMX's tiles by other instructions, so that a CPU without them computes what kernels do with tiles."""

from __future__ import annotations

from localllm.kernels.cpu_amx import AmxTiles
from localllm.kernels.cpu_ir import I32, I32V, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_matmul import SIGN_BITS

TILE_BYTES, ROW_BYTES, ROWS = 1024, 64, 16


class SoftwareAmx(AmxTiles):
    """All tiles have 16 rows, however few are asked for."""

    isa: Isa

    def __init__(self, k: Kernel) -> None:
        self.k = k
        self._tiles = k.stack(I32V, 8 * ROWS)

    def configure(self, second_rows: Value) -> None:
        pass

    def release(self) -> None:
        pass

    def _row(self, tile: int, row: Value) -> Value:
        return self._tiles.at(tile * TILE_BYTES).at(row * ROW_BYTES)

    def clear(self, tile: int) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(ROWS)) as row:
            self._row(tile, row).store(self.k.constant(I32V, 0), 64)

    def load(self, tile: int, at: Value, stride: int) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(ROWS)) as row:
            self._row(tile, row).store(at.at(row * stride).load(I32V, 1), 64)

    def store(self, tile: int, at: Value, stride: int) -> None:
        with self.k.range(self.k.i64(0), self.k.i64(ROWS)) as row:
            at.at(row * stride).store(self._row(tile, row).load(I32V, 64), 1)

    def multiply(self, sums: int, rows: int, columns: int, *, is_signed: bool) -> None:
        k, dot = self.k, self.isa.dot
        with k.range(k.i64(0), k.i64(ROWS)) as row, k.range(k.i64(0), k.i64(ROWS)) as quad:
            total = self._row(sums, row).load(I32V, 64)
            four, others = self._row(rows, row).at(quad * 4).load(I32).splat(), self._row(columns, quad).load(I32V, 64)
            if is_signed:  # one of both has no sign in a product: 128 more, which is taken away again
                more = dot(k, k.constant(I32V, 0), k.constant(I32V, 0) ^ SIGN_BITS, four)
                total = dot(k, total, others ^ SIGN_BITS, four) - more
            else:
                total = dot(k, total, four, others)
            self._row(sums, row).store(total, 64)
