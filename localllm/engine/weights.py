"""Which format a model's weights are used in, and where they come from: its checkpoint, or a packed model of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from localllm.engine.placement import process_memory, require_cap
from localllm.errors import Fix, LocalLLMError, UsageError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_directory, packed_recipes, source_id
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.checkpoints.checkpoint import Checkpoint, is_quantized
from localllm.models.families import load_config
from localllm.models.kept_weights import kept_weights
from localllm.models.packed_file import needs_conversion
from localllm.models.stored_matrices import blocks_at_once, held_bytes, stored_config
from localllm.offload.planner.fit_errors import cannot_be_packed, more_of
from localllm.offload.planner.model_shape import Packing
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.quant.layouts import DEFAULT, KEPT, SIZES, BF12Layout, DenseLayout, Sizes, recipe_name

if TYPE_CHECKING:
    from localllm.models.block_source import CheckpointBlocks
    from localllm.models.load import Progress
    from localllm.models.packed import PackedModel
    from localllm.quant.recipe import Recipe

# Below it a packed model saves less time than it takes to explain: such weights are read in a second, and a step of
# them is fast.
UNPACKED_BYTES = 512 << 20
# Of a conversion, beside its matrix: pieces that are read and written, what the C library keeps between two matrices.
_BESIDE_BYTES = 24 << 20
_NO_ROOM = "close other programs, or choose a smaller model: localllm list"


def choose_recipe(weights: str, config: ModelConfig, packed: Sequence[str], dtype: str = "bf16") -> str:
    """Return the name of the recipe that `weights` asks for. packed: those in which the model is packed already.

    "auto": what is packed, int4-g64 before the others; else `dtype`, that of the activations, for a small model, int4
    for one whose matrices take 512 MiB or more in bf16. Raises UsageError for a name that is none, and for unpacked
    weights of another type than the activations.
    """
    if weights != "auto":
        name = recipe_name(weights)
        own = _own_dtype(SIZES[name])
        if own not in (None, dtype):
            raise UsageError(
                f"{name} weights cannot be used with {dtype} activations",
                why="weights that are not quantized have the type of the activations",
                fix=Fix.flag("--weights", name, "--dtype", own),
            )
        return name
    # A copy of unquantized weights, in the order in which they are streamed, is not a choice of a format.
    usable = [name for name in (DEFAULT, *SIZES) if name in packed and _own_dtype(SIZES[name]) is None]
    if usable:
        return usable[0]
    bf16_bytes = sum(2 * layout.num_weights for layout in block_layouts(config))
    return dtype if bf16_bytes < UNPACKED_BYTES else DEFAULT


def choose_weights(weights: str, files: ModelFiles | None, config: ModelConfig, dtype: str = "bf16") -> Sizes:
    """Return the recipe that `weights` asks for, of a model on this disk if `files` says where.

    "kept", with or without the format of most codes, and "auto" where there are any: the checkpoint's own. Raises as
    `choose_recipe` and `kept_weights` do, UsageError where no codes can be kept.
    """
    if weights == "auto" or weights.partition("-")[0] == KEPT:
        kept = None if files is None else codes_to_keep(files, config)
        if kept is not None:
            return kept
        if weights != "auto":
            name = "the model" if files is None else files.name
            why = "it is not on this disk" if files is None else "its weights are not quantized, or as FP8 is"
            raise UsageError(f"{name} has no codes to keep", why=why, fix=Fix.flag("--weights", "int4"))
    return SIZES[choose_recipe(weights, config, () if files is None else packed_recipes(files), dtype)]


def codes_to_keep(files: ModelFiles, config: ModelConfig) -> Sizes | None:
    """Return the recipe that keeps the codes of the checkpoint; None where it has none. Raises CheckpointError."""
    if not is_quantized(files.directory):
        return None
    with Checkpoint.open(files.directory, config.stored) as checkpoint:
        return kept_weights(checkpoint, stored_config(checkpoint, config))


def is_unpacked(weights: Sizes) -> bool:
    """Return whether these weights are read straight from the checkpoint, which holds them as they are."""
    return isinstance(weights.blocks, DenseLayout)


def compact_form(weights: Sizes, config: ModelConfig, packed: Sequence[str]) -> Sizes | None:
    """Return the form in which bf16 weights are streamed to a CPU: the same numbers in fewer bytes. Return None where
    they are streamed as they are: they do not fit into that form, or were packed before."""
    compact = SIZES["bf12"]
    if weights.name != "bf16" or config.mixtures or (weights.name in packed and compact.name not in packed):
        return None
    is_smaller = model_bytes(config, compact) < model_bytes(config, weights)  # units of 128 columns, where there are 64
    from localllm.kernels import cpu_bf12

    return compact if is_smaller and cpu_bf12.is_available() else None


def _own_dtype(weights: Sizes) -> str | None:
    """Return the type of weights that are not quantized; None for others."""
    if isinstance(weights.blocks, BF12Layout):
        return "bf16"
    return weights.blocks.name if isinstance(weights.blocks, DenseLayout) else None


@contextmanager
def open_checkpoint(files: ModelFiles, config: ModelConfig, weights: Recipe) -> Iterator[CheckpointBlocks]:
    """Yield the blocks of a model straight from its checkpoint; their `config` has a head of its own where that has
    one."""
    from localllm.models.block_source import CheckpointBlocks

    with Checkpoint.open(files.directory, config.stored) as checkpoint:
        yield CheckpointBlocks(checkpoint, config, weights)


def open_packed(
    files: ModelFiles,
    config: ModelConfig,
    weights: Recipe,
    converting: Progress,
    waiting: Callable[[str], None],
    ram_bytes: int | None = None,
) -> PackedModel:
    """Return the packed model, made first where it is not there yet: the rest is as in `pack_model`.

    Raises what `pack_model` and `PackedModel.open` raise.
    """
    from localllm.models.packed import PackedModel

    directory = packed_directory(files, weights.name)
    if needs_conversion(directory):
        pack_model(files, weights, converting, waiting, ram_bytes)
    return PackedModel.open(directory, config, weights, source_id(files), model=files.name)


def as_stored(
    files: ModelFiles | None, name: str, config: ModelConfig, weights: Sizes
) -> tuple[ModelConfig, Packing | None]:
    """Return the config, with a head of its own where the checkpoint has one, and what must be packed before the model
    runs, None where it is packed. files: None where the model is not on this disk; what cannot be read is estimated."""
    held = max(held_bytes(layout, weights, None) for layout in block_layouts(config))
    if files is not None:
        with suppress(LocalLLMError), Checkpoint.open(files.directory, config.stored) as checkpoint:
            stored = stored_config(checkpoint, config)
            held = max(held_bytes(layout, weights, checkpoint) for layout in block_layouts(stored))
            config = stored
        if not needs_conversion(packed_directory(files, weights.name)):
            return config, None
    return config, _packing(name, weights, blocks_at_once(weights) * held, is_here=files is not None)


def _packing(model: str, weights: Sizes, held_bytes: int, *, is_here: bool = True) -> Packing:
    num_bytes = held_bytes + _BESIDE_BYTES
    if is_unpacked(weights):  # no wish of `quantize`: it is written where not all of it has room in memory
        return Packing(num_bytes, is_for_streaming=True)
    pull = "" if is_here else f"localllm pull {shlex.quote(model)} && "
    return Packing(num_bytes, f"{pull}localllm quantize {shlex.quote(model)} --weights {weights.flag}")


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
    import torch

    from localllm.models.convert import convert

    require_cap(ram_bytes)
    vocab_size = load_config(files.directory).vocab_size

    def require_memory(held_bytes: int) -> None:
        # Compiles and loads what they need, bitsandbytes 190 MB of it, before what the program holds is counted.
        for weight_format in weights.formats:
            weight_format.quantize(torch.zeros(1, 64))
        memory = process_memory(ram_bytes, weights, vocab_size)
        packing = _packing(files.name, weights, held_bytes)
        least = memory.program_bytes + packing.num_bytes
        if least > memory.ram_bytes:
            more = more_of("--ram", least, memory.most_bytes)
            fixes = [f"{packing.command} {fix}" for fix in more] if packing.command else more
            raise cannot_be_packed(files.name, weights.name, memory, packing, fixes or [_NO_ROOM])

    directory, source = packed_directory(files, weights.name), source_id(files)
    convert(files.directory, directory, weights, source, converting, waiting, require_memory, model=files.name)
    give_back_freed()
