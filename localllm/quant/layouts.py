"""The tensors that each weight format makes of a matrix: what plans, files and the formats share. Needs no torch."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, cast

from localllm.errors import Fix, UsageError
from localllm.kernels.sizes import CENTRED, INT8_WORD, TILE, UNIT, UNIT_BYTES, WORD, Weights, capacity, units

if TYPE_CHECKING:
    import torch

Calibration = Literal["hqq", "rtn"]
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int8": 1, "uint8": 1}
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}  # of activations, as a user names them

INT8_COLUMNS = 64  # K is padded to a multiple of it
NF4_BLOCK = 64  # weights that share one absmax
# Weights that are quantized at once.
INT4_SLAB, INT8_SLAB, NF4_SLAB, BF12_SLAB = 1 << 22, 1 << 18, 1 << 22, 1 << 18
# Copies of them in 32 bits that are there at once: of INT4 the slab before and this one, of NF4 bitsandbytes' own.
_INT4_COPIES, _INT8_COPIES, _NF4_COPIES, _BF12_COPIES = 2, 6, 7, 12


@dataclass(frozen=True)
class TensorSpec:
    """dtype: as torch names it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


class WeightLayout(Protocol):
    """The tensors of one matrix [out_features, in_features], rows in dimension 0. They may be padded beyond it."""

    @property
    def name(self) -> str:
        """The name in a packed model's index: two formats whose bytes differ have different names."""
        ...

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """The tensors that `quantize` makes, in the order in which they lie on the disk."""
        ...

    @property
    def weights(self) -> Weights | None:
        """What the codes mean to our kernels; None where they do not read them."""
        ...

    def working_bytes(self, in_features: int, /) -> int:
        """The most that `quantize` holds at once on a CPU, beside the weight and the tensors that it returns."""
        ...


@dataclass(frozen=True)
class DenseLayout:
    """One tensor, `weight` [N, K]."""

    name: str = "bf16"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((out_features, in_features), DTYPE_NAMES[self.name])}

    @property
    def weights(self) -> None:
        return None

    def working_bytes(self, _in_features: int, /) -> int:
        return 0


