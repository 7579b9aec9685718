"""Which format a model's weights are used in, and where they come from: its checkpoint, or a packed model of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from localllm.engine.placement import process_memory
from localllm.errors import DoesNotFitError, UsageError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_directory, source_id
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoint import Checkpoint
from localllm.models.config import ModelConfig
from localllm.models.convert import convert
from localllm.models.layout import block_layouts
from localllm.models.load import Progress
from localllm.models.packed import PackedModel, needs_conversion
from localllm.offload.host_buffer import give_back_freed
from localllm.offload.plan import Memory, cap
from localllm.quant.dense import Dense
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe, recipe

# Below it a packed model saves less time than it takes to explain: such weights are read in a second, and a step of
# them is fast.
UNPACKED_BYTES = 512 << 20
# Of a conversion, beside its matrix: pieces that are read and written, what the C library keeps between two matrices.
_BESIDE_BYTES = 24 << 20
_SPREAD_BYTES = 8 << 20  # what the same program holds differs by some MB: the cap that is named must do the next time


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
    files: ModelFiles,
    config: ModelConfig,
    weights: Recipe,
    converting: Progress,
    waiting: Callable[[str], None],
    ram_bytes: int | None = None,
) -> PackedModel:
    """The packed model, made first where it is not there yet: the rest is as in `pack_model`.

    Raises what `pack_model` and `PackedModel.open` raise.
    """
    directory = packed_directory(files, weights.name)
    if needs_conversion(directory):
        pack_model(files, weights, converting, waiting, ram_bytes)
    return PackedModel.open(directory, config, weights, source_id(files), model=files.name)


def pack_model(
    files: ModelFiles,
    weights: Recipe,
    converting: Progress,
    waiting: Callable[[str], None],
    ram_bytes: int | None = None,
) -> None:
    """Make, finish or mend the packed model: `converting` and `waiting` are as in `convert`.

    ram_bytes: the most that this process may hold; None: most of what is free. Raises UsageError for more than the
    machine has, DoesNotFitError where that is too little, before anything is written, and what `convert` raises.
    """
    process_memory(ram_bytes)

    def require_memory(held_bytes: int) -> None:
        # Compiles and loads what they need, bitsandbytes 190 MB of it, before what the program holds is counted.
        for weight_format in (weights.blocks, weights.embedding):
            weight_format.quantize(torch.zeros(1, 64))
        give_back_freed()
        memory = process_memory(ram_bytes)
        if memory.program_bytes + held_bytes + _BESIDE_BYTES > memory.ram_bytes:
            raise _packing_refusal(files.name, weights, memory, held_bytes + _BESIDE_BYTES)

    directory, source = packed_directory(files, weights.name), source_id(files)
    convert(files.directory, directory, weights, source, converting, waiting, require_memory, model=files.name)
    give_back_freed()


def _packing_refusal(model: str, weights: Recipe, memory: Memory, held_bytes: int) -> DoesNotFitError:
    least = memory.program_bytes + held_bytes + _SPREAD_BYTES
    # What is not quantized is no wish of `quantize`: it is written where not all of it has room in memory.
    command = "" if is_unpacked(weights) else f"localllm quantize {shlex.quote(model)} --weights {weights.name} "
    fix = f"{command}--ram {cap(least)}"
    return DoesNotFitError(
        f"{model} cannot be packed in {_gib(memory.ram_bytes)} of memory",
        why=f"{weights.name} needs {_gib(least)}: the program has {_gib(memory.program_bytes)}, the largest matrix "
        f"and what is made of it take {_gib(held_bytes)}",
        fix=fix if least <= memory.most_bytes else "close other programs, or choose a smaller model: localllm list",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
