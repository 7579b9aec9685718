"""What layers keep of a sequence in place of keys and values: the sizes of their states. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from localllm.kernels.sizes import INT8_GROUP, TILE

# Of a layer with a state: rows of a step that may be taken back, so that it changes no state before the next one.
STEP_ROWS = 16
REPLAYED_ROWS = 2 * STEP_ROWS  # of a sequence before a forward's own, at most
# Of each segment of a batch, as the kernels read it: its first row and the one behind its last, the position of the
# first row's token, up to where the state is changed in place, the address of the sequence's states on the device, the
# row of the first token in the buffers that also hold rows computed again, and the address and number of snapshots:
# pairs of a position and an address.
STATE_WORDS = ("begin", "end", "past", "committed", "states", "row", "snapshots", "num_snapshots")


class StatePlace(NamedTuple):
    """Where a layer's part begins, in bytes: of a sequence's states on a device, and of a snapshot of them."""

    state: int
    snapshot: int


class StateShape(ABC):
    """What a layer keeps of a sequence in place of keys and values: matrices, and the last rows that went into it.

    conv_width: tokens that the layer's convolution sees, the last one included.
    heads: those of the matrices.
    matrix_floats: of all matrices. row_floats: of what goes into the layer of a token.
    """

    conv_width: int

    @property
    @abstractmethod
    def heads(self) -> int: ...

    @property
    @abstractmethod
    def matrix_floats(self) -> int: ...

    @property
    @abstractmethod
    def row_floats(self) -> int: ...

    @property
    @abstractmethod
    def fills_vectors(self) -> bool:
        """Return whether kernels compute such a layer, if they know its kind: those of a CPU know all."""

    @property
    def prepared_floats(self) -> int:
        """Floats of what a CPU's kernels make of a token before its states take it in."""
        return 0

    @property
    def kept_rows(self) -> int:
        """Tokens of which a sequence keeps what went into the layer: those that may be replayed, a step's own, and what
        the convolution sees before them."""
        return self.conv_width - 1 + REPLAYED_ROWS

    @property
    def matrix_bytes(self) -> int:
        return 4 * self.matrix_floats

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state: the matrices; the kept rows, float32 [kept_rows, row_floats], the row of
        position p at p % kept_rows; and int64 [heads]: how many tokens the matrix of each head has taken in."""
        return _rounded(self.positions_begin + 8 * self.heads, 64)

    @property
    def positions_begin(self) -> int:
        """Where in a state it stands how many tokens each head has taken in."""
        return _rounded(self.matrix_bytes + 4 * self.kept_rows * self.row_floats, 8)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot: the matrices, and the rows that the convolution sees before the next token, float32
        [conv_width - 1, row_floats]; zeros where there is no such token."""
        return _rounded(self.matrix_bytes + 4 * (self.conv_width - 1) * self.row_floats, 64)


class MatrixShape(StateShape):
    """The shape of a layer whose heads keep a matrix each: float32 [heads, columns / lanes, rows, lanes]."""

    @property
    @abstractmethod
    def matrix_dims(self) -> tuple[int, int]:
        """Rows and columns of a head's matrix."""

    @property
    def lanes(self) -> int:
        """Columns that lie side by side."""
        _, columns = self.matrix_dims
        return TILE if columns % TILE == 0 else columns

    @property
    def matrix_floats(self) -> int:
        rows, columns = self.matrix_dims
        return self.heads * rows * columns


class ConvolvedShape(MatrixShape):
    """The shape of such a layer with a convolution in front. channels: features that it sees, the first of a kept
    row."""

    @property
    @abstractmethod
    def channels(self) -> int: ...


