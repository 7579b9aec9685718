"""The codes of packed weights as bytes that a GPU multiplies: eight codes of 4 bits are a word, in two words of bytes.

Codes that stand for themselves are taken apart as they are. Those that stand for themselves less 8 become the upper
halves of signed bytes, 16 times what they are worth, which the group's scale takes back: no instruction more, no bias.
Those of a table are looked up by permutations of bytes: two give the bytes of the lower and the upper half of the table
for four codes, a third takes of each which of them the code's highest bit says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localllm.kernels.sizes import CENTRED, Weights

_CENTRED_UNIT = 1 / 16

_PLAIN = "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;"
_SIGNED = """
    shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; xor.b32 $0, $0, 0x80808080;
    and.b32 $1, $2, 0xF0F0F0F0; xor.b32 $1, $1, 0x80808080;"""
# A selector has its four codes in 16 bits: those of bytes 0 and 1 of the word, low before high, and those of 2 and 3.
_LOOKED_UP = """{
    .reg .b32 t0, t1, t2, t3, codes, upper_codes, choice, upper_choice, low, high, first, second;
    mov.b32 t0, %d; mov.b32 t1, %d; mov.b32 t2, %d; mov.b32 t3, %d;
    and.b32 codes, $2, 0x77777777; shr.u32 upper_codes, codes, 16;
    shr.u32 choice, $2, 1; and.b32 choice, choice, 0x44444444; or.b32 choice, choice, 0x32103210;
    shr.u32 upper_choice, choice, 16;
    prmt.b32 low, t0, t1, codes; prmt.b32 high, t2, t3, codes; prmt.b32 first, low, high, choice;
    prmt.b32 low, t0, t1, upper_codes; prmt.b32 high, t2, t3, upper_codes; prmt.b32 second, low, high, upper_choice;
    prmt.b32 $0, first, second, 0x6420; prmt.b32 $1, first, second, 0x7531;
}"""


@triton.constexpr_function
def words_of(weights: Weights) -> int:
    """Return the 32-bit words in a group of one row."""
    return weights.columns * weights.bits // 32


@triton.constexpr_function
def is_signed(weights: Weights) -> bool:
    """Return whether the bytes that are multiplied are signed."""
    return weights.bits == 8 or weights.table is not None


@triton.constexpr_function
def unit_of(weights: Weights) -> float:
    """Return what a byte of 1 is worth."""
    return _CENTRED_UNIT if weights.table == CENTRED else 1.0


@triton.constexpr_function
def table_word(weights: Weights, part: int) -> int:
    """Return four values of the table, as the bytes of a signed word."""
    assert weights.table is not None
    values = bytes(value & 0xFF for value in weights.table[4 * part : 4 * part + 4])
    return int.from_bytes(values, "little", signed=True)


@triton.constexpr_function
def unpacking(weights: Weights) -> str:
    """Return the instructions that make words $0 and $1, of low and of high nibbles, from a word $2."""
    if weights.is_looked_up:
        return _LOOKED_UP % tuple(table_word(weights, part) for part in range(4))
    return _PLAIN if weights.table is None else _SIGNED


@triton.jit
def value_of(code, FORM: tl.constexpr):
    """int32: what codes of 4 bits stand for, in int32."""
    if FORM.table is not None:
        lower = tl.where(code < 4, table_word(FORM, 0), table_word(FORM, 1))
        upper = tl.where(code < 12, table_word(FORM, 2), table_word(FORM, 3))
        code = (tl.where(code < 8, lower, upper) << (24 - code % 4 * 8)) >> 24
    return code


@triton.jit
def _looked_up(word, FORM: tl.constexpr, ASM: tl.constexpr):
    """Both of the following."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            unpacking(FORM), "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )  # fmt: skip
    else:
        low, high = tl.zeros_like(word), tl.zeros_like(word)
        for b in tl.static_range(4):
            low |= (value_of((word >> (8 * b)) & 15, FORM) & 0xFF) << (8 * b)
            high |= (value_of((word >> (8 * b + 4)) & 15, FORM) & 0xFF) << (8 * b)
    return low, high


@triton.jit
def low_bytes(word, FORM: tl.constexpr, ASM: tl.constexpr):
    """What is multiplied, as int32 words of bytes, of the low nibbles of int32 words."""
    if FORM.is_looked_up:
        low, _ = _looked_up(word, FORM, ASM)  # the compiler does it once
    elif FORM.table is not None:
        low = ((word << 4) & -0x0F0F0F10) ^ -0x7F7F7F80
    else:
        low = word & 0x0F0F0F0F
    return low


@triton.jit
def high_bytes(word, FORM: tl.constexpr, ASM: tl.constexpr):
    """The same of the high nibbles."""
    if FORM.is_looked_up:
        _, high = _looked_up(word, FORM, ASM)
    elif FORM.table is not None:
        high = (word & -0x0F0F0F10) ^ -0x7F7F7F80
    else:
        high = (word >> 4) & 0x0F0F0F0F
    return high


@triton.jit
def nibble_bytes(packed, FORM: tl.constexpr, ASM: tl.constexpr):
    """The same of the low and of the high nibbles of bytes, uint8, as int8."""
    if ASM:  # four bytes at once: by the compiler, each would take a register
        low, high = tl.inline_asm_elementwise(
            unpacking(FORM), "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )  # fmt: skip
    else:
        low, high = packed & 15, packed >> 4
        if FORM.is_looked_up:
            low, high = value_of(low.to(tl.int32), FORM), value_of(high.to(tl.int32), FORM)
        elif FORM.table is not None:
            low, high = (low << 4) ^ 0x80, (high << 4) ^ 0x80
        low, high = low.to(tl.int8), high.to(tl.int8)
    return low, high


@triton.jit
def byte_scale(scale, FORM: tl.constexpr):
    """fp32: a group's scale, of the bytes that are multiplied: exact."""
    own = scale.to(tl.float32)
    if unit_of(FORM) != 1:
        own = own * unit_of(FORM)
    return own
