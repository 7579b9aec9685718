"""The products of a decoder's layers as steps of a tape, over a room in which a batch was placed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from localllm.kernels import cpu_matmul, cpu_quantize
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import INT8_GROUP, TILE
from localllm.layers.linear import Linear
from localllm.layers.mamba import Mamba
from localllm.layers.norm import RMSNorm
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.models.cpu_buffers import Buffers


@dataclass(frozen=True)
class Products:
    """Writes products and norms down as steps, for a number of rows a block."""

    isa: Isa
    room: Buffers
    block_rows: int

    def wide(self, linear: Linear, norm: RMSNorm | None) -> Iterator[Step]:
        """The rows of x into `wide`: by one matrix, or by those whose rows make it up."""
        room, first = self.room, 0
        group = 0
        for part in packed_parts(linear):
            if part.group != group:
                group = part.group
                yield self.quantize_for(part, room.x, norm)
            rows = part.tiles * TILE
            kernel = cpu_matmul.matmul(self.isa, part.weights, self.block_rows, has_bias=linear.bias is not None)
            bias = None if linear.bias is None else linear.bias[first : first + rows].float()
            yield room.activations.multiply(kernel, part, room.wide[first:], linear.out_features, bias)
            first += rows
        yield from self.adapters(linear, group, room.wide)

    def page_place(self, layer: int) -> tuple[int, int]:
        """Return the group of a layer with keys and values, and its number there."""
        groups = enumerate(self.room.groups)
        return next((number, layers.index(layer)) for number, layers in groups if layer in layers)

    def quantize(self, linear: Linear, x: Tensor, norm: RMSNorm | None, stride: int = 0) -> Step:
        """stride: floats of a row of x, where it has more than the matrix has columns."""
        return self.quantize_for(required(linear), x, norm, stride)

    def quantize_columns(self, matrix: PackedMatrix, x: Tensor, features: int, stride: int = 0) -> Step:
        """Quantize the first `features` of x, which are several times the columns of a matrix."""
        kernel = cpu_quantize.quantize(self.isa, matrix.group, "plain")
        return self.room.activations.quantize(kernel, x, matrix.group, features, stride=stride or features)

    def quantize_for(self, matrix: PackedMatrix, x: Tensor, norm: RMSNorm | None, stride: int = 0) -> Step:
        kernel = cpu_quantize.quantize(self.isa, matrix.group, "plain" if norm is None else "norm")
        rest: dict[str, Tensor | int] = {} if norm is None else {"weight": norm.weight, "eps": float_bits(norm.eps)}
        rest["stride"] = stride or matrix.in_features
        return self.room.activations.quantize(kernel, x, matrix.group, matrix.in_features, **rest)

    def multiply(self, linear: Linear, y: Tensor, *, adds: bool) -> Iterator[Step]:
        packed, has_bias = required(linear), linear.bias is not None
        kernel = cpu_matmul.matmul(self.isa, packed.weights, self.block_rows, adds=adds, has_bias=has_bias)
        bias = None if linear.bias is None else linear.bias.float()
        yield self.room.activations.multiply(kernel, packed, y, linear.out_features, bias)
        yield from self.adapters(linear, packed.group, y)

    def adapters(self, linear: Linear, group: int, y: Tensor, stride: int | None = None) -> list[Step]:
        """Add to a layer's output y what adapters make of its input, which is there in INT8, in groups of `group`.
        stride: floats of a row of y, where there are more than the layer's."""
        room, columns = self.room, linear.in_features
        return room.low_rank.steps(
            linear.name, room.activations, self.block_rows, group, columns, y, linear.out_features, stride
        )

    def norm(
        self, norm: RMSNorm, x: Tensor, y: Tensor, features: int, stride: int, *, adds: bool, scale: float = 1.0
    ) -> Step:
        strides, shape = {"x_stride": stride, "y_stride": stride}, self.room.activations.shape
        rest: dict[str, Tensor | int]
        rest = {"weight": norm.weight, "features": features, "eps": float_bits(norm.eps), "scale": float_bits(scale)}
        return cpu_quantize.norm(self.isa, adds=adds).step(x=x, y=y, shape=shape, **strides, **rest)


def packed_parts(linear: Linear) -> list[PackedMatrix]:
    """Return the matrices that make up a linear layer as the kernels take them; none where a format or its columns are
    not theirs."""
    parts = linear.packed_parts
    return parts if all(part.in_features == linear.in_features for part in parts) else []


def packed_matrix(linear: Linear) -> PackedMatrix | None:
    """Return the matrix as the kernels take it; None where its format or its columns are not theirs."""
    packed = linear.packed
    return packed if packed is not None and packed.in_features == linear.in_features else None


def required(linear: Linear) -> PackedMatrix:
    packed = packed_matrix(linear)
    assert packed is not None, "CpuProgram.supports said so"
    return packed


def product(write: Products, linear: Linear, x: Tensor, y: Tensor, stride: int, x_stride: int = 0) -> Iterator[Step]:
    """y = linear(x), rows of `stride` floats. x_stride: floats of a row of x, where it has more than columns."""
    yield write.quantize_for(packed(linear), x, None, x_stride)
    yield from multiply(write, linear, y, stride)


def multiply(write: Products, linear: Linear, y: Tensor, stride: int) -> Iterator[Step]:
    """y = linear(what was quantized last), rows of `stride` floats."""
    matrix, bias = packed(linear), None if linear.bias is None else linear.bias.float()
    kernel = cpu_matmul.matmul(write.isa, matrix.weights, write.block_rows, has_bias=bias is not None)
    yield write.room.activations.multiply(kernel, matrix, y, stride, bias)
    yield from write.adapters(linear, matrix.group, y, stride)


def packed(linear: Linear) -> PackedMatrix:
    """Return the matrix as the kernels take it, whose columns may be padded to whole groups."""
    assert linear.packed is not None, "`has_native_matrices` said so"
    return linear.packed


def _takes_padding(matrix: PackedMatrix) -> bool:
    return matrix.group == INT8_GROUP and matrix.bias is None


def has_native_matrices(body: Rwkv7TimeMix | Rwkv7ChannelMix | Mamba) -> bool:
    """Return whether the steps know the matrices of such a body: in INT4 or INT8, of whole tiles, and whole groups but
    between two small ones, of which the second takes what is padded up to INT8_GROUP."""
    small = {id(pair.up) for pair in body.pairs} if isinstance(body, Rwkv7TimeMix) else set()
    small |= {id(body.steps_proj)} if isinstance(body, Mamba) else set()
    return all(
        (matrix := linear.packed) is not None
        and matrix.tiles * TILE == linear.out_features
        and (matrix.in_features == linear.in_features or (id(linear) in small and _takes_padding(matrix)))
        for linear in body.linears
    )
