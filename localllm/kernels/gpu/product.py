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
from localllm.kernels.gpu.gemm import ProgramShape
from localllm.kernels.gpu.launch import KernelLaunch, run_all
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE

FEW_ROWS = 16  # of a step at most
_MOST_ROWS = 64  # of a program
_MOST_SUMS = 1 << 13  # of a program of 256 threads, which have three numbers for each
_MOST_WORDS = 1 << 13  # of weights that a program has on their way for each of three stages
_WARP = 32
_LARGE_GROUP = 128  # columns, of which a program holds half as many rows


@dataclass(frozen=True)
class Dispatch:
    """The kernel that takes so many rows on a kind of card, and how its work is cut: no bit of a result depends on
    that.

    gemv_rows: up to so many rows are multiplied by dot products of bytes, all else on the tensor cores; there, columns
    are shared out until there are `programs` of them for each multiprocessor, each with loads `stages` ahead.
    most_rows: that our kernels take, where Triton uses no tensor cores; more are for torch's operators.
    """

    multiprocessors: int
    gemv_rows: int = 4
    most_rows: int = 1 << 30
    programs: int = 2
    stages: int = 4

    def shape(self, matrix: PackedMatrix, rows: int, gate: Gate | None = None, heads: int = 1) -> ProgramShape:
        """A program's loads are 16 bytes a thread where rows are few; where they are many, its sums fit into
        registers. With a gate, it has the rows of W for whole groups of codes; with heads, rows of one of them."""
        each = min(_MOST_ROWS, max(16, triton.next_power_of_2(rows)))
        weight_rows = 64 if each < _MOST_ROWS or matrix.group >= _LARGE_GROUP else 128
        if gate is not None:
            weight_rows = max(weight_rows, 2 * gate.codes.group)
            each = min(each, _MOST_SUMS // weight_rows)
        if heads > 1:
            own = matrix.tiles // heads * TILE
            weight_rows = min(weight_rows, own & -own)
        threads = max(_WARP, min(256, weight_rows * max(each, 32) // 32))
        if each == 16:  # groups of 16 columns have fewer bytes
            threads = max(_WARP, min(threads, weight_rows * matrix.words // 4))
        if each == 32 and weight_rows == 128:
            threads = 256  # half of them need 255 registers, and on sm_90 by Triton 3.6 more
        programs, parts = triton.cdiv(matrix.tiles * TILE, weight_rows) * triton.cdiv(rows, each), 1
        while parts < matrix.slices and programs * parts < self.programs * self.multiprocessors:
            parts *= 2
        stages = self.stages if each == 16 and weight_rows == 64 else 3
        if each == _MOST_ROWS and matrix.group >= _LARGE_GROUP:
            stages = 2  # a third takes registers that sm_120 has not
        if weight_rows * matrix.words >= _MOST_WORDS:
            stages = 2  # a third takes shared memory that sm_86 has not
        return ProgramShape(weight_rows, each, parts, threads // _WARP, stages)

    def product(
        self,
        x: Codes,
        matrix: PackedMatrix,
        y: Tensor | Gate,
        out_features: int,
        bias: Tensor | None,
        *,
        adds: bool,
        heads: int = 1,
    ) -> list[KernelLaunch]:
        """See `gemv`."""
        if len(x.q) <= self.gemv_rows:
            return [gemv.gemv(x, matrix, y, out_features, bias, adds=adds, heads=heads)]
        shape, partial = self.shape(matrix, len(x.q), y if isinstance(y, Gate) else None, heads), None
        if shape.parts > 1:
            partial = torch.empty((matrix.slices, len(x.q), out_features), device=x.q.device)
        return gemm.gemm(x, matrix, y, out_features, bias, adds=adds, shape=shape, partial=partial, heads=heads)


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


def multiply(
    x: Codes, matrix: PackedMatrix, y: Tensor | Gate, out_features: int, bias: Tensor | None, *, adds: bool
) -> None:
    run_all(dispatch_for(x.q.device).product(x, matrix, y, out_features, bias, adds=adds))


def by_head(x: Codes, matrix: PackedMatrix, y: Tensor, heads: int) -> None:
    """Multiply the columns of each head with its own rows of the matrix.

    x: of the columns of all heads, one head's behind the other's, each whole groups. matrix: as many rows of whole
    tiles for each head. y: fp32 [M, rows of the matrix].
    """
    run_all(dispatch_for(x.q.device).product(x, matrix, y, y.shape[1], None, adds=False, heads=heads))


def packed_linear(x: Tensor, matrix: PackedMatrix, out_features: int) -> Tensor:
    """x [M, K], K as in the matrix or less by its padding -> [M, out_features] of x's dtype."""
    y = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    if len(x):
        codes = Codes.of(len(x), matrix)
        to_codes(x, codes, x.shape[1]).run()
        multiply(codes, matrix, y, out_features, None, adds=False)
    return y
