"""Which format a model's weights are used in, and where they come from: its checkpoint, or a packed model of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from localllm.errors import UsageError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_directory, source_id
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoint import Checkpoint
from localllm.models.config import ModelConfig
from localllm.models.convert import convert
from localllm.models.layout import block_layouts
from localllm.models.load import Progress
from localllm.models.packed import PackedModel, needs_conversion
from localllm.quant.dense import Dense
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe, recipe

# Below it a packed model saves less time than it takes to explain: such weights are read in a second, and a step of
# them is fast.
UNPACKED_BYTES = 512 << 20


def choose_recipe(weights: str, config: ModelConfig, packed: Sequence[str], dtype: torch.dtype = torch.bfloat16) -> str:
    """The name of the recipe that `weights` asks for. packed: those in which the model is packed already.

    "auto": what is packed, int4-g64 before the others; else `dtype`, that of the activations, for a small model, int4
    for one whose matrices take 512 MiB or more in bf16. Raises UsageError for a name that is none, and for unpacked
    weights of another type than the activations.
    """
    if weights != "auto":
        name = recipe(weights).name
        if is_unpacked(RECIPES[name]) and name != Dense(dtype).name:
            raise UsageError(
                f"{name} weights cannot be used with {Dense(dtype).name} activations",
                why="weights that are not quantized have the type of the activations",
                fix=f"--weights {name} --dtype {name}",
            )
        return name
    # A copy of unquantized weights, in the order in which they are streamed, is no choice of a format.
    usable = [name for name in (DEFAULT, *RECIPES) if name in packed and not is_unpacked(RECIPES[name])]
    if usable:
        return usable[0]
    matrices = (matrix for layout in block_layouts(config) for matrix in layout.matrices)
    bf16_bytes = sum(matrix.out_features * matrix.in_features * 2 for matrix in matrices)
    return Dense(dtype).name if bf16_bytes < UNPACKED_BYTES else DEFAULT


def is_unpacked(weights: Recipe) -> bool:
    """Whether these weights are read straight from the checkpoint, which holds them as they are."""
    return isinstance(weights.blocks, Dense)


@contextmanager
def open_checkpoint(files: ModelFiles, config: ModelConfig, weights: Recipe) -> Iterator[CheckpointBlocks]:
    """The blocks of a model straight from its checkpoint; their `config` has a head of its own where that has one."""
    with Checkpoint.open(files.directory) as checkpoint:
        yield CheckpointBlocks(checkpoint, config, weights)


def open_packed(
    files: ModelFiles, config: ModelConfig, weights: Recipe, converting: Progress, waiting: Callable[[str], None]
) -> PackedModel:
    """The packed model, made first where it is not there yet: `converting` and `waiting` are as in `convert`.

    Raises what `convert` and `PackedModel.open` raise.
    """
    directory, source = packed_directory(files, weights.name), source_id(files)
    if needs_conversion(directory):
        convert(files.directory, directory, weights, source, converting, waiting, model=files.name)
    return PackedModel.open(directory, config, weights, source, model=files.name)
