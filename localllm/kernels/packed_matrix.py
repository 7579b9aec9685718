"""An INT4 or INT8 matrix in tiles of 16 rows, as the compiled kernels of the CPU and of the GPU take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localllm.kernels.sizes import INT8_GROUP as INT8_GROUP
from localllm.kernels.sizes import Weights as Weights

MOST_SLICES = 32


@dataclass(frozen=True)
class PackedMatrix:
    """Tensors of `tile16`, or of `int8` where there is no bias, padded to whole tiles and groups."""

    qweight: Tensor
    scale: Tensor
    bias: Tensor | None  # of INT4's groups

    @property
    def bits(self) -> int:
        return 8 if self.bias is None else 4

    @property
    def tiles(self) -> int:
        return self.qweight.shape[0]

    @property
    def weights(self) -> Weights:
        return "int8" if self.bias is None else "int4"

    @property
    def words(self) -> int:
        """32-bit words in a group of one row."""
        return self.group * self.bits // 32

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        return INT8_GROUP if self.bias is None else self.in_features // self.scale.shape[1]

    @property
    def groups(self) -> int:
        return self.in_features // self.group

    @property
    def slices(self) -> int:
        """Slices of the columns on a GPU: a power of two. More would have no group, and add zeros, which change no
        sum."""
        return min(MOST_SLICES, 1 << (self.groups - 1).bit_length())
