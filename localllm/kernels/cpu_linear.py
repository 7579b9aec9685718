"""A matrix in INT4 or INT8 and the INT8 activations that it is multiplied with, as steps of a tape."""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_matmul, cpu_quantize
from localllm.kernels.cpu_isa import MOST_ROWS, Isa
from localllm.kernels.cpu_jit import Native, best_isa
from localllm.kernels.cpu_matmul import is_available as is_available
from localllm.kernels.cpu_tape import Arguments, Tape
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE

Step = tuple[Native, Arguments]


def float_bits(number: float) -> int:
    """Return the whole number by which a kernel's argument carries a float."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


class Activations:
    """Room for the INT8 form of up to `rows` rows of up to `features` columns, and what says how many there are now."""

    def __init__(self, rows: int, features: int, smallest_group: int) -> None:
        padded = rows + MOST_ROWS  # the last block may not be full
        groups = -(-features // smallest_group)
        self.q = torch.zeros(padded * features, dtype=torch.int8)
        self.groups = {name: torch.zeros(padded * groups) for name in ("x_scale", "x_bias")}
        self.groups["x_offset"] = torch.zeros(padded * groups, dtype=torch.int32)
        self.shape = torch.zeros(3, dtype=torch.int64)  # rows, rows a block, blocks
        self.rows = self.block_rows = 0

    def resize(self, rows: int, isa: Isa) -> int:
        """Set the number of rows; return how many a block has."""
        block_rows = cpu_matmul.rows_a_block(isa, rows)
        self.shape[:] = torch.tensor((rows, block_rows, -(-rows // block_rows)))
        self.rows, self.block_rows = rows, block_rows
        return block_rows

    def quantize(self, kernel: Native, x: Tensor, group: int, features: int, **rest: Tensor | int) -> Step:
        """See `cpu_quantize`; rest: weight, stride, eps where they matter."""
        words = {"weight": 0, "stride": features, "eps": 0, "groups": features // group} | rest | self.groups
        return kernel.step(x=x, q=self.q, shape=self.shape, **words)

    def multiply(self, kernel: Native, matrix: PackedMatrix, y: Tensor, features: int, bias: Tensor | None) -> Step:
        """See `cpu_matmul`. features: of a row of y."""
        return kernel.step(
            qweight=matrix.qweight,
            scale=matrix.scale,
            bias=0 if matrix.bias is None else matrix.bias,
            linear_bias=0 if bias is None else bias,
            x=self.q,
            y=y,
            blocks=self.shape[2:],
            tiles=matrix.tiles,
            groups=matrix.in_features // matrix.group,
            features=features,
            **self.groups,
        )


def packed_linear(x: Tensor, matrix: PackedMatrix, out_features: int, isa: Isa | None = None) -> Tensor:
    """x [T, K] -> [T, out_features] of x's dtype. Raises KernelUnavailableError where no kernel runs."""
    isa = isa or best_isa()
    T, K = x.shape
    if T == 0:
        return x.new_empty((0, out_features))
    padded = functional.pad(x.float(), (0, matrix.in_features - K)).contiguous()
    block_rows = cpu_matmul.rows_a_block(isa, T)
    room = Activations(T, matrix.in_features, matrix.group)
    room.resize(T, isa)
    y = torch.empty((T + block_rows, matrix.tiles * TILE))
    quantize = cpu_quantize.quantize(isa, matrix.group, "plain")
    multiply = cpu_matmul.matmul(isa, matrix.weights, block_rows)
    first = room.quantize(quantize, padded, matrix.group, matrix.in_features)
    Tape([first, room.multiply(multiply, matrix, y, y.shape[1], None)]).run()
    return y[:T, :out_features].to(x.dtype)
