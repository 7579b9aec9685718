"""What the blocks of a model consist of: matrices, vectors, experts, and their tensors in a recipe. Holds no bytes.

`block_layouts` has those of a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from localllm.layers.config import (
    MLPConfig,
)
from localllm.offload.streaming.ring import PAGE_BYTES
from localllm.quant.layouts import RecipeOf, Sizes, TensorSpec, WeightLayout

F = TypeVar("F", bound=WeightLayout)

EMBED, HEAD = "embed", "head"  # the names of the first block and of the last
EXPERTS = "experts"  # the name of the tensor of all records of a block
COEFFICIENTS = "coefficients"  # the name of what an activation has learnt
ALIGNMENT_BYTES = 64  # of tensors: a cache line, and an AVX-512 vector
SHARED_CHECKSUM = "shared_checksum"  # of a mixture: the XXH3-128 of all its tensors but the experts, in their order
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Interleaved:
    """Some rows of a matrix belong to heads whose rotating features lie in pairs in a checkpoint. Here the first of all
    pairs come before the second ones, as RoPE turns them. first: that many rows are before them."""

    rows: int
    head_dim: int
    rotary_dim: int
    first: int = 0


@dataclass(frozen=True)
class Grouped:
    """The first `rows` of a matrix are stored in groups of runs of rows, by their lengths. Here the runs of one kind
    come together, those of the kind `order[0]` first. of_fused: parts that are stored apart have no groups."""

    rows: int
    runs: tuple[int, ...]
    order: tuple[int, ...]
    of_fused: bool = False


@dataclass(frozen=True)
class HeadCut:
    """Where a matrix is found that a checkpoint does not store under its own name: of each head some rows of another.

    stored: of the other. heads, rows: how many, and of each. first: of a head's rows, from which on they are this
    matrix's. transposes: they are columns here, and the other's columns the rows of a head.
    """

    stored: str
    heads: int
    rows: int
    first: int
    transposes: bool = False

    def shape(self, matrix: Matrix) -> tuple[int, int]:
        """Return the shape of the other matrix."""
        columns = matrix.out_features // self.heads if self.transposes else matrix.in_features
        return self.heads * self.rows, columns

    def count(self, matrix: Matrix) -> int:
        """Return how many of a head's rows there are this matrix's."""
        return matrix.in_features if self.transposes else matrix.out_features // self.heads


@dataclass(frozen=True)
class Matrix:
    """One linear layer. Its rows are those of the checkpoint's `parts`, or of `stored` where that is stored fused, and
    are multiplied by `scale` when they are read, those of some parts by a number of their own besides."""

    name: str  # inside its block: "qkv_proj"
    stored: str  # "model.layers.0.self_attn.qkv_proj"
    parts: Mapping[str, int]  # stored names -> rows, in order
    in_features: int
    has_bias: bool = False
    # embedding: the token embedding or the head. low_rank: one of two matrices whose product stands for a large one.
    role: Literal["block", "embedding", "router", "low_rank"] = "block"
    interleaved: Interleaved | None = None
    grouped: Grouped | None = None
    scale: float = 1.0
    cut: HeadCut | None = None
    part_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def scaled_rows(self) -> list[tuple[float, int]]:
        """What the stored rows are multiplied by, and how many of them: one after the other."""
        if not self.part_scales:
            return [(self.scale, self.out_features)]
        return [(self.scale * self.part_scales.get(name, 1.0), rows) for name, rows in self.parts.items()]

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    def format(self, recipe: RecipeOf[F]) -> F:
        forms = {"block": recipe.blocks, "router": recipe.router}
        return recipe.own.get(self.stored, forms.get(self.role, recipe.embedding))

    def rows_of(self, first: int, rows: int) -> Matrix:
        """Return some of its rows, where they are whole parts, as a matrix without a bias."""
        begins = dict(zip(self.parts, itertools.accumulate(self.parts.values(), initial=0), strict=False))
        parts = {name: count for name, count in self.parts.items() if first <= begins[name] < first + rows}
        assert sum(parts.values()) == rows
        pairs, groups = self.interleaved, self.grouped
        if pairs is not None:
            begin, end = (min(max(row - first, 0), rows) for row in (pairs.first, pairs.first + pairs.rows))
            pairs = replace(pairs, rows=end - begin, first=begin)
        if groups is not None:
            groups = replace(groups, rows=min(max(groups.rows - first, 0), rows))
        return replace(self, parts=parts, has_bias=False, interleaved=pairs, grouped=groups)

    def specs(self, recipe: Sizes) -> dict[str, TensorSpec]:
        """Its tensors by their names inside the block: those of its format, and the bias."""
        tensors = self.format(recipe).specs(self.out_features, self.in_features)
        specs = {f"{self.name}.{name}": spec for name, spec in tensors.items()}
        if self.has_bias:
            specs[f"{self.name}.linear_bias"] = TensorSpec((self.out_features,), "float32")
        return specs


@dataclass(frozen=True)
class Vector:
    """A few numbers in fp32: a norm's weights or bias, what corrects a router's choice, a convolution's taps.

    stored: its name in a checkpoint. parts: names and features of what makes it up where that is not stored.
    taps: of a convolution, stored as [features / taps, 1, taps]; here all channels of one tap lie together.
    is_norm_weight: near one, not near zero. offset: what is stored lacks it.
    is_logarithm: -exp of it is stored.
    """

    name: str  # inside its block: "norm_in"
    stored: str  # "model.layers.0.input_layernorm.weight"
    features: int
    is_norm_weight: bool = True
    offset: float = 0.0
    taps: int = 1
    parts: tuple[tuple[str, int], ...] = ()
    is_logarithm: bool = False


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor, and the byte at which it begins in what holds it."""

    spec: TensorSpec
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.spec.nbytes


