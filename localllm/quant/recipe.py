"""The recipes whose matrices are computed with: the formats of `layouts.SIZES`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from localllm.quant.bf12 import BF12
from localllm.quant.dense import Dense
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.layouts import DEFAULT as DEFAULT
from localllm.quant.layouts import (
    SIZES,
    BF12Layout,
    DenseLayout,
    Int4Layout,
    Int8Layout,
    NF4Layout,
    RecipeOf,
    WeightLayout,
    recipe_name,
)
from localllm.quant.nf4 import NF4
from localllm.quant.weight_format import WeightFormat

Recipe = RecipeOf[WeightFormat]


def _computing(layout: WeightLayout) -> WeightFormat:
    formats = {DenseLayout: Dense, Int4Layout: Int4, Int8Layout: Int8, NF4Layout: NF4, BF12Layout: BF12}
    found: WeightFormat = formats[type(layout)](**vars(layout))
    return found


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {name: Recipe(name, _computing(sizes.blocks), _computing(sizes.embedding)) for name, sizes in SIZES.items()}
)


def recipe(name: str) -> Recipe:
    """Return the recipe of this name or alias ("int4"). Raises UsageError naming those that there are."""
    return RECIPES[recipe_name(name)]
