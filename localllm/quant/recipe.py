"""The recipes whose matrices are computed with: the formats of `layouts.SIZES`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localllm.quant.coded import Coded
from localllm.quant.dense import Dense
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.layouts import DEFAULT as DEFAULT
from localllm.quant.layouts import (
    SIZES,
    BF12Layout,
    CodedLayout,
    DenseLayout,
    Int4Layout,
    Int8Layout,
    NF4Layout,
    RecipeOf,
    Sizes,
    StackedLayout,
    WeightLayout,
    recipe_name,
)
from localllm.quant.nf4 import NF4
from localllm.quant.stacked import Stacked
from localllm.quant.weight_format import WeightFormat

Recipe = RecipeOf[WeightFormat]


def computing(layout: WeightLayout) -> WeightFormat:
    """Return the format that computes with matrices of this layout."""
    if isinstance(layout, BF12Layout):
        from localllm.quant.bf12 import BF12

        return BF12()
    if isinstance(layout, StackedLayout):
        return Stacked(tuple((computing(part), rows) for part, rows in layout.parts))
    formats = {CodedLayout: Coded, DenseLayout: Dense, Int4Layout: Int4, Int8Layout: Int8, NF4Layout: NF4}
    found: WeightFormat = formats[type(layout)](**vars(layout))
    return found


def recipe_of(sizes: Sizes) -> Recipe:
    """Return the recipe of these sizes, whose matrices are computed with."""
    own = {name: computing(layout) for name, layout in sizes.own.items()}
    return Recipe(sizes.name, computing(sizes.blocks), computing(sizes.embedding), computing(sizes.router), own)


class _Recipes(Mapping[str, Recipe]):
    """Recipes by their own names, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Recipe] = {}

    def __getitem__(self, name: str) -> Recipe:
        if name not in self._made:
            self._made[name] = recipe_of(SIZES[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SIZES)

    def __len__(self) -> int:
        return len(SIZES)


RECIPES: Mapping[str, Recipe] = _Recipes()


def recipe(name: str) -> Recipe:
    """Return the recipe of this name or alias ("int4"). Raises UsageError naming those that there are."""
    return RECIPES[recipe_name(name)]