@dataclass(frozen=True)
class Record:
    """One expert as it lies in its block's file and in memory: tensors at multiples of 64 bytes, zeros, and in the last
    16 bytes the XXH3-128 of all before them."""

    tensors: Mapping[str, PlacedTensor]
    num_bytes: int


@dataclass(frozen=True)
class Residual:
    """The hidden state that blocks read and add to: its features, and what multiplies all that is added."""

    features: int
    scale: float


@dataclass(frozen=True)
class Experts:
    """The experts of one block: all of one shape. stored: of them all, "model.layers.0.mlp.experts". alternates: see
    `StoredForm.alternates_gates`."""

    stored: str
    num_experts: int
    top_k: int
    config: MLPConfig
    residual: Residual
    alternates: bool = False

    def matrices(self, index: int) -> tuple[Matrix, ...]:
        """Return an expert's matrices, by their names in its record."""
        return gated_matrices(self.config, f"{self.stored}.{index}", self.residual, alternates=self.alternates)

    @property
    def num_weights(self) -> int:
        """Weights of one expert."""
        return sum(matrix.num_weights for matrix in self.matrices(0))

    def record(self, recipe: Sizes) -> Record:
        """Return where the tensors of an expert lie in its record."""
        tensors, end = {}, 0
        for matrix in self.matrices(0):
            for name, spec in matrix.specs(recipe).items():
                tensors[name] = PlacedTensor(spec, rounded_up(end, ALIGNMENT_BYTES))
                end = tensors[name].end
        return Record(tensors, rounded_up(end + CHECKSUM_BYTES, PAGE_BYTES))


@dataclass(frozen=True)
class BlockLayout:
    """The tensors of one block: `{matrix}.{tensor of its format}`, `{matrix}.linear_bias`, `{vector}`; of a mixture
    also `shared_checksum` and `experts`, uint8 [number of experts, bytes of a record]."""

    name: str  # "embed", "layers.0.attention", "layers.0.mlp", "head"
    matrices: tuple[Matrix, ...]
    vectors: tuple[Vector, ...] = field(default=())
    experts: Experts | None = None

    def specs(self, recipe: Sizes) -> dict[str, TensorSpec]:
        """Every tensor of the block in the order in which it is packed; vectors and biases are fp32."""
        specs: dict[str, TensorSpec] = {}
        for matrix in self.matrices:
            specs |= matrix.specs(recipe)
        specs |= {vector.name: TensorSpec((vector.features,), "float32") for vector in self.vectors}
        if self.experts is not None:
            specs[SHARED_CHECKSUM] = TensorSpec((CHECKSUM_BYTES,), "uint8")
            specs[EXPERTS] = TensorSpec((self.experts.num_experts, self.experts.record(recipe).num_bytes), "uint8")
        return specs

    def small_tensors(self) -> list[str]:
        """Vectors and biases: a few kilobytes beside the megabytes of the matrices."""
        biases = [f"{matrix.name}.linear_bias" for matrix in self.matrices if matrix.has_bias]
        return [*biases, *(vector.name for vector in self.vectors)]

    def nbytes(self, recipe: Sizes) -> int:
        return sum(spec.nbytes for spec in self.specs(recipe).values())

    @property
    def num_weights(self) -> int:
        """Weights of the block's matrices, those of all experts among them."""
        experts = 0 if self.experts is None else self.experts.num_experts * self.experts.num_weights
        return experts + sum(matrix.num_weights for matrix in self.matrices)

    @property
    def num_active_weights(self) -> int:
        """Weights that one token is multiplied by."""
        experts = 0 if self.experts is None else self.experts.top_k * self.experts.num_weights
        return experts + sum(matrix.num_weights for matrix in self.matrices)


def gated_matrices(
    config: MLPConfig, stored: str, residual: Residual, prefix: str = "", *, alternates: bool = False
) -> tuple[Matrix, ...]:
    """Return the matrices of a feed-forward: gate and up as one, or up alone, and down.

    stored: its name in a checkpoint.
    prefix: of the matrices' names inside their block.
    alternates: see `StoredForm.alternates_gates`.
    """
    width, bias = config.intermediate_size, config.has_bias
    gate_up = {f"{stored}.gate_proj": width} if config.has_gate else {}
    gate_up[f"{stored}.up_proj"] = width
    pairs = Grouped(2 * width, (1, 1), (0, 1), of_fused=True) if alternates else None
    return (
        Matrix(f"{prefix}gate_up_proj", f"{stored}.gate_up_proj", gate_up, residual.features, bias, grouped=pairs),
        Matrix(
            f"{prefix}down_proj",
            f"{stored}.down_proj",
            {f"{stored}.down_proj": residual.features},
            width,
            bias,
            scale=residual.scale,
        ),
    )


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