@dataclass(frozen=True)
class Int4Layout:
    """tile16 tensors: N padded to 16 with rows of zeros, K to `group` with columns that weigh nothing."""

    group: int = 64
    calibration: Calibration = "hqq"

    def __post_init__(self) -> None:
        assert self.group % WORD == 0 and self.calibration in ("hqq", "rtn")

    @property
    def name(self) -> str:
        return f"int4-g{self.group}" + ("" if self.calibration == "hqq" else f"-{self.calibration}")

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        tiles, groups = -(-out_features // TILE), -(-in_features // self.group)
        return {
            "qweight": TensorSpec((tiles, groups * self.group // WORD, TILE), "int32"),
            "scale": TensorSpec((tiles, groups, TILE), "float16"),
            "bias": TensorSpec((tiles, groups, TILE), "float16"),
        }

    @property
    def weights(self) -> Weights:
        return Weights(4, self.group)

    def working_bytes(self, in_features: int, /) -> int:
        return _INT4_COPIES * 4 * max(INT4_SLAB, TILE * in_features)


@dataclass(frozen=True)
class Int8Layout:
    """`qweight` and `scale` as kernels/int8.py has them; padding is zero."""

    name: str = "int8"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        tiles, columns = -(-out_features // TILE), -(-in_features // INT8_COLUMNS) * INT8_COLUMNS
        return {
            "qweight": TensorSpec((tiles, columns // INT8_WORD, TILE, INT8_WORD), "int8"),
            "scale": TensorSpec((tiles, TILE), "float32"),
        }

    @property
    def weights(self) -> Weights:
        return Weights(8, None, has_bias=False)

    def working_bytes(self, in_features: int, /) -> int:
        return _INT8_COPIES * 4 * max(INT8_SLAB, TILE * in_features)


CodeKind = Literal["int4", "int8", "fp4", "iq4", "nf4", "bnb4"]
# The values of the 16 codes, as whole numbers: what they are in units of a group's scale.
TABLES: Mapping[CodeKind, tuple[int, ...]] = MappingProxyType(
    {
        "int4": CENTRED,
        # Twice the values of FP4 (OCP Microscaling v1.0, E2M1): MXFP4 and NVFP4.
        "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
        # llama.cpp's IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
        "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
        # 127 times bitsandbytes' normal floats (arXiv:2305.14314), rounded: up to 0.4 % of a group's largest weight.
        "nf4": (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127),
        # 120 times bitsandbytes' FP4; the smallest, 0.625, is rounded.
        "bnb4": (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30),
    }
)


@dataclass(frozen=True)
class CodedLayout:
    """Codes in groups along K, each with a scale in fp16, as other programs' files have them: w = scale * value(code),
    plus a bias where the groups of `int8` have one. Tiled as INT4 and INT8 are; padding weighs nothing.

    kind: signed bytes, or 4-bit codes that stand for the values of a table.
    """

    kind: CodeKind
    group: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        assert self.group in (16, 32, 64, 128) and (self.kind == "int8" or not self.has_bias)

    @property
    def name(self) -> str:
        """`int4-g32` is another format, whose groups have a bias."""
        return f"{self.kind}-g{self.group}" + ("-bias" if self.has_bias else "-sym" if self.kind == "int4" else "")

    @property
    def table(self) -> tuple[int, ...] | None:
        """The values of 4-bit codes; None for bytes."""
        return TABLES.get(self.kind)

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        tiles, groups = -(-out_features // TILE), -(-in_features // self.group)
        columns = groups * self.group
        codes = TensorSpec((tiles, columns // WORD, TILE), "int32")
        if self.kind == "int8":
            codes = TensorSpec((tiles, columns // INT8_WORD, TILE, INT8_WORD), "int8")
        values = TensorSpec((tiles, groups, TILE), "float16")
        return {"qweight": codes, "scale": values} | ({"bias": values} if self.has_bias else {})

    @property
    def weights(self) -> Weights:
        return Weights(8 if self.kind == "int8" else 4, self.group, self.has_bias, self.table)

    def working_bytes(self, in_features: int, /) -> int:
        return _INT8_COPIES * 4 * max(INT8_SLAB, TILE * in_features)


@dataclass(frozen=True)
class NF4Layout:
    """`qweight`: two codes a byte, the first in the high nibble; `absmax` of each block."""

    name: str = "nf4"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        count = out_features * in_features
        return {
            "qweight": TensorSpec((-(-count // 2),), "uint8"),
            "absmax": TensorSpec((-(-count // NF4_BLOCK),), "float32"),
        }

    @property
    def weights(self) -> None:
        return None

    def working_bytes(self, in_features: int, /) -> int:
        return _NF4_COPIES * 4 * whole_blocks(in_features, NF4_SLAB) * in_features


def whole_blocks(in_features: int, slab_weights: int) -> int:
    """Rows of a slab: so many of nf4's blocks of them, as they begin where a block does whatever their width."""
    return max(1, slab_weights // (NF4_BLOCK * max(1, in_features))) * NF4_BLOCK


@dataclass(frozen=True)
class BF12Layout:
    """`packed`, `row` and `exceptions` of kernels/bf12.py."""

    name: str = "bf12"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        tiles = -(-out_features // TILE)
        return {
            "packed": TensorSpec((tiles, TILE, units(in_features), UNIT_BYTES), "uint8"),
            "row": TensorSpec((tiles, TILE, 3), "int32"),
            "exceptions": TensorSpec((tiles, capacity(in_features)), "int32"),
        }

    @property
    def weights(self) -> None:
        return None

    def working_bytes(self, in_features: int, /) -> int:
        return _BF12_COPIES * 4 * max(BF12_SLAB, TILE * units(in_features) * UNIT)


F = TypeVar("F", bound=WeightLayout, covariant=True)


@dataclass(frozen=True)
class StackedLayout(Generic[F]):
    """A matrix whose rows a file stores in several formats, one below the other: the tensors of each, "0.qweight",
    "1.qweight", and so on. parts: formats and their rows, in order."""

    parts: tuple[tuple[F, int], ...]

    @property
    def name(self) -> str:
        return "+".join(f"{part.name}:{rows}" for part, rows in self.parts)

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        assert out_features == sum(rows for _, rows in self.parts)
        return {
            f"{number}.{name}": spec
            for number, (part, rows) in enumerate(self.parts)
            for name, spec in part.specs(rows, in_features).items()
        }

    @property
    def weights(self) -> None:
        return None

    def working_bytes(self, in_features: int, /) -> int:
        return max(part.working_bytes(in_features) for part, _ in self.parts)


@dataclass(frozen=True)
class RecipeOf(Generic[F]):
    """The format of each kind of matrix. name: what a person asks for and what a packed model is kept under.

    blocks: of most matrices.
    embedding: of the token embedding, of the head, tied to it or not, and of pairs of small matrices.
    router: of what chooses experts: a few rows, on whose last digits the choice depends.
    own: of single matrices, by the names under which checkpoints store them.
    """

    name: str
    blocks: F
    embedding: F
    router: F
    own: Mapping[str, F] = field(default_factory=dict, compare=False)

    @property
    def flag(self) -> str:
        """What `--weights` names it by."""
        return KEPT if self.own else self.name

    @property
    def formats(self) -> tuple[F, ...]:
        """The formats of all matrices but routers, those of stacked rows one by one."""
        found = dict.fromkeys((self.blocks, self.embedding, *self.own.values()))
        parts = [[part for part, _ in each.parts] if isinstance(each, StackedLayout) else [each] for each in found]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))


Sizes = RecipeOf[WeightLayout]  # a recipe of which no matrix is computed with
DEFAULT = "int4-g64"
ALIASES: Mapping[str, str] = MappingProxyType({"int4": DEFAULT})
_ROUTER = DenseLayout("fp32")
_INT4 = [Int4Layout(group, calibration) for group in (32, 64, 128) for calibration in ("hqq", "rtn")]
SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "bf16": Sizes("bf16", DenseLayout(), DenseLayout(), _ROUTER),
        "bf12": Sizes("bf12", BF12Layout(), BF12Layout(), _ROUTER),
        "fp32": Sizes("fp32", DenseLayout("fp32"), DenseLayout("fp32"), _ROUTER),
        "int8": Sizes("int8", Int8Layout(), Int8Layout(), _ROUTER),
        "nf4": Sizes("nf4", NF4Layout(), Int8Layout(), _ROUTER),
        **{blocks.name: Sizes(blocks.name, blocks, Int8Layout(), _ROUTER) for blocks in _INT4},
    }
)


KEPT = "kept"  # a checkpoint's own codes; a recipe's name says also in which format most of them are
_FORMAT = re.compile(r"(int4|int8|fp4|iq4|nf4|bnb4)-g(\d+)(-sym|-bias)?")


def blocks_of(recipe: str) -> WeightLayout:
    """Return the format of most matrices of the recipe of this name."""
    if recipe in SIZES:
        return SIZES[recipe].blocks
    found = _FORMAT.fullmatch(recipe.removeprefix(f"{KEPT}-"))
    assert found is not None, recipe
    kind, group, ending = found.groups()
    if kind == "int4" and not ending:
        return Int4Layout(int(group))
    return CodedLayout(cast(CodeKind, kind), int(group), ending == "-bias")


def recipe_name(name: str) -> str:
    """Return the recipe's own name for this one or an alias ("int4"). Raises UsageError naming those that there are."""
    found = ALIASES.get(name, name)
    if found not in SIZES:
        near = difflib.get_close_matches(name, [*SIZES, *ALIASES], n=1)
        raise UsageError(
            f"there is no weight format {name!r}",
            why=f"known: {', '.join([*SIZES, *ALIASES])}",
            fix=Fix.flag("--weights", near[0] if near else DEFAULT),
        )
    return found


def can_be_cut(layout: WeightLayout) -> bool:
    """Return whether its tensors have a dimension for rows and one for columns: nf4's run over the ends of rows."""
    return any(len(spec.shape) > 1 for spec in layout.specs(256, 256).values())


def cut_step(layout: WeightLayout) -> int:
    """Rows and columns that a cut may fall between: where the tiles and groups of the format end."""

    def weight_bytes(size: int) -> int:
        """Bytes of the largest tensor of a square matrix, padding included."""
        return max(spec.nbytes for spec in layout.specs(size, size).values())

    return next(
        size for size in (TILE << power for power in range(8)) if 4 * weight_bytes(size) == weight_bytes(2 * size)
    )
