"""A model's plan: its sizes from its config and recipe, the memory of this process, the rates of this machine."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from localllm.cache.kv_format import choose_format, kv_bytes_per_sequence, kv_bytes_per_token
from localllm.config import format_bytes
from localllm.engine.memory import DEFAULT_CTX, HEADROOM, available_bytes
from localllm.engine.runner import BATCH_ROWS, DEVICE_BATCH_ROWS
from localllm.errors import Fix, UsageError
from localllm.kernels.cpu_gemv import MAX_ROWS
from localllm.kernels.cpu_linear import is_available
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.models.config import ModelConfig
from localllm.models.cpu_program import native_row_bytes, supports_shape
from localllm.models.layout import BlockLayout, block_layouts
from localllm.models.packed_file import PackedFile
from localllm.models.split_mlp import can_be_split
from localllm.offload.planner.machine import Memory
from localllm.offload.planner.model_shape import BlockShape, ModelShape, Packing
from localllm.offload.planner.plan import GIB
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.quant.bf12 import BF12
from localllm.quant.dense import Dense
from localllm.quant.nf4 import NF4
from localllm.quant.recipe import Recipe

# What a process comes to hold beside its model once it computes: compiled kernels, pages of libraries, stacks.
_GROWTH_BYTES = 12 << 20
# What a process holds without model and tokenizer when it computes, the same for every command that asks: run, chat and
# bench come to 290 to 308 MiB, a small tokenizer included.
_PROGRAM_BYTES = 292 << 20
# More than that, until it ends, where it has just measured and compiled: it counts only where it is more than this, or
# the first process on a machine would want another cap than all that follow, and than `plan` has named.
_FIRST_BYTES = 44 << 20
_PACKING_BYTES = 32 << 20  # stay behind where it has packed the model itself: libraries, pages of the C library
# A tokenizer's tables, for each entry of its vocabulary: 53 MB at 128,000.
_TOKENIZER_BYTES = 500
# With its libraries, once an nf4 matrix is made or used: 191 to 199 MiB; and what it leaves in the heap where it is
# used in bf16: 67.
_BITSANDBYTES_BYTES = 280 << 20
_UNPACKING_BYTES = 8 << 20  # slabs of bf12, and what the C library keeps of them
_STEP_BYTES = 16 << 20  # one that holds more than usual, started again, holds some MB more or less

HOST = torch.device("cpu")


def model_shape(
    config: ModelConfig,
    recipe: Recipe,
    dtype: torch.dtype,
    name: str,
    device: torch.device = HOST,
    kv: str = "auto",
    packing: Packing | None = None,
) -> ModelShape:
    """What the plan needs to know of a model whose activations and KV cache are of `dtype`, computed on `device`."""
    blocks = [_block_shape(layout, recipe) for layout in block_layouts(config)]
    kv_format = choose_format(kv, config.head_dim, dtype)
    layouts = kv_format.layouts(config.num_kv_heads, config.head_dim, dtype)
    row_kv_bytes = layouts[0].layer_bytes // PAGE_TOKENS  # a chunk's pages are dense while one layer reads them
    is_native = device.type == "cpu" and supports_shape(config, recipe, dtype)
    most_rows = DEVICE_BATCH_ROWS if device.type == "cuda" else BATCH_ROWS
    return ModelShape(
        name=name,
        weights=recipe.name,
        kv=kv_format.name if layouts[1] is not None else Dense(dtype).name,
        embed=blocks[0],
        blocks=tuple(blocks[1:-1]),
        head=blocks[-1],
        kv_bytes_per_token=kv_bytes_per_token(layouts, config.num_layers),
        kv_bytes_per_sequence=kv_bytes_per_sequence(layouts, config.num_layers),
        default_ctx=min(config.max_position_embeddings, DEFAULT_CTX),
        row_bytes=row_kv_bytes
        + (native_row_bytes(config, recipe) if is_native else _operator_row_bytes(config, dtype)),
        state_bytes=config.hidden_size * (4 if is_native else dtype.itemsize),
        logits_bytes=config.vocab_size * 4,
        # The operators' sums change with the number of rows: another one is taken only where this one does not fit.
        batch_rows=tuple(dict.fromkeys(max(most_rows >> halvings, MAX_ROWS) for halvings in range(9))),
        is_tied=config.tie_word_embeddings,
        can_split=can_be_split(config, recipe),
        packing=packing,
        section_bytes=4 * config.num_heads * (config.head_dim + 2) if device.type == "cuda" else 0,
    )


def smaller_kv(shape: ModelShape, config: ModelConfig, dtype: torch.dtype) -> dict[str, ModelShape]:
    """The same model with each format of keys and values that takes less, by its name, the largest first."""
    found = {}
    for name in ("int8", "k8v4", "int4"):
        layouts = choose_format(name, config.head_dim, dtype).layouts(config.num_kv_heads, config.head_dim, dtype)
        per_token = kv_bytes_per_token(layouts, config.num_layers)
        if layouts[1] is not None and per_token < shape.kv_bytes_per_token:
            per_sequence = kv_bytes_per_sequence(layouts, config.num_layers)
            found[name] = replace(shape, kv=name, kv_bytes_per_token=per_token, kv_bytes_per_sequence=per_sequence)
    return found


def _block_shape(layout: BlockLayout, recipe: Recipe) -> BlockShape:
    weights = sum(matrix.out_features * matrix.in_features for matrix in layout.matrices)
    return BlockShape(layout.name, PackedFile.of(layout, recipe, source="").file_bytes, 2 * weights)


def _operator_row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a row at its widest: gate and up, one of them activated, and what came before, some of it in fp32."""
    wide = 4 * config.intermediate_size + 6 * config.hidden_size
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim  # what its kernels take and give
    return wide * dtype.itemsize + (3 * config.hidden_size + attention) * 4