@dataclass(frozen=True)
class DeltaShape(ConvolvedShape):
    """A layer of Gated DeltaNet, or of Kimi Delta Attention: a value head's matrix has a row for each feature
    of its key, a column for each of its value.

    key_heads, key_dim: of queries and of keys. value_heads: a multiple of key_heads.
    conv_width: tokens that the convolution sees, the last one included.
    is_tiled: value head h belongs to key head h % key_heads; else those of one key head follow each other.
    decays: of each value head, or of each of its key features.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    is_tiled: bool = False
    decays: Literal["head", "key"] = "head"

    @property
    def channels(self) -> int:
        """Features that the convolution sees: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_features

    @property
    def value_features(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def fills_vectors(self) -> bool:
        is_paired = self.decays == "head" or self.key_heads == self.value_heads
        return self.key_dim % TILE == 0 == self.value_dim % TILE and is_paired

    @property
    def prepared_floats(self) -> int:
        keys = (2 if self.decays == "head" else 4) * self.key_dim + TILE
        return self.key_heads * keys + self.value_heads * (self.value_dim + TILE)

    @property
    def row_floats(self) -> int:
        """What is kept of a token that the state does not hold yet: what the convolution sees, and the gates."""
        return self.channels + self.value_heads + self.decay_features

    @property
    def decay_features(self) -> int:
        """Gates of a token by which states forget."""
        return self.value_heads * (1 if self.decays == "head" else self.key_dim)

    @property
    def heads(self) -> int:
        return self.value_heads

    @property
    def matrix_dims(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim


@dataclass(frozen=True)
class ConvShape(StateShape):
    """A layer of nothing but a short convolution: what it keeps of a sequence are rows alone.

    channels: features that the convolution sees. conv_width: tokens, the last one included.
    """

    channels: int
    conv_width: int = 3

    @property
    def heads(self) -> int:
        return 0

    @property
    def matrix_floats(self) -> int:
        return 0

    @property
    def row_floats(self) -> int:
        """What is kept of a token is what the convolution sees."""
        return self.channels

    @property
    def fills_vectors(self) -> bool:
        return self.channels % TILE == 0


@dataclass(frozen=True)
class Mamba2Shape(ConvolvedShape):
    """A layer of Mamba 2: a head's matrix has a row for each feature of B and C, a column for each of x.

    num_heads: a multiple of num_groups, whose heads follow each other. state_size: features of a group's B and C.
    conv_width: tokens that the convolution sees, the last one included.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int = 4

    @property
    def features(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Features that the convolution sees: x of all heads, B and C of all groups."""
        return self.features + 2 * self.num_groups * self.state_size

    @property
    def fills_vectors(self) -> bool:
        return self.state_size % TILE == 0 == self.head_dim % TILE

    @property
    def prepared_floats(self) -> int:
        return self.num_groups * (2 * self.state_size + TILE) + self.num_heads * (self.head_dim + TILE)

    @property
    def row_floats(self) -> int:
        """What is kept of a token that the state does not hold yet: what the convolution sees, and a step's length a
        head."""
        return self.channels + self.num_heads

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def matrix_dims(self) -> tuple[int, int]:
        return self.state_size, self.head_dim


@dataclass(frozen=True)
class MambaShape(ConvolvedShape):
    """A layer of Mamba: its heads are runs of features that lie side by side, each with a state of its own, a column
    of a matrix with a row for each feature of B and C.

    state_size: of a feature, and of B and C, which all share. step_rank: features of what makes the steps.
    conv_width: tokens that the convolution sees, the last one included.
    """

    features: int
    state_size: int
    step_rank: int
    conv_width: int = 4

    @property
    def channels(self) -> int:
        """Features that the convolution sees."""
        return self.features

    @property
    def fills_vectors(self) -> bool:
        return all(size % TILE == 0 for size in (self.features, self.state_size, self.step_rank))

    @property
    def low_floats(self) -> int:
        """What a CPU's kernels find side by side of a token: B, C, what makes the steps, and zeros up to a group."""
        return 2 * self.state_size + _rounded(self.step_rank, INT8_GROUP)

    @property
    def prepared_floats(self) -> int:
        return 2 * self.features + self.low_floats

    @property
    def row_floats(self) -> int:
        """What is kept of a token that the state does not hold yet: what the convolution sees, the steps, and B."""
        return 2 * self.features + self.state_size

    @property
    def heads(self) -> int:
        return self.features // self.matrix_dims[1]

    @property
    def matrix_dims(self) -> tuple[int, int]:
        return self.state_size, TILE if self.features % TILE == 0 else self.features


# What a time mix of RWKV-7 makes of a token, so many features of each side by side: what the next token sees, keys,
# values, decays and rates before their sigmoids, receptances, gates of what comes out, and what mixes a layer's values
# with those of the first.
RWKV7_PROJECTED = ("x", "k", "v", "w", "a", "r", "g", "value_gate")
RWKV7_KEPT = RWKV7_PROJECTED[:5]  # of a token that the state does not hold yet
RWKV7_MIXED = ("r", "w", "k", "v", "a", "g")  # what a token and the one before it are mixed for


@dataclass(frozen=True)
class Rwkv7Shape(MatrixShape):
    """A time mix of RWKV-7: a head's matrix has a row for each feature of its key, a column for each of its value."""

    num_heads: int
    head_dim: int
    conv_width: int = 2  # a token sees the one before it

    @property
    def features(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def fills_vectors(self) -> bool:
        return self.head_dim % TILE == 0 and self.head_dim <= 256  # a head's matrix is on a thread's stack, too

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def matrix_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    @property
    def row_floats(self) -> int:
        return len(RWKV7_KEPT) * self.features

    @property
    def prepared_floats(self) -> int:
        return (len(RWKV7_PROJECTED) + len(RWKV7_MIXED) + 2) * self.features


@dataclass(frozen=True)
class ShiftShape(StateShape):
    """A layer that sees a token and the one before it, and keeps no more: so many features of each."""

    features: int
    conv_width: int = 2

    @property
    def fills_vectors(self) -> bool:
        return self.features % TILE == 0

    @property
    def heads(self) -> int:
        return 1

    @property
    def matrix_floats(self) -> int:
        return 0

    @property
    def row_floats(self) -> int:
        return self.features

    @property
    def prepared_floats(self) -> int:
        return self.features


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
