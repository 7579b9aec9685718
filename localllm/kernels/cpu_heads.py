"""Products in which each head has its own rows and columns of a matrix, on the CPU: x of head h is multiplied with the
rows of head h alone. One step computes all heads as `cpu_matmul` does a whole matrix, its tiles being those of the
heads one after the other."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from localllm.kernels.cpu_ir import Kernel
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_linear import Activations, Step
from localllm.kernels.cpu_matmul import PREFETCH_BYTES, TiledMatrix, Units
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import TILE, Weights


def by_head_source(isa: Isa, weights: Weights, rows: int, head_tiles: int) -> Kernel:
    """As `matmul_source`, with x [blocks, heads * K/8, rows, 8] and its scales of all heads. head_tiles: of a head's
    rows, 16 each. groups: of a head's columns; x_groups: of all heads'."""
    words = "qweight scale bias x x_scale x_bias x_offset y blocks | tiles groups x_groups features"
    k = Kernel("by_head", words)
    a = k.arg
    blocks = a.blocks.load("i64", 8)
    units = Units(k, isa, weights, rows, adds=False, run_tiles=head_tiles)
    matrix = TiledMatrix(a.qweight, a.scale, a.bias, None, k.i64(PREFETCH_BYTES))
    with k.balanced(units.count) as unit, k.range(k.i64(0), blocks) as block:
        head = unit * units.tiles / head_tiles
        units.multiply(matrix, unit, block, block, rows, groups_before=block * a.x_groups + head * a.groups)
    return k


@cache
def by_head(isa: Isa, weights: Weights, rows: int, head_tiles: int) -> Native:
    return compile_kernel(by_head_source(isa, weights, rows, head_tiles), isa)


def by_head_step(isa: Isa, room: Activations, matrix: PackedMatrix, heads: int, block_rows: int, y: Tensor) -> Step:
    """y fp32 [T, rows of the matrix], of what was quantized into `room`: all heads' columns."""
    groups = matrix.in_features // matrix.group
    return by_head(isa, matrix.weights, block_rows, matrix.tiles // heads).step(
        qweight=matrix.qweight,
        scale=matrix.scale,
        bias=0 if matrix.bias is None else matrix.bias,
        x=room.q,
        y=y,
        blocks=room.shape[2:],
        tiles=matrix.tiles,
        groups=groups,
        x_groups=heads * groups,
        features=matrix.tiles * TILE,
        **room.groups,
    )
