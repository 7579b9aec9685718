"""A model's plan: its sizes from its config and recipe, the memory of this process, the rates of this machine."""

from __future__ import annotations

from dataclasses import replace

import psutil

from localllm.cache.kv_eviction import Eviction, most_pages
from localllm.cache.kv_format import KV_FORMATS, choose_format
from localllm.config import format_bytes
from localllm.errors import Fix, UsageError
from localllm.kernels.cpu_matmul import is_available
from localllm.kernels.sizes import MAX_ROWS, PAGE_TOKENS, attended_tokens, sketch_bytes
from localllm.layers.config import MoEConfig, Recurrent
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.capabilities import can_be_split, can_have_slots, native_row_bytes, runs_natively
from localllm.models.layout import BlockLayout
from localllm.models.packed_file import PackedFile
from localllm.offload.planner.hit_curve import usual_curve
from localllm.offload.planner.machine import Memory
from localllm.offload.planner.machine_memory import HEADROOM, free_bytes
from localllm.offload.planner.model_shape import BlockShape, ExpertShape, ModelShape, Packing
from localllm.offload.planner.plan import GIB
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.quant.layouts import DTYPE_NAMES, ITEM_BYTES, BF12Layout, NF4Layout, Sizes

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

DEFAULT_CTX = 8192  # where nobody asked: long enough for a chat, 1 GiB of KV for an 8B model
# The same of a model of which most layers keep a state, where there is memory to spare: 256k tokens of Qwen 3.5 4B take
# 4.1 GiB in INT8.
HYBRID_CTX = 1 << 18
# Tokens of a prompt that are computed at once: the matrices are read once for all of them, and what is between two
# matrices still fits into the caches. On a GPU that is the length of the chunks that are graphs.
BATCH_ROWS = 512


def model_shape(
    config: ModelConfig,
    recipe: Sizes,
    dtype: str,
    name: str,
    device: str = "cpu",
    kv: str = "auto",
    packing: Packing | None = None,
) -> ModelShape:
    """Return what a plan needs to know of a model whose activations and KV cache are of `dtype`, computed on `device`.

    dtype: "bf16" or "fp32".
    """
    item_bytes, has_gpu = ITEM_BYTES[DTYPE_NAMES[dtype]], device.startswith("cuda")
    layouts = block_layouts(config)
    blocks = [_block_shape(layout, recipe) for layout in layouts]
    kv_format = choose_format(kv, config.kv_shapes, item_bytes)
    kv_sizes = kv_format.sizes(config.kv_shapes, item_bytes)
    widest_kv = max((kv_format.sizes([each], item_bytes).dense for each in set(config.kv_shapes)), default=0)
    shapes = config.head_shapes
    has_few_keys = bool(config.state_shapes) and 2 * len(config.kv_shapes) <= config.num_layers
    is_native = device == "cpu" and runs_natively(config, recipe, dtype)
    return ModelShape(
        name=name,
        weights=recipe.name,
        kv=dtype if kv_format.keys == "dense" else kv_format.name,
        embed=blocks[0],
        blocks=tuple(blocks[1:-1]),
        head=blocks[-1],
        kv_bytes_per_token=max(kv_sizes.per_token, 1),  # of its page in tables, where no layer keeps anything of it
        kv_bytes_per_sequence=kv_sizes.per_sequence,
        kv_layers=max(1, len(config.kv_shapes)),
        recurrent_bytes=sum(each.state_bytes + each.snapshot_bytes for each in config.state_shapes),
        snapshot_bytes=sum(each.snapshot_bytes for each in config.state_shapes),
        num_layers=config.num_layers,
        state_layers=sum(any(isinstance(each, Recurrent) for each in layer.mixers) for layer in config.layers),
        keeps_tokens=bool(config.kv_shapes),
        default_ctx=min(config.max_position_embeddings, DEFAULT_CTX),
        cheap_ctx=min(config.max_position_embeddings, HYBRID_CTX) if has_few_keys else 0,
        row_bytes=widest_kv // PAGE_TOKENS  # a chunk's pages are dense while one layer reads them
        + (native_row_bytes(config, recipe) if is_native else _operator_row_bytes(config, item_bytes)),
        state_bytes=config.hidden_size * (4 if is_native else item_bytes),
        logits_bytes=config.vocab_size * 4,
        # The operators' sums change with the number of rows: another one is taken only where this one does not fit.
        batch_rows=tuple(dict.fromkeys(max(BATCH_ROWS >> halvings, MAX_ROWS) for halvings in range(9))),
        is_tied=config.is_tied,
        can_skip=config.altup is None,
        can_split=can_be_split(config, recipe),
        can_slot=has_gpu and can_have_slots(config, recipe),
        packing=packing,
        hit_curve=usual_curve(max((moe.router.num_experts for moe in config.mixtures), default=0)),
        num_weights=sum(layout.num_weights for layout in layouts),
        num_active_weights=sum(layout.num_active_weights for layout in layouts),
        section_bytes=max((4 * each.num_heads * (each.value_dim + 2) for each in shapes), default=0) if has_gpu else 0,
    )


