"""The format of each kind of matrix: a model's blocks in one, its embedding and head in another."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from localllm.errors import Fix, UsageError
from localllm.quant.bf12 import BF12
from localllm.quant.dense import Dense
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.nf4 import NF4
from localllm.quant.weight_format import WeightFormat


@dataclass(frozen=True)
class Recipe:
    """`name` is what a person asks for and what a packed model is kept under: "bf16", "int4-g64"."""

    name: str
    blocks: WeightFormat
    embedding: WeightFormat  # of the token embedding, and of the head, tied to it or not


DEFAULT = "int4-g64"
ALIASES: Mapping[str, str] = MappingProxyType({"int4": DEFAULT})
_INT4 = [Int4(group, calibration) for group in (32, 64, 128) for calibration in ("hqq", "rtn")]
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "bf16": Recipe("bf16", Dense(), Dense()),
        "bf12": Recipe("bf12", BF12(), BF12()),
        "fp32": Recipe("fp32", Dense(torch.float32), Dense(torch.float32)),
        "int8": Recipe("int8", Int8(), Int8()),
        "nf4": Recipe("nf4", NF4(), Int8()),
        **{blocks.name: Recipe(blocks.name, blocks, Int8()) for blocks in _INT4},
    }
)


def recipe(name: str) -> Recipe:
    """Return the recipe of this name or alias ("int4"). Raises UsageError naming those that there are."""
    found = RECIPES.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*RECIPES, *ALIASES], n=1)
        raise UsageError(
            f"there is no weight format {name!r}",
            why=f"known: {', '.join([*RECIPES, *ALIASES])}",
            fix=Fix.flag("--weights", near[0] if near else DEFAULT),
        )
    return found
