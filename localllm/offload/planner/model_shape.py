"""The sizes of a model, which decide where it fits and how fast it is. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BlockShape:
    """num_bytes: in memory and on the disk, whole pages. flops: multiplications and additions of one token."""

    name: str
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Packing:
    """The one-time conversion that a model needs before it runs.

    num_bytes: memory it takes, beside the program.
    command: packs the model ahead of time; "" if none does.
    is_for_streaming: not needed if every block stays where it is computed fastest.
    """

    num_bytes: int
    command: str = ""
    is_for_streaming: bool = False


@dataclass(frozen=True)
class ModelShape:
    """packing: None where the model is packed, or never will be."""

    name: str
    weights: str
    kv: str
    embed: BlockShape
    blocks: tuple[BlockShape, ...]  # attention and MLP in turn
    head: BlockShape
    kv_bytes_per_token: int
    default_ctx: int  # where the user names none
    row_bytes: int  # between two blocks and inside one, for each token that is computed at once
    state_bytes: int  # of a token that waits between two blocks while others pass
    logits_bytes: int  # of one token
    batch_rows: tuple[int, ...]  # how many tokens may be computed at once, the best first
    kv_bytes_per_sequence: int = 0  # beside those of its tokens
    is_tied: bool = False  # the embedding is the head's matrix
    can_split: bool = False  # an MLP block, between a device and the host
    packing: Packing | None = None
    draft_bytes: int = 0  # of a draft model, all of it where this one is computed fastest
    draft_blocks: int = 0
    section_bytes: int = 0  # of one row: the partial result of each program of a GPU's attention

    def kv_bytes(self, num_tokens: int, sequences: int = 1) -> int:
        return num_tokens * self.kv_bytes_per_token + sequences * self.kv_bytes_per_sequence

    @property
    def lm_head(self) -> BlockShape:
        """The block whose matrix makes logits."""
        return self.embed if self.is_tied else self.head

    @cached_property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in (self.embed, *self.blocks, self.head))

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of all attention and MLP blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def block_flops(self) -> int:
        return sum(block.flops for block in self.blocks)

    @property
    def streamable_bytes(self) -> int:
        """The bytes of all blocks but the embedding."""
        return self.num_bytes - self.embed.num_bytes
