"""The model that is measured: an engine, with what its weights weigh and what a token of it costs at least.

Random weights need no files: a shape, a recipe, and a tokenizer of one word an id.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from localllm.bench.random_blocks import RandomBlocks
from localllm.bench.random_model import word_vocabulary
from localllm.cache.kv_format import KVFormat, choose_format, kv_bytes_per_sequence, kv_bytes_per_token
from localllm.config import format_bytes
from localllm.engine.engine import Engine
from localllm.engine.loader import Watcher
from localllm.engine.memory import HEADROOM, available_bytes
from localllm.engine.planning import Wishes, plan_model
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.speculative.config import OFF
from localllm.engine.step_types import Limits
from localllm.engine.weights import is_unpacked, open_packed
from localllm.errors import DoesNotFitError
from localllm.hub import ModelFiles
from localllm.layers.linear import Linear
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.layout import model_bytes
from localllm.models.load import Progress, load_decoder
from localllm.models.shapes import Shape
from localllm.offload.planner.plan import JobShape
from localllm.quant.dense import Dense
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Subject:
    """`name` and `weights` as a result names them. has_random_weights: its text means nothing, nor need its cache."""

    name: str
    weights: str
    engine: Engine
    has_random_weights: bool

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    def bytes_per_token(self, context: int, gen_tokens: int) -> int:
        """What one decode step must read: every matrix, and the keys and values, on average over the steps."""
        model = self.engine.model
        return matrix_bytes(model) + mean_kv_bytes(model, self.engine.kv_format, context, gen_tokens)

    def prefill_flops_per_token(self) -> int:
        """Multiplications and additions in the blocks' matrices; the head sees one token of a prompt."""
        return 2 * sum(linear.out_features * linear.in_features for linear in block_linears(self.engine.model))


def random_subject(
    shape: Shape,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    ctx: int,
    progress: Progress = lambda _done, _total: None,
    kv: str = "auto",
) -> Subject:
    """A model of this shape, made in memory."""
    decoder = load_decoder(RandomBlocks(recipe), shape.config, recipe, dtype=dtype, device=device, progress=progress)
    engine = Engine(decoder, word_tokenizer(shape.config.vocab_size), ctx=ctx, kv=kv, reuse=NO_REUSE)
    return Subject(shape.name, recipe.name, engine, has_random_weights=True)


@dataclass(frozen=True)
class Caps:
    """ram_bytes, vram_bytes, kv: as `Engine.load` has them. kv_tokens: of all caches that are held at once."""

    ram_bytes: int | None
    vram_bytes: int | None
    kv_tokens: int
    kv: str = "auto"

    @property
    def are_given(self) -> bool:
        return self.ram_bytes is not None or self.vram_bytes is not None


def installed_subject(
    files: ModelFiles,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    ctx: int,
    progress: Progress,
    caps: Caps,
    *,
    name: str,
    is_random: bool,
) -> Subject:
    """A model on this disk, loaded as any command does."""
    engine = Engine.load(
        files,
        device=device.type,
        dtype=Dense(dtype).name,
        weights=recipe.name,
        kv=caps.kv,
        ctx=ctx,
        ram=caps.ram_bytes,
        vram=caps.vram_bytes,
        limits=Limits(max_sequences=1),
        job=JobShape(1, caps.kv_tokens, ctx),
        watcher=Watcher(progress),
        reuse=NO_REUSE,
        speculate=OFF,
    )
    return Subject(name, recipe.name, engine, has_random_weights=is_random)


def pack_ahead(
    files: ModelFiles,
    config: ModelConfig,
    recipe: Recipe,
    progress: Progress,
    waiting: Callable[[str], None],
    ram_bytes: int | None,
) -> None:
    """Pack the model if it is not: the memory that a conversion takes is no part of what is measured."""
    if not is_unpacked(recipe):
        open_packed(files, config, recipe, progress, waiting, ram_bytes).close()


def word_tokenizer(vocab_size: int) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(word_vocabulary(vocab_size)), encoding="utf-8")
        return Tokenizer.load(Path(directory))


def block_linears(model: Decoder) -> Iterator[Linear]:
    for block in model.blocks:
        yield from block.body.linears


def matrix_bytes(model: Decoder) -> int:
    """What one token reads of the matrices: the blocks' and the head's, with scales; of the embedding only a row."""
    linears = (*block_linears(model), model.head)
    return sum(tensor.nbytes for linear in linears for tensor in linear.tensors.values())


def mean_kv_bytes(model: Decoder, kv_format: KVFormat, context: int, gen_tokens: int) -> int:
    """Keys and values that a step attends to behind `context` others, its own included, as far as a window reaches."""
    config = model.config
    per_layer = kv_bytes_per_token(kv_format.layouts(config.num_kv_heads, config.head_dim, model.dtype), 1)
    lengths = range(context + 1, context + 1 + gen_tokens)
    keys = sum(min(window or length, length) for window in config.windows for length in lengths)
    return per_layer * keys // gen_tokens


def require_room(config: ModelConfig, recipe: Recipe, dtype: torch.dtype, device: torch.device, caps: Caps) -> None:
    """Raises DoesNotFitError where the weights, and the cache of all tokens, have no room."""
    weights, as_int4 = model_bytes(config, recipe), model_bytes(config, RECIPES[DEFAULT])
    layouts = choose_format(caps.kv, config.head_dim, dtype).layouts(config.num_kv_heads, config.head_dim, dtype)
    kv = caps.kv_tokens * kv_bytes_per_token(layouts, config.num_layers)
    kv += kv_bytes_per_sequence(layouts, config.num_layers)
    free = available_bytes(device)
    if weights + kv > HEADROOM * free:
        helps = as_int4 + kv <= HEADROOM * free
        raise DoesNotFitError(
            "the model does not fit into memory",
            why=f"weights {format_bytes(weights, 2)} ({recipe.name}) + KV cache {format_bytes(kv, 2)} "
            f"for {caps.kv_tokens} tokens; free: {format_bytes(free, 2)}, of which {HEADROOM:.0%} may be used",
            fix="--weights int4" if helps else "choose a smaller model: localllm list --all",
        )


def require_plan(
    shape: Shape,
    files: ModelFiles | None,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    ctx: int,
    caps: Caps,
    say: Callable[[str], None],
) -> Recipe:
    """The recipe in which it then runs. Raises what `Engine.load` would say of memory: UsageError, DoesNotFitError."""
    wishes = Wishes(
        weights=recipe.name,
        kv=caps.kv,
        ctx=ctx,
        device=device.type,
        dtype=Dense(dtype).name,
        ram=caps.ram_bytes,
        vram=caps.vram_bytes,
        job=JobShape(1, caps.kv_tokens, ctx),
    )
    planned = plan_model(shape, files, wishes, say)
    if planned.refusal is not None:
        raise planned.refusal
    return RECIPES[planned.shape.weights]
