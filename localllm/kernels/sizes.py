"""What kernels and plans share: sizes of a tile, a page, a table's row, and what weights, gates, routers and states
are. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TILE = 16  # rows
WORD = 8  # 4-bit codes of one row in a 32-bit lane
INT8_WORD = 4
INT8_GROUP = 64  # columns that share a scale of the activations where the weights have one a row
MOST_SLOTS = 32  # experts of a token: a GPU's program has a warp for each
MAX_ROWS = 8  # of a product with bf16 weights; above, the library's GEMM has more to reuse

UNIT, UNIT_BYTES = 128, 192  # columns of bf12
_EXCEPTIONS = 256  # of so many weights one may be one; of normal ones, one in 6000 is

OutputGate = Literal["silu", "sigmoid"]
Scores = Literal["softmax", "sigmoid", "chosen", "sparsemixer"]

PAGE_TOKENS = 64
GROUP = 32  # features of keys and values that share a scale, and that a rotation mixes
MOST_LATENT_FEATURES = 2048  # for a CPU's kernels, which have what is computed of a task on a thread's stack
LATENT_SCALES = 2  # of a token's latent, and of its key that rotates
Coding = Literal["dense", "int8", "int4"]
FIXED_PAGES = 3  # that are attended to beside chosen ones: the first, the one before the own, the own
CODE_BITS: dict[Coding, int] = {"int8": 8, "int4": 4}

# Of each token, as the kernels read it: the addresses of its sequence's pages, that of the page with its own position
# as it is read by that page's queries (dense), the bytes from one layer's part of that to the next's, and its position.
TOKEN_WORDS = ("pages", "own_page", "own_stride", "position")
# Of each token, where some choose the pages that they attend to: the sketches of its sequence's pages, 0 where it
# attends to all; for how many pages those have room; how many it chooses; and how many pages the tables of a key head
# have before its own.
CHOICE_WORDS = ("sketches", "room", "pages", "table")
# Of each sequence that has such tokens: the addresses of its pages, their sketches and for how many pages those have
# room, where it says of each layer how many pages have sketches, and how many must have some now.
SKETCH_WORDS = ("pages", "sketches", "room", "made", "wanted")
# Rows of a segment count from its first token, heads of a group first. part: the first of the task's rows in `parts`,
# where other tasks have the other sections; -1 where it has them all.
TASK_WORDS = ("first_token", "first_row", "rows", "first_section", "end_section", "part")


@dataclass(frozen=True)
class Weights:
    """The meaning of a packed matrix's codes: w = scale * value(code), plus a bias where there is one.

    bits: of a code. group: columns that share a scale, and a bias; None where each row has one scale, in fp32.
    table: the values of 4-bit codes, each a signed byte; without one a code is its own value, signed if of 8 bits.
    """

    bits: Literal[4, 8] = 4
    group: int | None = 64
    has_bias: bool = True
    table: tuple[int, ...] | None = None

    @property
    def columns(self) -> int:
        """Columns of activations that share a scale."""
        return INT8_GROUP if self.group is None else self.group

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of a tile in one group."""
        return TILE * self.columns * self.bits // 8

    @property
    def offset(self) -> int:
        """What is added to values so that they are unsigned bytes."""
        return 0 if self.bits == 4 and self.table is None else 8 if self.table == CENTRED else 128

    @property
    def is_looked_up(self) -> bool:
        """Return whether codes are no sums of their values and `offset`."""
        return self.table not in (None, CENTRED)

    @property
    def name(self) -> str:
        table = "" if self.table is None else f"-{'sym' if self.table == CENTRED else 'lut'}"
        return f"int{self.bits}-g{self.group or 'row'}{table}{'-bias' if self.has_bias else ''}"


