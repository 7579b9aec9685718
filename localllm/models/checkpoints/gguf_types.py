"""The tensor types of GGUF files: how the bytes of each block give codes, scales and biases.

A row is a sequence of blocks, each of `block_bytes` for `block_weights` columns. Codes narrower than a byte lie in
planes: of a run of bytes, the lowest bits are the first columns, one a byte, and the next bits are the columns after
those. Values of several bytes are little-endian, and so must the machine be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from localllm.kernels.cpu_repack import BlockForm, repack, supports
from localllm.quant.coded import CodedMatrix
from localllm.quant.layouts import CodedLayout, Int4Layout, WeightLayout


@dataclass(frozen=True)
class TensorType:
    """kept: the format that keeps the file's codes, or None where there are only numbers.
    form: where codes and scales are in a block.
    q, scales: of blocks, uint8 [N, blocks of a row, block_bytes] which may begin at any address, the codes of N rows,
    and the scales with the biases, if any; see `CodedMatrix`.
    dense: torch's name of the dtype of the numbers, or None where there are codes.
    """

    kept: WeightLayout | None = None
    form: BlockForm | None = None
    q: Callable[[Tensor], Tensor] | None = None
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    dense: str | None = None

    def read(self, blocks: Tensor) -> CodedMatrix:
        """Return the codes of these rows."""
        assert self.q is not None and self.scales is not None, "there are no codes"
        scale, bias = self.scales(blocks)
        return CodedMatrix(self.q(blocks), scale, bias)

    @property
    def table(self) -> tuple[float, ...] | None:
        """Return the values that the codes stand for; None where they are their own."""
        return self.kept.table if isinstance(self.kept, CodedLayout) else None

    def can_fill_tiles(self) -> bool:
        """Return whether `fill_tiles` can run on this machine; asking compiles its kernel."""
        return self.form is not None and supports(self.form)

    def fill_tiles(self, blocks: Tensor, out: Mapping[str, Tensor], order: Tensor | None) -> None:
        """Fill the tensors of `kept` with these rows in this order; their number is a multiple of 16. It is what `read`
        and packing do, quicker."""
        assert self.form is not None, "there are no codes"
        repack(blocks, self.form, out, order)


def _planes(packed: Tensor, bits: int, run: int) -> Tensor:
    """Return the codes of `bits` bits, uint8 [N, K], that lie in planes in each `run` bytes of [N, blocks, bytes]."""
    # Bytes that lie together are shifted twice as fast as the same bytes between others.
    runs = packed.contiguous().view(*packed.shape[:2], -1, run)
    # A shift may leave bits of the next planes, which are cleared in all planes at once.
    planes = torch.stack([runs >> shift for shift in range(0, 8, bits)], dim=-2)
    return planes.bitwise_and_((1 << bits) - 1).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 at this byte of every block, as fp32 [N, blocks, 1]."""
    # A view as fp16 needs an even address, which only a copy has for sure.
    field = blocks[..., at : at + 2].clone(memory_format=torch.contiguous_format)
    return field.view(torch.float16).float()


def _times(factor: Tensor, scales: Tensor) -> Tensor:
    """Return [N, groups] of a factor per block [N, blocks, 1] and the scales of its groups, in integers."""
    return (factor * scales.reshape(*factor.shape[:2], -1).float()).flatten(1)


def _nibbles(begin: int, run: int = 16) -> Callable[[Tensor], Tensor]:
    """Return what reads codes of 4 bits from this byte of every block on."""
    return lambda blocks: _planes(blocks[..., begin:], 4, run=run)


def _scale(blocks: Tensor) -> tuple[Tensor, None]:
    return _half(blocks, 0).flatten(1), None


