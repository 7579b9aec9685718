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

from localllm.quant.coded import Codes
from localllm.quant.layouts import CodedLayout, Int4Layout, WeightLayout


@dataclass(frozen=True)
class TensorType:
    """kept: the format that keeps the file's codes, or None where there are only numbers. dense: torch's name of the
    dtype of those numbers, or None. read: turns blocks, uint8 [N, blocks of a row, block_bytes] which may begin at any
    address, into the codes of N rows; or None where `dense` is set."""

    name: str
    block_weights: int
    block_bytes: int
    kept: WeightLayout | None = None
    dense: str | None = None
    read: Callable[[Tensor], Codes] | None = None


def dequantize(codes: Codes, kept: WeightLayout) -> Tensor:
    """Return the weights, fp32 [N, K], that these codes stand for in the format `kept`."""
    table = kept.table if isinstance(kept, CodedLayout) else None
    if table is None:
        values = codes.q.float()
    else:
        values = torch.tensor(table, dtype=torch.float32, device=codes.q.device)[codes.q.int()]
    groups = values.view(*codes.scale.shape, -1).mul_(codes.scale[..., None])
    if codes.bias is not None:
        groups.add_(codes.bias[..., None])
    return groups.flatten(1)


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


def _read_half_and_nibbles(blocks: Tensor) -> Codes:
    return Codes(_planes(blocks[..., 2:], 4, run=16), _half(blocks, 0).flatten(1))