@dataclass(frozen=True)
class Glu:
    """What a feed-forward computes between its matrices: activation(gate) * (up + up_offset), or activation(up) alone.

    limit: bounds the gate from above, and what goes up on both sides, before anything else is done with them.
    """

    activation: str
    has_gate: bool = True
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True)
class RouterConfig:
    """How a mixture's logits [num_experts] become the `top_k` experts that compute a token, and their weights.

    scores: softmax or sigmoid of all logits, a softmax over the chosen logits only (`chosen`), or SparseMixer
    (arXiv:2310.00811), which chooses one expert after another, each by a softmax over those within `jitter` of it.
    has_correction: a vector [num_experts] is added to the scores for the choice, not for the weights.
    groups, top_groups: experts are chosen from the `top_groups` groups whose two best scores have the largest sum.
    normalizes: weights are divided by max(their sum + sum_epsilon, sum_floor).
    scale: multiplies the weights at last.
    has_expert_scales: a vector [num_experts] does, too, each expert's number its weight.
    """

    scores: Scores
    num_experts: int
    top_k: int
    has_correction: bool = False
    groups: int = 1
    top_groups: int = 1
    normalizes: bool = False
    sum_epsilon: float = 0.0
    sum_floor: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0
    has_expert_scales: bool = False


CENTRED = tuple(range(-8, 8))  # the table of 4-bit codes that stand for themselves less 8


@dataclass(frozen=True)
class KVShape:
    """What one layer keeps of a token: keys and values of so many heads of so many features.

    latent_dim: where it is not 0, so many of the keys' first features are the values, and nothing else is kept.
    """

    num_heads: int
    head_dim: int
    latent_dim: int = 0

    def page_bytes(self, keys: Coding, values: Coding, item_bytes: int) -> int:
        """Return the bytes of a page in these codings. item_bytes: of a dense number."""
        if self.latent_dim:
            codes, _ = coding_bytes(keys, self.head_dim, item_bytes)
            return self.num_heads * (codes + (0 if keys == "dense" else LATENT_SCALES * PAGE_TOKENS))
        return self.num_heads * sum(sum(coding_bytes(each, self.head_dim, item_bytes)) for each in (keys, values))

    @property
    def can_be_coded(self) -> bool:
        """Return whether groups of 32 features divide what is rotated together before it is coded."""
        return self.head_dim % GROUP == 0 == self.latent_dim % GROUP


@dataclass(frozen=True)
class SketchLayout:
    """The sketch of a page's keys of one head, see `page_choice`: signs u8 [groups, 4, 64], of eight features each,
    the first one's in the lowest bit, scales u8 [groups, 64], the mean bf16 [D]. The last group may have fewer features
    than 32: there is room for so many signs. On a GPU, signs are u32 [groups, 64]: sketches do not move."""

    head_dim: int

    @property
    def groups(self) -> int:
        return -(-self.head_dim // GROUP)

    @property
    def scales(self) -> int:
        """Bytes in front of the scales."""
        return self.groups * PAGE_TOKENS * GROUP // 8

    @property
    def mean(self) -> int:
        """Bytes in front of the mean."""
        return self.scales + self.groups * PAGE_TOKENS

    @property
    def nbytes(self) -> int:
        return self.mean + 2 * self.head_dim


def sketch_bytes(shape: KVShape, pages: int) -> int:
    """Return the bytes of the sketches of so many pages of one layer."""
    return pages * shape.num_heads * SketchLayout(shape.head_dim).nbytes


def attended_tokens(chosen_pages: int | None) -> int | None:
    """Return to how many tokens one attends, at most, that chooses so many pages; None: to all."""
    return None if chosen_pages is None else (chosen_pages + FIXED_PAGES) * PAGE_TOKENS


def most_blocks(pairs: int, num_experts: int, block_rows: int) -> int:
    """Return how many blocks of one expert's rows there may be of so many pairs of a token and a slot, whatever was
    chosen: every expert that has any may have a last block of one."""
    used = min(pairs, num_experts)
    return used + (pairs - used) // block_rows


def units(in_features: int) -> int:
    return -(-in_features // UNIT)


def capacity(in_features: int) -> int:
    """Exceptions of a tile of bf12."""
    return max(TILE, TILE * units(in_features) * UNIT // _EXCEPTIONS)


def coding_bytes(coding: Coding, head_dim: int, item_bytes: int) -> tuple[int, int]:
    """Bytes of a head's keys or values in a page, and of their scales. item_bytes: of a dense number."""
    elements = PAGE_TOKENS * head_dim
    if coding == "dense":
        return elements * item_bytes, 0
    return elements * CODE_BITS[coding] // 8, PAGE_TOKENS * head_dim // GROUP
