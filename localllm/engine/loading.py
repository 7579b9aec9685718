"""A model on this disk made ready to compute: its plan, its blocks where the plan wants them, what must stay open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import torch

from localllm.engine.card import CardPlanning, cap_allocator
from localllm.engine.memory import is_out_of_memory, out_of_memory, require_context
from localllm.engine.placement import find_plan, model_shape, process_memory
from localllm.engine.weights import is_unpacked, open_checkpoint, open_packed
from localllm.errors import DoesNotFitError, UsageError
from localllm.hub import ModelFiles
from localllm.models.block_source import BlockSource
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.load import DecoderParts, Progress, load_decoder
from localllm.models.packed import PackedModel
from localllm.models.placed import PlacedModel
from localllm.offload.plan import JobShape, Memory, Plan
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
    """placed: what can move its blocks, where they need not all be in one place, and replan: where they had best be
    now. held: what is closed when the model is no longer used."""

    decoder: Decoder
    plan: Plan
    ctx: int
    placed: PlacedModel | None
    replan: Callable[[], Plan] | None
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
        if self.vram is not None and not has_card(self.device):
            why = "the model runs on the CPU; --ram limits the memory that it takes there"
            raise UsageError("--vram is a limit for a GPU, and none is used", why=why, fix="leave --vram out")
        try:
            return self._load(config)
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(self.device, error) if is_out_of_memory(error) else error from None

    def _load(self, config: ModelConfig) -> LoadedModel:
        require_context(config, self.ctx)
        plan = self._plan(config)  # before minutes of conversion, not after
        with ExitStack() as opened:
            if is_unpacked(self.recipe) and plan.is_whole:
                blocks = opened.enter_context(open_checkpoint(self.files, config, self.recipe))
                plan = self._plan(blocks.config)
                if plan.is_whole:
                    return self._loaded(plan, self._decoder(blocks.config, blocks, plan))
            packed = opened.enter_context(self._packed(config))
            plan = self._plan(packed.config, packed)
            placed = opened.enter_context(self._placed(packed, plan))
            loaded = self._loaded(plan, placed.few, placed, opened.pop_all())
        promised = replace(self, ctx=loaded.ctx, watcher=Watcher())
        return replace(loaded, replan=lambda: promised._plan(packed.config, packed, placed.host_bytes))

    def _loaded(
        self, plan: Plan, decoder: Decoder, placed: PlacedModel | None = None, held: ExitStack | None = None
    ) -> LoadedModel:
        ctx = plan.ctx
        if self.job is not None and self.ctx is None:  # one sequence may have what several have together
            ctx = max(ctx, min(plan.most_kv_tokens, plan.shape.default_ctx))
        return LoadedModel(decoder, plan, ctx, placed, None, held or ExitStack())

    def _placed(self, packed: PackedModel, plan: Plan) -> PlacedModel:
        accelerator = self.device if has_card(self.device) else None
        parts = DecoderParts(packed.config, self.recipe, self.dtype, self.device)
        placed = PlacedModel(packed, parts, accelerator)
        placed.place(plan.blocks, plan.many_rows, self.watcher.reading)
        return placed

    def _plan(self, config: ModelConfig, packed: PackedModel | None = None, placed_bytes: int = 0) -> Plan:
        """placed_bytes: of what this process holds, the blocks that are placed anew."""
        try:
            cached_share = 0.0 if packed is None else packed.cached_share()
            return self._plan_in(config, self.recipe, cached_share, placed_bytes)
        except DoesNotFitError as error:
            with suppress(DoesNotFitError):
                self._plan_in(config, RECIPES[DEFAULT])
                error.fix = "--weights int4"
            raise

    def _plan_in(self, config: ModelConfig, recipe: Recipe, cached_share: float = 0.0, placed_bytes: int = 0) -> Plan:
        if has_card(self.device):
            say = self.watcher.measuring
            card = CardPlanning(self.device, self.dtype, self.ctx, self.ram, self.vram, self.job, say)
            search = card.search(config, recipe, self.files.name, cached_share=cached_share, beside_bytes=-placed_bytes)
            cap_allocator(self.device, search.card)  # also where nothing fits: a model that is there goes on under it
            return search.best()
        shape = model_shape(config, recipe, self.dtype, self.files.name)

        def memory() -> Memory:
            now = process_memory(self.ram)
            return replace(now, program_bytes=now.program_bytes - placed_bytes)

        return find_plan(shape, recipe, self.dtype, memory, self.ctx, self.job, self.watcher.measuring, cached_share)

    def _packed(self, config: ModelConfig) -> PackedModel:
        return open_packed(self.files, config, self.recipe, self.watcher.packing, self.watcher.waiting, self.ram)

    def _decoder(self, config: ModelConfig, source: BlockSource, plan: Plan) -> Decoder:
        """Of a plan that keeps every block where it is computed fastest."""
        return load_decoder(
            source,
            config,
            self.recipe,
            dtype=self.dtype,
            device=self.device,
            on_host=frozenset(block.name for block in plan.blocks if block.tier == "ram"),
            progress=self.watcher.reading,
        )


def has_card(device: torch.device) -> bool:
    """Whether the device has memory of its own, beside the host's."""
    return device.type != "cpu"
