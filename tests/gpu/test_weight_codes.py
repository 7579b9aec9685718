"""The instructions that make bytes of 4-bit codes, which only a card runs, carried out one by one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from operator import attrgetter

import pytest

from localllm.kernels.gpu.weight_codes import unit_of, unpacking
from localllm.kernels.sizes import Weights
from localllm.quant.layouts import TABLES

FORMS = [Weights(4, 64), *(Weights(4, 64, False, table) for table in TABLES.values())]


def permuted(low: int, high: int, selector: int) -> int:
    """As PTX's `prmt.b32`."""
    source, result = low | high << 32, 0
    for byte in range(4):
        choice = selector >> (4 * byte) & 15
        found = source >> (8 * (choice & 7)) & 0xFF
        if choice & 8:  # its sign, eight times
            found = 0xFF if found & 0x80 else 0
        result |= found << (8 * byte)
    return result


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "prmt": permuted,
}


def carried_out(instructions: str, word: int) -> tuple[int, int]:
    """($0, $1), of a word $2."""
    registers = {"$2": word}
    for line in re.findall(r"(\w+)\.[bu]32 ([^;]+);", instructions.replace(".reg .b32", ".reg")):
        into, *operands = line[1].split(", ")
        values = [registers[name] if name in registers else int(name, 0) & 0xFFFFFFFF for name in operands]
        registers[into] = OPERATIONS[line[0]](*values) & 0xFFFFFFFF
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("weights", FORMS, ids=attrgetter("name"))
def test_each_code_becomes_the_byte_of_its_value(weights: Weights) -> None:
    draw = random.Random(1)
    values, unit = weights.table or range(16), unit_of(weights)
    for _ in range(200):
        codes = [draw.randrange(16) for _ in range(8)]  # low and high nibble of each byte
        word = sum(code << (4 * place) for place, code in enumerate(codes))
        for found, own in zip(carried_out(unpacking(weights), word), (codes[::2], codes[1::2]), strict=True):
            as_bytes = found.to_bytes(4, "little")
            signed = [byte - 256 if byte > 127 and weights.table else byte for byte in as_bytes]
            assert [byte * unit for byte in signed] == [values[code] for code in own]