def with_choice(shape: ModelShape, config: ModelConfig, chosen_pages: int | None) -> ModelShape:
    """Return what a plan needs to know where a token of an answer attends to so many pages; None: to all."""
    if chosen_pages is None:
        return shape
    layers = zip(config.kv_shapes, config.windows, strict=True)
    sketches = sum(sketch_bytes(each, 1) for each, window in layers if window is None) // PAGE_TOKENS
    per_token, most = shape.kv_bytes_per_token + sketches, attended_tokens(chosen_pages)
    return replace(shape, kv_bytes_per_token=per_token, sketch_bytes_per_token=sketches, chosen_tokens=most)


def with_windows(shape: ModelShape, config: ModelConfig, dtype: str) -> ModelShape:
    """Return what a plan needs to know where keys and values rest elsewhere: those of layers that see a window stay."""
    windows = [
        (window, each) for window, each in zip(config.windows, config.kv_shapes, strict=True) if window is not None
    ]
    if not windows:
        return shape
    kv_format = KV_FORMATS[shape.kv if shape.kv in KV_FORMATS else "bf16"]
    sizes = kv_format.sizes([each for _, each in windows], ITEM_BYTES[DTYPE_NAMES[dtype]])
    tokens = PAGE_TOKENS * max(most_pages(window, None) or 0 for window, _ in windows)
    layers = max(1, len(config.kv_shapes) - len(windows))
    return replace(shape, kv_layers=layers, windowed_bytes_per_token=sizes.per_token, windowed_tokens=tokens)


def smaller_kv(shape: ModelShape, config: ModelConfig, dtype: str) -> dict[str, ModelShape]:
    """Return the same model with each format of keys and values that takes less, by its name, the largest first."""
    found, item_bytes = {}, ITEM_BYTES[DTYPE_NAMES[dtype]]
    for name in KV_FORMATS:
        sizes = choose_format(name, config.kv_shapes, item_bytes).sizes(config.kv_shapes, item_bytes)
        per_token = sizes.per_token + shape.sketch_bytes_per_token
        if sizes.coded is not None and per_token < shape.kv_bytes_per_token:
            smaller = replace(shape, kv=name, kv_bytes_per_token=per_token)
            smaller = replace(smaller, kv_bytes_per_sequence=sizes.per_sequence)
            found[name] = with_windows(smaller, config, dtype)
    return found


def _block_shape(layout: BlockLayout, recipe: Sizes) -> BlockShape:
    experts, names = layout.experts, {matrix.name for matrix in layout.matrices}
    shared_launches = 2 * ("shared.down_proj" in names) + 2 * ("shared_gate" in names)
    return BlockShape(
        name=layout.name,
        num_bytes=PackedFile.of(layout, recipe, source="").file_bytes,
        flops=2 * layout.num_active_weights,
        experts=None
        if experts is None
        else ExpertShape(experts.num_experts, experts.top_k, experts.record(recipe).num_bytes, shared_launches),
    )