def process_memory(
    ram_bytes: int | None, weights: Recipe, vocab_size: int, placed_bytes: int = 0, *, packs: bool = False
) -> Memory:
    """What this process may hold, `ram_bytes` or most of what is free, and what the program takes of it: a figure that
    every process finds alike before it has a model, or what this one holds already, where that is much more.

    placed_bytes: of what it holds, blocks that are placed anew. packs: the model is yet to be packed. Raises UsageError
    for more than the machine has.
    """
    require_cap(ram_bytes)
    is_available()  # loads the compiler of the kernels, which takes 48 MB, before what is held is counted
    give_back_freed()  # a tokenizer of 128,000 entries leaves 177 MB behind when it is read
    held = int(psutil.Process().memory_info().rss)
    free = held + int(HEADROOM * available_bytes(torch.device("cpu")))
    usual = _PROGRAM_BYTES + _TOKENIZER_BYTES * vocab_size + (_PACKING_BYTES if packs else 0)
    usual += _BITSANDBYTES_BYTES if isinstance(weights.blocks, NF4) else 0
    usual += _UNPACKING_BYTES if isinstance(weights.blocks, BF12) else 0
    now = held - placed_bytes + _GROWTH_BYTES
    program = usual if now <= usual + _FIRST_BYTES else -(-now // _STEP_BYTES) * _STEP_BYTES
    most = free if ram_bytes is None else min(ram_bytes, free)
    return Memory(most, program, free, int(psutil.virtual_memory().total))


def require_cap(ram_bytes: int | None) -> None:
    """Raises UsageError for more than the machine has."""
    total = psutil.virtual_memory().total
    if ram_bytes is not None and ram_bytes > total:
        raise UsageError(
            f"--ram {ram_bytes / GIB:.2f}GiB is more than this machine has",
            why=f"it has {format_bytes(total, 2)} of memory",
            fix=Fix.flag("--ram", f"{total / GIB - 0.01:.2f}GiB"),
        )
