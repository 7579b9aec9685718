"""Integers of a byte as floats, exactly: by their bits, for cards convert integers far more slowly."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_128(bits, OPERAND: tl.constexpr):
    """bits int16, 0 to 255: 128 + the last seven of them, or 256 for the eighth alone, as the bits of bf16. The
    interpreter cannot subtract what has been cast so, unless it is widened."""
    return (bits | 0x4300).to(tl.bfloat16, bitcast=True).to(OPERAND)


@triton.jit
def signed_byte(bits, OPERAND: tl.constexpr):
    """The integers in the lower bytes: 128 and the last seven bits, less 128, or 256 where the sign is set."""
    return from_128(bits & 0x7F, OPERAND) - from_128(bits & 0x80, OPERAND)


@triton.jit
def nibble(bits, ZERO: tl.constexpr, OPERAND: tl.constexpr):
    """bits int16, 0 to 15, less ZERO."""
    return from_128(bits, OPERAND) - tl.full((1, 1), 128 + ZERO, OPERAND)
