"""y = x @ W.T for packed weights on a GPU, by the kernel that suits the number of rows; a row's bits are the same from
either."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from localllm.kernels.gpu import gemm, gemv
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.dequantize import dequantize, slab_tiles
from localllm.kernels.gpu.gemm import ProgramShape
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.tile16 import TILE, PackedMatrix

FEW_ROWS = 16  # of a step: each has the same bits whatever the others are, in any kernel
MOST_ROWS = gemm.MOST_ROWS  # above, the library's product of dequantized weights is faster
SLAB_WEIGHTS = 1 << 24  # 32 MiB of bf16: what stays in a large card's second cache until it is multiplied
_THREAD_BYTES, _WARP = 16, 32
_MOST_PARTS = 8


@dataclass(frozen=True)
class Dispatch:
    """The kernel that takes so many rows on a kind of card, and how its work is cut: no bit of a result depends on
    that.

    activation_bits: 8, or 16 (bf16) where that is as fast. gemv_rows: up to so many rows of 8 bits are multiplied by
    dot products of bytes, all else on the tensor cores; there, columns are shared out until there are `programs` of
    them for each multiprocessor, each with loads `stages` ahead.
    """

    multiprocessors: int
    activation_bits: int = 8
    gemv_rows: int = 4
    programs: int = 2
    stages: int = 4

    def shape(self, matrix: PackedMatrix, rows: int) -> ProgramShape:
        """A program's loads are 16 bytes a thread where rows are few; where they are many, its sums that wait for
        others fit into registers."""
        weight_rows = 64 if rows <= 16 else 32
        tile_bytes = weight_rows * matrix.group * matrix.bits // 8
        num_warps = min(4, tile_bytes // (_THREAD_BYTES * _WARP)) if rows <= 16 else 4 if rows <= 32 else 8
        programs, parts = triton.cdiv(matrix.tiles * TILE, weight_rows), 1
        while parts < min(_MOST_PARTS, matrix.slices) and programs * parts < self.programs * self.multiprocessors:
            parts *= 2
        return ProgramShape(weight_rows, parts, num_warps, self.stages)

    def product(
        self, x: Codes, matrix: PackedMatrix, y: Tensor, out_features: int, bias: Tensor | None, *, adds: bool
    ) -> list[KernelLaunch]:
        """x of 1 to MOST_ROWS rows; see `gemv`."""
        rows = len(x.q)
        if rows <= self.gemv_rows and x.bits == 8:
            return [gemv.gemv(x, matrix, y, out_features, bias, adds=adds)]
        shape = self.shape(matrix, rows)
        partial = torch.empty((shape.parts, rows, out_features), device=y.device) if shape.parts > 1 else None
        return gemm.gemm(x, matrix, y, out_features, bias, adds=adds, shape=shape, partial=partial)


def new_codes(rows: int, matrix: PackedMatrix) -> Codes:
    """Return a buffer for the rows that this matrix is multiplied with."""
    device = matrix.qweight.device
    return Codes.empty(rows, matrix.in_features, matrix.group, device, dispatch_for(device).activation_bits)


@cache
def dispatch_for(device: torch.device) -> Dispatch:
    if device.type != "cuda":  # the interpreter, where a program takes as long however much it does
        return Dispatch(multiprocessors=1, gemv_rows=0)
    card = torch.cuda.get_device_properties(device)
    return Dispatch(card.multi_processor_count, **_tables().get(f"sm_{card.major}{card.minor}", {}))


@cache
def _tables() -> dict[str, dict[str, int]]:
    """Return the tables by the card's capability, as `tools/tune_kernels.py` measured them, or as they were
    estimated."""
    tables = json.loads((Path(__file__).parent / "dispatch.json").read_text(encoding="utf-8"))
    names = [field.name for field in fields(Dispatch)]
    return {sm: {name: table[name] for name in names if name in table} for sm, table in tables.items()}


def multiply(x: Codes, matrix: PackedMatrix, y: Tensor, out_features: int, bias: Tensor | None, *, adds: bool) -> None:
    for launch in dispatch_for(y.device).product(x, matrix, y, out_features, bias, adds=adds):
        launch.run()


def multiply_dequantized(x: Tensor, matrix: PackedMatrix, y: Tensor) -> None:
    """x [M, K] and y [M, N] of the dtype that is multiplied in, for any M: slab by slab through the library."""
    out_features, step = y.shape[1], slab_tiles(x.shape[1], SLAB_WEIGHTS)
    slab = torch.empty((min(step * TILE, matrix.tiles * TILE), x.shape[1]), dtype=x.dtype, device=x.device)
    for first in range(0, matrix.tiles, step):
        tiles, begin = min(step, matrix.tiles - first), first * TILE
        rows = min(out_features - begin, tiles * TILE)
        dequantize(matrix, slab, first, tiles, out_features).run()
        torch.mm(x, slab[:rows].T, out=y[:, begin : begin + rows])


def packed_linear(x: Tensor, matrix: PackedMatrix, out_features: int) -> Tensor:
    """x [M, K], K as in the matrix or less by its padding -> [M, out_features] of x's dtype."""
    y = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    if len(x) > MOST_ROWS:
        multiply_dequantized(x, matrix, y)
    elif len(x):
        codes = new_codes(len(x), matrix)
        to_codes(x, codes, x.shape[1]).run()
        multiply(codes, matrix, y, out_features, None, adds=False)
    return y
