"""The model that is measured: an engine, the bytes that a token of it must read, and the ways in which it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from localllm.bench.random_model import RandomBlocks, word_tokenizer
from localllm.cache.kv_format import KVFormat, choose_format
from localllm.config import format_bytes
from localllm.engine.engine import Engine
from localllm.engine.events import ignore
from localllm.engine.loader import LoadedModel, Watcher
from localllm.engine.memory import HEADROOM, available_bytes
from localllm.engine.model_plan import consider
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.step_types import Limits
from localllm.engine.weights import is_unpacked, open_packed
from localllm.errors import DoesNotFitError, Fix
from localllm.hub import ModelFiles
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.layout import model_bytes
from localllm.models.load import Progress, load_decoder
from localllm.models.shapes import Shape
from localllm.offload.planner.plan import JobShape
from localllm.quant.dense import dense_name
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe
from localllm.quant.weight_format import NotCompactError
from localllm.settings import EngineConfig


@dataclass(frozen=True)
class BenchmarkTarget:
    """A loaded model. has_random_weights: its text means nothing, so its cache may hold random values too."""

    name: str
    weights: str
    engine: Engine
    has_random_weights: bool

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    def bytes_per_token(self, context: int, gen_tokens: int) -> int:
        """Every matrix and the keys and values that a decode step must read, on average over the steps."""
        model = self.engine.model
        return matrix_bytes(model) + mean_kv_bytes(model, self.engine.kv_format, context, gen_tokens)

    def prefill_flops_per_token(self) -> int:
        """Multiplications and additions of the blocks' matrices; the head computes one token of a prompt."""
        linears = (linear for block in self.engine.model.blocks for linear in block.body.linears)
        return 2 * sum(linear.out_features * linear.in_features for linear in linears)


@dataclass(frozen=True)
class TargetSetup:
    """Settings for loading the model that is measured.

    ctx: the engine's context.
    kv_tokens: tokens of all caches that are held at once.
    kv, ram_bytes, vram_bytes: as `Engine.load` takes them.
    """

    recipe: Recipe
    dtype: torch.dtype
    device: torch.device
    ctx: int
    kv_tokens: int = 0
    kv: str = "auto"
    ram_bytes: int | None = None
    vram_bytes: int | None = None

    @property
    def is_capped(self) -> bool:
        return self.ram_bytes is not None or self.vram_bytes is not None

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            ctx=self.ctx,
            ram=self.ram_bytes,
            vram=self.vram_bytes,
            device=self.device.type,
            dtype=dense_name(self.dtype),
            weights=self.recipe.name,
            kv=self.kv,
            speculate="off",
        )

    @property
    def job(self) -> JobShape:
        return JobShape(1, self.kv_tokens, self.ctx)


def random_target(shape: Shape, setup: TargetSetup, progress: Progress = ignore) -> BenchmarkTarget:
    """Make a model of this shape in memory, with random weights and a tokenizer of one word an id."""
    recipe, config = setup.recipe, shape.config
    decoder = load_decoder(
        RandomBlocks(recipe), config, recipe, dtype=setup.dtype, device=setup.device, progress=progress
    )
    loaded, tokenizer = LoadedModel(decoder, setup.ctx), word_tokenizer(config.vocab_size)
    engine = Engine(loaded, tokenizer, kv=setup.kv, reuse=NO_REUSE)
    return BenchmarkTarget(shape.name, recipe.name, engine, has_random_weights=True)


def installed_target(
    files: ModelFiles, setup: TargetSetup, progress: Progress, *, name: str, is_random: bool
) -> BenchmarkTarget:
    """Load a model from this disk as any command does."""
    limits, watcher = Limits(max_sequences=1), Watcher(progress)
    engine = Engine.load(files, setup.engine_config, limits=limits, job=setup.job, watcher=watcher, reuse=NO_REUSE)
    return BenchmarkTarget(name, setup.recipe.name, engine, has_random_weights=is_random)


def pack_ahead(
    files: ModelFiles, config: ModelConfig, setup: TargetSetup, progress: Progress, waiting: Callable[[str], None]
) -> Recipe:
    """Pack the model if it is not packed yet: the memory of a conversion must not count as a peak of the benchmark.

    Returns the recipe that it is packed in: bf16 where bf12 cannot hold its weights.
    """
    if not is_unpacked(setup.recipe):
        try:
            open_packed(files, config, setup.recipe, progress, waiting, setup.ram_bytes).close()
        except NotCompactError:
            return RECIPES["bf16"]
    return setup.recipe


def matrix_bytes(model: Decoder) -> int:
    """Bytes of the matrices that one token reads: the blocks' and the head's, with scales; of the embedding a row."""
    linears = [*(linear for block in model.blocks for linear in block.body.linears), model.head]
    return sum(tensor.nbytes for linear in linears for tensor in linear.tensors.values())


def mean_kv_bytes(model: Decoder, kv_format: KVFormat, context: int, gen_tokens: int) -> int:
    """Keys and values that a step behind `context` tokens attends to, its own included, within each layer's window."""
    config = model.config
    per_layer = kv_format.sizes(config.num_kv_heads, config.head_dim, model.dtype.itemsize).per_token(1)
    lengths = range(context + 1, context + 1 + gen_tokens)
    keys = sum(min(window or length, length) for window in config.windows for length in lengths)
    return per_layer * keys // gen_tokens


def require_memory(config: ModelConfig, setup: TargetSetup) -> None:
    """Raises DoesNotFitError where the weights and the cache of all tokens do not fit into what is free."""
    weights, as_int4 = model_bytes(config, setup.recipe), model_bytes(config, RECIPES[DEFAULT])
    kv_format = choose_format(setup.kv, config.head_dim, setup.dtype.itemsize)
    sizes = kv_format.sizes(config.num_kv_heads, config.head_dim, setup.dtype.itemsize)
    kv = setup.kv_tokens * sizes.per_token(config.num_layers) + sizes.per_sequence(config.num_layers)
    free = available_bytes(setup.device)
    if weights + kv > HEADROOM * free:
        helps = as_int4 + kv <= HEADROOM * free
        raise DoesNotFitError(
            "the model does not fit into memory",
            why=f"weights {format_bytes(weights, 2)} ({setup.recipe.name}) + KV cache {format_bytes(kv, 2)} "
            f"for {setup.kv_tokens} tokens; free: {format_bytes(free, 2)}, of which {HEADROOM:.0%} may be used",
            fix=Fix.flag("--weights", "int4") if helps else "choose a smaller model: localllm list --all",
        )


def planned_recipe(shape: Shape, files: ModelFiles | None, setup: TargetSetup, notify: Callable[[str], None]) -> Recipe:
    """The recipe that the plan chooses. Raises what `Engine.load` would say of memory: UsageError, DoesNotFitError."""
    planned = consider(shape, files, setup.engine_config, notify, job=setup.job).planned
    if planned.refusal is not None:
        raise planned.refusal
    return RECIPES[planned.shape.weights]
