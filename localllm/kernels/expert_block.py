"""A block of rows that belong to one expert of a mixture, as the CPU kernels hand it on: see `cpu_experts.group`."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.kernels.cpu_ir import I32, I64, Kernel, Value

# Of each block: its expert, how many rows it has, the first block of that expert, and how many blocks the expert has.
BLOCK_WORDS = ("expert", "rows", "first", "blocks")


@dataclass(frozen=True)
class ExpertBlock:
    """The words of a block, as a kernel has read them."""

    expert: Value
    rows: Value
    first: Value
    blocks: Value

    @classmethod
    def at(cls, k: Kernel, block: Value) -> ExpertBlock:
        """Read block number `block` of the kernel's word `blocks`."""
        count = len(BLOCK_WORDS)
        return cls(*(load_word(k.arg.blocks, block * count + i) for i in range(count)))

    def store(self, k: Kernel, block: Value) -> None:
        for i, name in enumerate(BLOCK_WORDS):
            store_word(k.arg.blocks, block * len(BLOCK_WORDS) + i, getattr(self, name))


def load_word(words: Value, index: Value) -> Value:
    """One of an array of int32, none of them negative, as i64."""
    return words.at(index * 4).load(I32).convert("zext", I64)


def store_word(words: Value, index: Value, value: Value) -> None:
    words.at(index * 4).store(value.convert("trunc", I32))
