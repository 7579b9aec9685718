"""A model on this disk made ready to compute: its plan, its blocks where the plan wants them, what must stay open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch

from localllm.engine.memory import available_bytes, choose_ctx, is_out_of_memory, out_of_memory, require_context
from localllm.engine.placement import find_plan, model_shape, process_memory
from localllm.engine.weights import is_unpacked, open_checkpoint, open_packed
from localllm.errors import DoesNotFitError, UsageError
from localllm.hub import ModelFiles
from localllm.models.block_source import BlockSource
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.layout import model_bytes
from localllm.models.load import DecoderParts, Progress, load_decoder
from localllm.models.packed import PackedModel
from localllm.models.placed import PlacedModel
from localllm.offload.plan import JobShape, Plan
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe


def _silent(_done: int, _total: int) -> None:
    """Progress that nobody watches."""


def _unheard(_text: str) -> None:
    """News that nobody is told."""


@dataclass(frozen=True)
class Watcher:
    """Who is told of what takes long: reading and packing weights (bytes done, bytes in all), waiting for a process
    that packs them, measuring the machine."""

    reading: Progress = _silent
    packing: Progress = _silent
    waiting: Callable[[str], None] = _unheard
    measuring: Callable[[str], None] = _unheard


@dataclass(frozen=True)
class LoadedModel:
    """kv_tokens: that all sequences may have together. placed: what can move its blocks, where they need not all be in
    one place. held: what is closed when the model is no longer used."""

    decoder: Decoder
    plan: Plan | None
    ctx: int
    kv_tokens: int
    placed: PlacedModel | None
    held: ExitStack


@dataclass(frozen=True)
class Loading:
    """One model in one recipe. ctx, ram, vram: as `Engine.load` has them."""

    files: ModelFiles
    recipe: Recipe
    dtype: torch.dtype
    device: torch.device
    ctx: int | None
    ram: int | None
    vram: int | None
    job: JobShape | None
    watcher: Watcher

    def load(self, config: ModelConfig) -> LoadedModel:
        """Raises what is listed at `Engine.load`."""
        if self.vram is not None and self.device.type == "cpu":
            why = "the model runs on the CPU; --ram limits the memory that it takes there"
            raise UsageError("--vram is a limit for a GPU, and none is used", why=why, fix="leave --vram out")
        try:
            return self._on_gpu(config) if self.device.type == "cuda" else self._on_cpu(config)
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(self.device, error) if is_out_of_memory(error) else error from None

    def _on_cpu(self, config: ModelConfig) -> LoadedModel:
        require_context(config, self.ctx)
        plan = self._plan(config)  # before minutes of conversion, not after
        with ExitStack() as opened:
            if is_unpacked(self.recipe) and not plan.streamed:
                blocks = opened.enter_context(open_checkpoint(self.files, config, self.recipe))
                plan = self._plan(blocks.config)
                if not plan.streamed:
                    return self._loaded(plan, self._decoder(blocks.config, blocks))
            packed = opened.enter_context(self._packed(config))
            plan = self._plan(packed.config, packed)
            if not plan.streamed:
                return self._loaded(plan, self._decoder(packed.config, packed))
            placed = opened.enter_context(self._placed(packed, plan))
            return self._loaded(plan, placed.few, placed, opened.pop_all())

    def _loaded(
        self, plan: Plan, decoder: Decoder, placed: PlacedModel | None = None, held: ExitStack | None = None
    ) -> LoadedModel:
        spare = 0 if plan.streamed else plan.free_bytes // plan.shape.kv_bytes_per_token
        kv_tokens = plan.kv_tokens + spare
        ctx = plan.ctx
        if self.job is not None and self.ctx is None:  # one sequence may have what several have together
            ctx = max(ctx, min(kv_tokens, plan.shape.default_ctx))
        return LoadedModel(decoder, plan, ctx, kv_tokens, placed, held or ExitStack())

    def _placed(self, packed: PackedModel, plan: Plan) -> PlacedModel:
        accelerator = None if self.device.type == "cpu" else self.device
        parts = DecoderParts(packed.config, self.recipe, self.dtype, self.device)
        placed = PlacedModel(packed, parts, accelerator)
        placed.place(plan.blocks, plan.many_rows, self.watcher.reading)
        return placed

    def _plan(self, config: ModelConfig, packed: PackedModel | None = None) -> Plan:
        try:
            return self._plan_in(config, self.recipe, 0.0 if packed is None else packed.cached_share())
        except DoesNotFitError as error:
            with suppress(DoesNotFitError):
                self._plan_in(config, RECIPES[DEFAULT])
                error.fix = "--weights int4"
            raise

    def _plan_in(self, config: ModelConfig, recipe: Recipe, cached_share: float = 0.0) -> Plan:
        shape = model_shape(config, recipe, self.dtype, self.files.name)
        memory = partial(process_memory, self.ram)
        return find_plan(shape, recipe, self.dtype, memory, self.ctx, self.job, self.watcher.measuring, cached_share)

    def _packed(self, config: ModelConfig) -> PackedModel:
        return open_packed(self.files, config, self.recipe, self.watcher.packing, self.watcher.waiting, self.ram)

    def _decoder(self, config: ModelConfig, source: BlockSource) -> Decoder:
        return load_decoder(
            source,
            config,
            self.recipe,
            dtype=self.dtype,
            device=self.device,
            progress=self.watcher.reading,
        )

    def _on_gpu(self, config: ModelConfig) -> LoadedModel:
        def fit(config: ModelConfig) -> tuple[int, int]:
            weight_bytes, int4_bytes = (model_bytes(config, either) for either in (self.recipe, RECIPES[DEFAULT]))
            free = min(available_bytes(self.device), self.vram or available_bytes(self.device))
            return choose_ctx(config, weight_bytes, free, self.dtype, self.ctx, int4_bytes)

        fit(config)
        opened = open_checkpoint(self.files, config, self.recipe) if is_unpacked(self.recipe) else self._packed(config)
        with opened as source:
            ctx, kv_tokens = fit(source.config)
            return LoadedModel(self._decoder(source.config, source), None, ctx, kv_tokens, None, ExitStack())
