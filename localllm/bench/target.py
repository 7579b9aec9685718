"""The model that is measured: an engine, the bytes that a token of it must read, and the two ways to load it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from localllm.bench.random_model import RandomBlocks, word_tokenizer
from localllm.bench.workload import Workload
from localllm.cache.kv_format import KVFormat, choose_format, wanted_format
from localllm.config import format_bytes
from localllm.engine.device import dtype_name
from localllm.engine.engine import Engine
from localllm.engine.kernel_check import note_device, scope_of
from localllm.engine.loader import LoadedModel, Watcher
from localllm.engine.memory import HEADROOM, available_bytes, choose_device, choose_dtype, use_threads
from localllm.engine.model_options import require_effect
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.weights import choose_recipe
from localllm.errors import DoesNotFitError, Fix
from localllm.hub import ModelFiles
from localllm.kernels.sizes import PAGE_TOKENS, attended_tokens, sketch_bytes
from localllm.layers.moe import MoE
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.decoder import Decoder
from localllm.models.load import load_decoder
from localllm.models.shapes import Shape
from localllm.offload.planner.plan import JobShape
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe, recipe
from localllm.settings import EngineConfig


@dataclass(frozen=True)
class BenchmarkTarget:
    """A loaded model. has_random_weights: its text means nothing, so its cache may hold random values too."""

    name: str
    engine: Engine
    has_random_weights: bool

    def bytes_per_token(self, context: int, gen_tokens: int) -> int:
        """Every matrix and the keys and values that a decode step must read, on average over the steps."""
        model, pages = self.engine.model, self.engine.residency.kv_pages
        return matrix_bytes(model) + mean_kv_bytes(model, pages.format, context, gen_tokens, pages.chosen_pages)

    def prefill_flops_per_token(self) -> int:
        """Multiplications and additions of the blocks' matrices; the head computes one token of a prompt."""
        blocks = block_layouts(self.engine.config)[1:-1]
        return 2 * sum(layout.num_active_weights for layout in blocks)


def random_target(
    shape: Shape, config: EngineConfig, workload: Workload, watcher: Watcher | None = None
) -> BenchmarkTarget:
    """Make a model of this shape in memory, with random weights and a tokenizer of one word an id.

    Raises DoesNotFitError where it does not fit whole.
    """
    watcher = watcher or Watcher()
    if config.threads is not None:
        use_threads(config.threads)
    device = choose_device(config.device)
    require_effect(shape.config, config, str(device))
    named, dtype = dtype_name(config.dtype, str(device)), choose_dtype(config.dtype, device)
    weights = recipe(choose_recipe(config.weights, shape.config, (), named))
    kv = wanted_format(config.kv, config.dtype, config.weights)
    require_memory(shape, weights, kv, dtype, device, workload.kv_tokens)
    note_device(device, [scope_of(shape.config, weights, kv, dtype, config)], watcher.measuring, watcher.noting)
    blocks = RandomBlocks(weights)
    decoder = load_decoder(blocks, shape.config, weights, dtype=dtype, device=device, progress=watcher.reading)
    tokenizer = word_tokenizer(shape.config.vocab_size)
    loaded = LoadedModel(decoder, workload.ctx)
    engine = Engine(loaded, tokenizer, kv=kv, reuse=NO_REUSE, chosen_pages=config.chosen_pages)
    return BenchmarkTarget(shape.name, engine, has_random_weights=True)


def installed_target(files: ModelFiles, config: EngineConfig, workload: Workload, watcher: Watcher) -> BenchmarkTarget:
    """Load a model from this disk as any command does."""
    job = JobShape(1, workload.kv_tokens, workload.ctx)
    engine = Engine.load(files, config, job=job, watcher=watcher, reuse=NO_REUSE)
    return BenchmarkTarget(files.name, engine, has_random_weights=False)


def matrix_bytes(model: Decoder) -> int:
    """Bytes of the matrices that one token reads: the blocks', with as many experts as it is computed by, and the
    head's, with scales; of the embedding a row."""
    linears = [*(linear for block in model.blocks for linear in block.body.linears), model.head]
    mixtures = [block.body for block in model.blocks if isinstance(block.body, MoE)]
    routers = [linear for body in mixtures for linear in (body.router, body.shared_gate) if linear is not None]
    shared = sum(tensor.nbytes for linear in (*linears, *routers) for tensor in linear.tensors.values())
    return shared + sum(body.config.router.top_k * body.experts.record_bytes for body in mixtures)


def mean_kv_bytes(
    model: Decoder, kv_format: KVFormat, context: int, gen_tokens: int, chosen_pages: int | None = None
) -> int:
    """Keys and values that a step behind `context` tokens attends to, its own included, within each layer's window.
    chosen_pages: as `EngineConfig` has it; what they are chosen by counts, too."""
    config = model.config
    lengths = range(context + 1, context + 1 + gen_tokens)
    kinds = Counter(zip(config.windows, config.kv_shapes, strict=True))
    total, most = 0, attended_tokens(chosen_pages) or context + gen_tokens
    for (window, shape), layers in kinds.items():
        keys = sum(min(window or length, length) for length in lengths)
        if window is None and context >= most:
            total += layers * keys * sketch_bytes(shape, 1) // PAGE_TOKENS
            keys = gen_tokens * most
        total += layers * keys * kv_format.sizes([shape], model.dtype.itemsize).per_token
    return total // gen_tokens


def require_memory(
    shape: Shape, weights: Recipe, kv_name: str, dtype: torch.dtype, device: torch.device, kv_tokens: int
) -> None:
    """Raises DoesNotFitError where the weights and the cache of all tokens do not fit into what is free."""
    config = shape.config
    kv_format = choose_format(kv_name, config.kv_shapes, dtype.itemsize)
    sizes = kv_format.sizes(config.kv_shapes, dtype.itemsize)
    kv = kv_tokens * sizes.per_token + sizes.per_sequence
    needed, as_int4 = model_bytes(config, weights), model_bytes(config, RECIPES[DEFAULT])
    free = available_bytes(device)
    if needed + kv > HEADROOM * free:
        helps = as_int4 + kv <= HEADROOM * free
        raise DoesNotFitError(
            "the model does not fit into memory",
            why=f"weights {format_bytes(needed, 2)} ({weights.name}) + KV cache {format_bytes(kv, 2)} "
            f"for {kv_tokens} tokens; free: {format_bytes(free, 2)}, of which {HEADROOM:.0%} may be used",
            fix=Fix.flag("--weights", "int4") if helps else "choose a smaller model: localllm list --all",
        )
