"""The weights of a mixture's experts as kernels find them: each is a record, one piece of bytes, at an address that the
device knows.

All experts of a block have the same matrices at the same places of their records. A table has the addresses: it is
data, which may change from one run of a graph to the next. An address of 0 is that of an expert which is not on this
device: kernels add nothing for it, someone else does.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.product_end import finished
from localllm.kernels.gpu.rope import page_at
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import Glu

_ALIGN = 16  # bytes, of records and of places in them, for loads of 128 bits


@dataclass(frozen=True)
class RecordMatrix:
    """Where a packed matrix is in each record, in bytes. shape: of whatever tensors, on any device, the meta one too,
    that have the shapes and types of one expert's. linear_bias: fp32 [out features], where the matrix has one."""

    shape: PackedMatrix
    qweight: int
    scale: int
    bias: int = 0  # where groups have one
    linear_bias: int | None = None

    def __post_init__(self) -> None:
        places = (self.qweight, self.scale, self.bias, self.linear_bias or 0)
        assert not any(place % _ALIGN for place in places), "128 bits are read at once"

    @property
    def arguments(self) -> dict[str, int | None]:
        places = {"qweight_at": self.qweight, "scale_at": self.scale, "bias_at": self.bias}
        return {**places, "linear_bias_at": self.linear_bias}


@dataclass(frozen=True)
class ExpertTable:
    """addresses int64 [E], multiples of 16, or 0. gate_up: the gate's rows, then as many of the other half; down: their
    product's. glu: one with a gate. features: of the gate, a multiple of a tile's 16 rows.
    """

    addresses: Tensor
    gate_up: RecordMatrix
    down: RecordMatrix
    glu: Glu
    features: int


@triton.jit
def address_of(table, experts, is_slot):
    """Of the expert of a slot or of several; 0 where it is not on this device, where there is none, and of nobody."""
    expert = tl.load(experts, mask=is_slot, other=-1)
    return tl.load(table + expert, mask=expert >= 0, other=0)


@triton.jit
def matrix_at(address, qweight_at, scale_at, bias_at, WORD: tl.constexpr, FORM: tl.constexpr):
    """Pointers to the codes, as such words, and to the scales and biases, of the record at the address or of several.
    Where `Weights` have no biases, the last may not be used."""
    VALUE: tl.constexpr = tl.float32 if FORM.group is None else tl.float16
    qweight = page_at(address, qweight_at).to(tl.pointer_type(WORD))
    scale, bias = page_at(address, scale_at), page_at(address, bias_at)
    return qweight, scale.to(tl.pointer_type(VALUE)), bias.to(tl.pointer_type(VALUE))


@triton.jit
def finished_of(out, scale, address, linear_bias_at, n, is_n, ROW_SCALED: tl.constexpr):
    """`finished`, with the bias of the matrix in the record at the address, or in several, of n's shape."""
    linear_bias = None
    if linear_bias_at is not None:
        linear_bias = (address + linear_bias_at).to(tl.pointer_type(tl.float32))
    return finished(out, scale, linear_bias, n, is_n, ROW_SCALED)


@triton.jit
def weighted(weight, part):
    """What an expert adds, rounded by itself, so that no compiler joins it with the sum."""
    part_weight = tl.broadcast_to(weight, part.shape)
    return tl.fma(part_weight, part, tl.zeros_like(part))