def _read_q4_1(blocks: Tensor) -> Codes:
    return Codes(_planes(blocks[..., 4:], 4, run=16), _half(blocks, 0).flatten(1), _half(blocks, 2).flatten(1))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Return uint8 [N, K] of 0..31: the fifth bits of eight columns in a row are one byte of `high`."""
    return _planes(low, 4, run=16).add_(_planes(high, 1, run=1), alpha=16)


def _read_q5_0(blocks: Tensor) -> Codes:
    q = _five_bits(blocks[..., 2:6], blocks[..., 6:]).sub_(16)
    return Codes(q.view(torch.int8), _half(blocks, 0).flatten(1))


def _read_q5_1(blocks: Tensor) -> Codes:
    q = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return Codes(q.view(torch.int8), _half(blocks, 0).flatten(1), _half(blocks, 2).flatten(1))


def _read_q8_0(blocks: Tensor) -> Codes:
    q = blocks[..., 2:].clone(memory_format=torch.contiguous_format).flatten(1)
    return Codes(q.view(torch.int8), _half(blocks, 0).flatten(1))


def _read_q2_k(blocks: Tensor) -> Codes:
    packed, scale, minimum = blocks[..., :16], _half(blocks, 80), _half(blocks, 82)
    q = _planes(blocks[..., 16:80], 2, run=32)
    return Codes(q, _times(scale, packed & 15), _times(-minimum, packed >> 4))


def _read_q3_k(blocks: Tensor) -> Codes:
    q = _planes(blocks[..., 32:96], 2, run=32).add_(_planes(blocks[..., :32], 1, run=32), alpha=4)
    scales = _planes(blocks[..., 96:104], 4, run=8).add_(_planes(blocks[..., 104:108], 2, run=4), alpha=16)
    # The value is q - 4, which is code q + 4 of the table that begins at -8.
    return Codes(q.add_(4), _times(_half(blocks, 108), scales.sub_(32).view(torch.int8)))


def _scale_and_bias(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and bias of Q4_K and Q5_K, [N, groups]: eight scales and eight minimums of 6 bits in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return _times(_half(blocks, 0), scales), _times(-_half(blocks, 2), minimums)


def _read_q4_k(blocks: Tensor) -> Codes:
    return Codes(_planes(blocks[..., 16:], 4, run=32), *_scale_and_bias(blocks))


def _read_q5_k(blocks: Tensor) -> Codes:
    q = _planes(blocks[..., 48:], 4, run=32).add_(_planes(blocks[..., 16:48], 1, run=32), alpha=16)
    return Codes(q.view(torch.int8), *_scale_and_bias(blocks))


def _read_q6_k(blocks: Tensor) -> Codes:
    q = _planes(blocks[..., :128], 4, run=64).add_(_planes(blocks[..., 128:192], 2, run=32), alpha=16)
    scale = _times(_half(blocks, 208), blocks[..., 192:208].view(torch.int8))
    return Codes(q.sub_(32).view(torch.int8), scale)


def _read_iq4_xs(blocks: Tensor) -> Codes:
    scales = _planes(blocks[..., 4:8], 4, run=1).add_(_planes(blocks[..., 2:4], 2, run=1), alpha=16)
    q = _planes(blocks[..., 8:], 4, run=16)
    return Codes(q, _times(_half(blocks, 0), scales.sub_(32).view(torch.int8)))


def _read_mxfp4(blocks: Tensor) -> Codes:
    exponent = blocks[..., 0].int()
    # 2^(exponent - 128), half of what E8M0 means, as the table has twice FP4's values. The two smallest are subnormal.
    bits = torch.where(exponent < 2, (1 << 21) << exponent, (exponent - 1) << 23)
    return Codes(_planes(blocks[..., 1:], 4, run=16), bits.view(torch.float32))


def _read_nvfp4(blocks: Tensor) -> Codes:
    byte = blocks[..., :4].flatten(1)
    # E4M3 without its sign, in the place of those bits in fp16, whose exponent has another offset: 2^-8 of its value.
    # Half of that is wanted, as the table has twice FP4's values. 0x7F is NaN, and means 0 here.
    scale = ((byte & 127).short() << 7).view(torch.float16).float() * 128
    return Codes(_planes(blocks[..., 4:], 4, run=8), scale.masked_fill_(byte == 127, 0))


TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4, dense="float32"),
        1: TensorType("F16", 1, 2, dense="float16"),
        2: TensorType("Q4_0", 32, 18, CodedLayout("int4", 32), read=_read_half_and_nibbles),
        3: TensorType("Q4_1", 32, 20, Int4Layout(32), read=_read_q4_1),
        6: TensorType("Q5_0", 32, 22, CodedLayout("int8", 32), read=_read_q5_0),
        7: TensorType("Q5_1", 32, 24, CodedLayout("int8", 32, has_bias=True), read=_read_q5_1),
        8: TensorType("Q8_0", 32, 34, CodedLayout("int8", 32), read=_read_q8_0),
        10: TensorType("Q2_K", 256, 84, Int4Layout(16), read=_read_q2_k),
        11: TensorType("Q3_K", 256, 110, CodedLayout("int4", 16), read=_read_q3_k),
        12: TensorType("Q4_K", 256, 144, Int4Layout(32), read=_read_q4_k),
        13: TensorType("Q5_K", 256, 176, CodedLayout("int8", 32, has_bias=True), read=_read_q5_k),
        14: TensorType("Q6_K", 256, 210, CodedLayout("int8", 16), read=_read_q6_k),
        20: TensorType("IQ4_NL", 32, 18, CodedLayout("iq4", 32), read=_read_half_and_nibbles),
        23: TensorType("IQ4_XS", 256, 136, CodedLayout("iq4", 32), read=_read_iq4_xs),
        28: TensorType("F64", 1, 8, dense="float64"),
        30: TensorType("BF16", 1, 2, dense="bfloat16"),
        39: TensorType("MXFP4", 32, 17, CodedLayout("fp4", 32), read=_read_mxfp4),
        40: TensorType("NVFP4", 64, 36, CodedLayout("fp4", 16), read=_read_nvfp4),
    }
)
# Types that there are, or were until llama.cpp removed them, and that are not read.
REFUSED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        21: "IQ3_S",
        22: "IQ2_S",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        29: "IQ1_M",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        34: "TQ1_0",
        35: "TQ2_0",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
        41: "Q1_0",
        42: "Q2_0",
    }
)
