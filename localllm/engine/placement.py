"""A model's plan: its sizes from its config and recipe, the memory of this process, the rates of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from localllm.cache.contiguous import kv_bytes_per_token
from localllm.engine.memory import DEFAULT_CTX, HEADROOM, available_bytes
from localllm.engine.runner import BATCH_ROWS
from localllm.errors import UsageError
from localllm.kernels.cpu_gemv import MAX_ROWS
from localllm.kernels.cpu_linear import is_available
from localllm.models.config import ModelConfig
from localllm.models.cpu_step import native_row_bytes, supports_shape
from localllm.models.layout import BlockLayout, block_layouts
from localllm.models.packed_file import PackedFile
from localllm.models.split_mlp import can_be_split
from localllm.offload.plan import BlockShape, JobShape, Memory, ModelShape, Plan, Rates
from localllm.offload.profile import kept_profile, measured
from localllm.offload.search import Search
from localllm.quant.dense import Dense
from localllm.quant.recipe import Recipe

# What a process comes to hold beside its model once it computes: compiled kernels, pages of libraries, stacks.
_GROWTH_BYTES = 12 << 20
# Where nothing is measured and nothing need be: everything fits, whatever the rates are.
_TYPICAL = Rates(matrix_gbs=20.0, compute_gops=500.0, disk_gbs=1.0, is_measured=False)


HOST = torch.device("cpu")


def model_shape(
    config: ModelConfig, recipe: Recipe, dtype: torch.dtype, name: str, device: torch.device = HOST
) -> ModelShape:
    """What the plan needs to know of a model whose activations and KV cache are of `dtype`, computed on `device`."""
    blocks = [_block_shape(layout, recipe) for layout in block_layouts(config)]
    is_native = device.type == "cpu" and supports_shape(config, recipe, dtype)
    return ModelShape(
        name=name,
        weights=recipe.name,
        kv=Dense(dtype).name,
        embed=blocks[0],
        blocks=tuple(blocks[1:-1]),
        head=blocks[-1],
        kv_bytes_per_token=kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype),
        default_ctx=min(config.max_position_embeddings, DEFAULT_CTX),
        row_bytes=native_row_bytes(config, recipe) if is_native else _operator_row_bytes(config, dtype),
        state_bytes=config.hidden_size * (4 if is_native else dtype.itemsize),
        logits_bytes=config.vocab_size * 4,
        # The operators' sums change with the number of rows: another one is taken only where this one does not fit.
        batch_rows=tuple(dict.fromkeys(max(BATCH_ROWS >> halvings, MAX_ROWS) for halvings in range(7))),
        is_tied=config.tie_word_embeddings,
        can_split=can_be_split(config, recipe),
    )


def _block_shape(layout: BlockLayout, recipe: Recipe) -> BlockShape:
    weights = sum(matrix.out_features * matrix.in_features for matrix in layout.matrices)
    return BlockShape(layout.name, PackedFile.of(layout, recipe, source="").file_bytes, 2 * weights)


def _operator_row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a row at its widest: gate and up, one of them activated, and what came before, some of it in fp32."""
    wide = 4 * config.intermediate_size + 6 * config.hidden_size
    return wide * dtype.itemsize + 3 * config.hidden_size * 4


def process_memory(ram_bytes: int | None) -> Memory:
    """What this process holds now, and what it may hold: `ram_bytes`, or most of what is free.

    Raises UsageError for more than the machine has.
    """
    total = psutil.virtual_memory().total
    if ram_bytes is not None and ram_bytes > total:
        raise UsageError(
            f"--ram {ram_bytes / 2**30:.2f}GiB is more than this machine has",
            why=f"it has {total / 2**30:.2f} GiB of memory",
            fix=f"--ram {total / 2**30 - 0.01:.2f}GiB",
        )
    is_available()  # loads the compiler of the kernels, which takes 48 MB, before what is held is counted
    held = int(psutil.Process().memory_info().rss)
    free = held + int(HEADROOM * available_bytes(torch.device("cpu")))
    return Memory(free if ram_bytes is None else min(ram_bytes, free), held + _GROWTH_BYTES, free, total)


def find_plan(
    shape: ModelShape,
    recipe: Recipe,
    dtype: torch.dtype,
    memory: Callable[[], Memory],
    ctx: int | None,
    job: JobShape | None,
    say: Callable[[str], None],
    cached_share: float = 0.0,
) -> Plan:
    """The best placement; what this machine does is measured only where something has to be chosen.

    memory: what may be used, asked again after a measurement, which leaves something behind. cached_share: of the
    packed files, in the page cache. Raises DoesNotFitError.
    """
    profile = kept_profile()
    rates = profile.rates(shape.weights)
    if rates is None:  # measuring takes seconds
        plan = Search(shape, memory(), _TYPICAL, ctx, job).best()
        if not plan.streamed and plan.ctx >= (ctx or shape.default_ctx):
            return plan
        rates = measured(profile, shape.weights, recipe.blocks, dtype, say).rates(shape.weights)
        assert rates is not None
    rates = replace(rates, cached_share=cached_share)
    return Search(shape, memory(), rates, ctx, job, profile.corrections(shape.weights)).best()