def _scale_and_least(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _half(blocks, 0).flatten(1), _half(blocks, 2).flatten(1)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Return uint8 [N, K] of 0..31: the fifth bits of eight columns in a row are one byte of `high`."""
    return _planes(low, 4, run=16).add_(_planes(high, 1, run=1), alpha=16)


def _q5_0(blocks: Tensor) -> Tensor:
    return _five_bits(blocks[..., 2:6], blocks[..., 6:]).sub_(16).view(torch.int8)


def _q5_1(blocks: Tensor) -> Tensor:
    return _five_bits(blocks[..., 4:8], blocks[..., 8:]).view(torch.int8)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].clone(memory_format=torch.contiguous_format).flatten(1).view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    return _planes(blocks[..., 16:80], 2, run=32)


def _q2_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale, least = blocks[..., :16], _half(blocks, 80), _half(blocks, 82)
    return _times(scale, packed & 15), _times(-least, packed >> 4)


def _q3_k(blocks: Tensor) -> Tensor:
    q = _planes(blocks[..., 32:96], 2, run=32).add_(_planes(blocks[..., :32], 1, run=32), alpha=4)
    return q.add_(4)  # the value is q - 4, which is code q + 4 of the table that begins at -8


def _q3_k_scales(blocks: Tensor) -> tuple[Tensor, None]:
    scales = _planes(blocks[..., 96:104], 4, run=8).add_(_planes(blocks[..., 104:108], 2, run=4), alpha=16)
    return _times(_half(blocks, 108), scales.sub_(32).view(torch.int8)), None


def _q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and bias of Q4_K and Q5_K, [N, groups]: eight scales and eight minimums of 6 bits in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return _times(_half(blocks, 0), scales), _times(-_half(blocks, 2), minimums)


def _q5_k(blocks: Tensor) -> Tensor:
    q = _planes(blocks[..., 48:], 4, run=32).add_(_planes(blocks[..., 16:48], 1, run=32), alpha=16)
    return q.view(torch.int8)


def _q6_k(blocks: Tensor) -> Tensor:
    q = _planes(blocks[..., :128], 4, run=64).add_(_planes(blocks[..., 128:192], 2, run=32), alpha=16)
    return q.sub_(32).view(torch.int8)


def _q6_k_scales(blocks: Tensor) -> tuple[Tensor, None]:
    return _times(_half(blocks, 208), blocks[..., 192:208].view(torch.int8)), None


def _iq4_xs_scales(blocks: Tensor) -> tuple[Tensor, None]:
    scales = _planes(blocks[..., 4:8], 4, run=1).add_(_planes(blocks[..., 2:4], 2, run=1), alpha=16)
    return _times(_half(blocks, 0), scales.sub_(32).view(torch.int8)), None


def _mxfp4_scales(blocks: Tensor) -> tuple[Tensor, None]:
    exponent = blocks[..., 0].int()
    # 2^(exponent - 128), half of what E8M0 means, as the table has twice FP4's values. The two smallest are subnormal.
    bits = torch.where(exponent < 2, (1 << 21) << exponent, (exponent - 1) << 23)
    return bits.view(torch.float32), None


def _nvfp4_scales(blocks: Tensor) -> tuple[Tensor, None]:
    byte = blocks[..., :4].flatten(1)
    # E4M3 without its sign, in the place of those bits in fp16, whose exponent has another offset: 2^-8 of its value.
    # Half of that is wanted, as the table has twice FP4's values. 0x7F is NaN, and means 0 here.
    scale = ((byte & 127).short() << 7).view(torch.float16).float() * 128
    return scale.masked_fill_(byte == 127, 0), None


_BIASED = CodedLayout("int8", 32, has_bias=True)
# By the names of the types. Those that are missing here are not read.
TYPES: Mapping[str, TensorType] = MappingProxyType(
    {
        "F64": TensorType(dense="float64"),
        "F32": TensorType(dense="float32"),
        "F16": TensorType(dense="float16"),
        "BF16": TensorType(dense="bfloat16"),
        "Q4_0": TensorType(CodedLayout("int4", 32), BlockForm(32, 18, "halves", 2, "half"), _nibbles(2), _scale),
        "Q4_1": TensorType(Int4Layout(32), BlockForm(32, 20, "halves", 4, "two"), _nibbles(4), _scale_and_least),
        "Q5_0": TensorType(CodedLayout("int8", 32), BlockForm(32, 22, "five", 6, "half"), _q5_0, _scale),
        "Q5_1": TensorType(_BIASED, BlockForm(32, 24, "five", 8, "two"), _q5_1, _scale_and_least),
        "Q8_0": TensorType(CodedLayout("int8", 32), BlockForm(32, 34, "bytes", 2, "half"), _q8_0, _scale),
        "Q2_K": TensorType(Int4Layout(16), BlockForm(256, 84, "two-k", 16, "k2"), _q2_k, _q2_k_scales),
        "Q3_K": TensorType(CodedLayout("int4", 16), BlockForm(256, 110, "three-k", 32, "k3"), _q3_k, _q3_k_scales),
        "Q4_K": TensorType(
            Int4Layout(32), BlockForm(256, 144, "halves", 16, "k4", run=32), _nibbles(16, run=32), _q4_k_scales
        ),
        "Q5_K": TensorType(_BIASED, BlockForm(256, 176, "five-k", 48, "k4"), _q5_k, _q4_k_scales),
        "Q6_K": TensorType(CodedLayout("int8", 16), BlockForm(256, 210, "six-k", 0, "k6"), _q6_k, _q6_k_scales),
        "IQ4_NL": TensorType(CodedLayout("iq4", 32), BlockForm(32, 18, "halves", 2, "half"), _nibbles(2), _scale),
        "IQ4_XS": TensorType(
            CodedLayout("iq4", 32), BlockForm(256, 136, "halves", 8, "xs"), _nibbles(8), _iq4_xs_scales
        ),
        "MXFP4": TensorType(CodedLayout("fp4", 32), BlockForm(32, 17, "halves", 1, "e8m0"), _nibbles(1), _mxfp4_scales),
        "NVFP4": TensorType(
            CodedLayout("fp4", 16), BlockForm(64, 36, "halves", 4, "e4m3", run=8), _nibbles(4, run=8), _nvfp4_scales
        ),
    }
)