def _operator_row_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Return the bytes of a row at its widest: gate and up, one of them activated, and what came before, some of it in
    fp32."""
    wide = 4 * max((mlp.intermediate_size for mlp in config.mlps), default=0) + 6 * config.hidden_size
    # What the kernels of attention take and give.
    # Of a recurrent layer: what is projected, and that with the rows in front of it, in fp64 while it is convolved.
    recurrent = max((4 * each.in_features + each.gate_features for each in config.recurrents), default=0)
    attention = max(2 * max((each.features for each in config.head_shapes), default=0), recurrent)
    mixing = max((_mixture_row_bytes(mixture, config.hidden_size) for mixture in config.mixtures), default=0)
    # Of AltUp: all states, what is predicted of them, what they become, and one copy on the way.
    states = 4 * config.altup.num_states * config.hidden_size if config.altup is not None else 0
    # Of each token for each layer: rows as they are looked up, what the embedding gives, its norm, and their sum.
    per_layer = 5 * config.num_layers * config.per_layer.features if config.per_layer is not None else 0
    return (wide + states + per_layer) * item_bytes + (3 * config.hidden_size + attention) * 4 + mixing


def _mixture_row_bytes(mixture: MoEConfig, hidden_size: int) -> int:
    """Return what a row has of a mixture: what each of its experts makes of it, in fp32, the codes for their second
    matrix, and logits."""
    router = mixture.router
    return router.top_k * (4 * hidden_size + 2 * mixture.expert.intermediate_size) + 4 * router.num_experts


def process_memory(
    ram_bytes: int | None, weights: Sizes, vocab_size: int, placed_bytes: int = 0, *, packs: bool = False
) -> Memory:
    """Return what this process may hold, `ram_bytes` or most of what is free, and what the program takes of it: a
    figure that is the same for every process before it has a model, or what this one holds already, where that is much
    more.

    placed_bytes: of what it holds, blocks that are placed anew. packs: the model is yet to be packed. Raises UsageError
    for more than the machine has.
    """
    require_cap(ram_bytes)
    is_available()  # loads the compiler of the kernels, which takes 48 MB, before what is held is counted
    give_back_freed()  # a tokenizer of 128,000 entries leaves 177 MB behind when it is read
    held = int(psutil.Process().memory_info().rss)
    usual = _PROGRAM_BYTES + _TOKENIZER_BYTES * vocab_size + (_PACKING_BYTES if packs else 0)
    usual += _BITSANDBYTES_BYTES if isinstance(weights.blocks, NF4Layout) else 0
    usual += _UNPACKING_BYTES if isinstance(weights.blocks, BF12Layout) else 0
    now = held - placed_bytes + _GROWTH_BYTES
    program = usual if now <= usual + _FIRST_BYTES else -(-now // _STEP_BYTES) * _STEP_BYTES
    can_hold = program + int(HEADROOM * (held + free_bytes() - program))  # wherever the model's bytes are by now
    most = can_hold if ram_bytes is None else min(ram_bytes, can_hold)
    return Memory(most, program, can_hold, int(psutil.virtual_memory().total))


def require_cap(ram_bytes: int | None) -> None:
    """Raise UsageError for more than the machine has."""
    total = psutil.virtual_memory().total
    if ram_bytes is not None and ram_bytes > total:
        raise UsageError(
            f"--ram {ram_bytes / GIB:.2f}GiB is more than this machine has",
            why=f"it has {format_bytes(total, 2)} of memory",
            fix=Fix.flag("--ram", f"{total / GIB - 0.01:.2f}GiB"),
        )


def require_context(config: ModelConfig, asked: int | None) -> None:
    """Raise UsageError for a context that the model was not made for."""
    longest, is_unbounded = config.longest_context, not config.kv_shapes
    if asked is not None and not 1 <= asked <= longest:
        raise UsageError(
            f"a context of {asked} tokens is not possible with this model",
            why=f"it takes at most {longest}" if is_unbounded else f"it was trained for at most {longest}",
            fix=Fix.flag("--ctx", longest),
        )


def held_tokens(config: ModelConfig, kv_evict: str) -> int | None:
    """Return the tokens whose keys and values a sequence has at most at one time; None where it has all. kv_evict: as
    the setting."""
    eviction = Eviction.of(kv_evict)
    if eviction is None:
        return None
    return PAGE_TOKENS * max(most_pages(window, eviction) or 0 for window in config.windows)
