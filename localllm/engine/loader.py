"""A model on this disk made ready to compute: its plan, its blocks where the plan wants them, what must stay open."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from localllm.engine.card import cap_allocator
from localllm.engine.draft_loader import DraftModel
from localllm.engine.events import ignore
from localllm.engine.memory import is_out_of_memory, no_cuda, out_of_memory, require_context
from localllm.engine.placement import smaller_kv
from localllm.engine.planner import DraftShape, ModelPlanner, has_card, require_card
from localllm.engine.runner import operators_compute
from localllm.engine.speculative.config import OFF, Speculate
from localllm.engine.speculative.draft_model import ModelDrafter
from localllm.engine.weights import is_unpacked, open_checkpoint, open_packed
from localllm.errors import DoesNotFitError, Fix
from localllm.hub import ModelFiles
from localllm.kernels.gpu.ready import is_known, why_not
from localllm.models.block_source import BlockSource
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.load import DecoderParts, Progress, load_decoder
from localllm.models.offloaded_model import OffloadedModel
from localllm.models.packed import PackedModel
from localllm.offload.planner.advice import fixes_for_context
from localllm.offload.planner.nvml import gpus
from localllm.offload.planner.plan import JobShape, Plan, with_kept_pages
from localllm.offload.planner.search import Search
from localllm.quant.bf12 import NotCompactError
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe


@dataclass(frozen=True)
class Watcher:
    """Who is told of what takes long: reading and packing weights (bytes done, bytes in all), waiting for a process
    that packs them, measuring the machine; noting: of what is worth a line that stays."""

    reading: Progress = ignore
    packing: Progress = ignore
    waiting: Callable[[str], None] = ignore
    measuring: Callable[[str], None] = ignore
    noting: Callable[[str], None] = ignore


class Replan(Protocol):
    def __call__(self, ctx: int, kv: str, held_bytes: int) -> Plan:
        """kv: the format of keys and values. held_bytes: of the host's memory that this process has, what those have.
        Raises DoesNotFitError."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """placed: what can move its blocks, where they need not all be in one place. replan: by which plan it had best run
    now, with a context of so many tokens. held: what is closed when the model is no longer used. drafter: the second
    model that was asked for, where it is worth its room."""

    decoder: Decoder
    plan: Plan
    ctx: int
    placed: OffloadedModel | None
    replan: Replan
    fixes_for: Callable[[int], list[Fix]]
    held: ExitStack
    drafter: ModelDrafter | None = None


@dataclass(frozen=True)
class Loading:
    """One model in one recipe. ctx, ram, vram: as `Engine.load` has them."""

    files: ModelFiles
    recipe: Recipe
    dtype: torch.dtype
    device: torch.device
    kv: str
    ctx: int | None
    ram: int | None
    vram: int | None
    job: JobShape | None
    watcher: Watcher
    draft: DraftModel | None = None  # a second model, for which there shall be room
    speculate: Speculate = OFF

    def load(self, config: ModelConfig) -> LoadedModel:
        """Raises what is listed at `Engine.load`."""
        require_card(self.device, self.vram)
        try:
            _, reason = self._planner.with_room_for_draft(config)
            if self.draft is not None and reason:
                self.watcher.noting(f"{self.draft.files.name} does not guess: {reason}")
            return (replace(self, draft=None) if reason else self)._loaded_with_draft(config)
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(self.device, error) if is_out_of_memory(error) else error from None

    @property
    def _planner(self) -> ModelPlanner:
        draft = None if self.draft is None else DraftShape(self.draft.shape, self.draft.config.longest_context)
        return ModelPlanner(
            self.files.name,
            self.files,
            self.recipe,
            self.dtype,
            self.device,
            self.kv,
            self.ctx,
            self.ram,
            self.vram,
            self.job,
            self.watcher.measuring,
            draft,
        )

    def _load(self, config: ModelConfig) -> LoadedModel:
        require_context(config, self.ctx)
        if (recipe := self._planner.in_best_form(config).recipe) is not self.recipe:
            with suppress(NotCompactError):
                return replace(self, recipe=recipe)._load(config)
        plan, search = self._plan(config)  # before minutes of conversion, not after
        with ExitStack() as opened:
            if is_unpacked(self.recipe) and plan.is_whole:
                blocks = opened.enter_context(open_checkpoint(self.files, config, self.recipe))
                plan, search = self._plan(blocks.config)
                if plan.is_whole:
                    decoder = self._decoder(blocks.config, blocks, plan)
                    host_bytes = sum(block.num_bytes for block in plan.blocks if block.tier == "ram")
                    return self._loaded(plan, search, decoder, self._replan(blocks.config, None, lambda: host_bytes))
            packed = opened.enter_context(self._packed(config))
            plan, search = self._plan(packed.config, packed)
            placed = opened.enter_context(self._placed(packed, plan))
            replan = self._replan(packed.config, packed, lambda: placed.host_bytes)
            return self._loaded(plan, search, placed.decode_model, replan, placed, opened.pop_all())

    def _loaded_with_draft(self, config: ModelConfig) -> LoadedModel:
        if self.draft is None:
            return self._load(config)
        try:
            loaded = self._load(config)
        except DoesNotFitError as error:  # as it was packed meanwhile it takes more than was foreseen
            self.watcher.noting(f"{self.draft.files.name} does not guess: {error.why}")
            return replace(self, draft=None)._load(config)
        try:
            return replace(loaded, drafter=self._drafter(self.draft, config.vocab_size))
        except BaseException:
            loaded.held.close()
            raise

    def _drafter(self, draft: DraftModel, vocab_size: int) -> ModelDrafter | None:
        watcher = self.watcher
        drafter = draft.load(vocab_size, self._planner.sequences, watcher)
        if drafter is None:
            watcher.noting(f"{draft.files.name} does not guess: there is too little memory for it")
        return drafter

    def _replan(self, config: ModelConfig, packed: PackedModel | None, host_bytes: Callable[[], int]) -> Replan:
        """host_bytes: of the host's memory, what the blocks have now."""
        is_on_host = self.draft is not None and not has_card(self.device)
        draft_bytes = self.draft.shape.num_bytes if self.draft is not None and is_on_host else 0

        def planned(ctx: int, kv: str, held_bytes: int) -> Plan:
            again = replace(self, ctx=ctx, kv=kv, watcher=Watcher())
            return again._plan(config, packed, host_bytes() + held_bytes + draft_bytes)[0]

        return planned

    def _loaded(
        self,
        plan: Plan,
        search: Search,
        decoder: Decoder,
        replan: Replan,
        placed: OffloadedModel | None = None,
        held: ExitStack | None = None,
    ) -> LoadedModel:
        ctx = plan.ctx
        if self.job is not None and self.ctx is None:  # one sequence may have what several have together
            ctx = max(ctx, min(plan.most_kv_tokens, plan.shape.default_ctx))
        smaller = smaller_kv(search.shape, decoder.config, self.dtype)
        fixes_for = partial(fixes_for_context, search, smaller=smaller)
        return LoadedModel(decoder, plan, ctx, placed, replan, fixes_for, held or ExitStack())

    def _placed(self, packed: PackedModel, plan: Plan) -> OffloadedModel:
        accelerator = self.device if has_card(self.device) else None
        parts = DecoderParts(packed.config, self.recipe, self.dtype, self.device)
        placed = OffloadedModel(packed, parts, accelerator)
        placed.place(plan.blocks, plan.many_rows, self.watcher.reading)
        return placed

    def _plan(
        self, config: ModelConfig, packed: PackedModel | None = None, placed_bytes: int = 0
    ) -> tuple[Plan, Search]:
        """Return the plan and its search. placed_bytes: of what this process holds, blocks that are placed anew."""
        try:
            search = self._search(config, self.recipe, packed, placed_bytes)
            plan = search.best()
            return plan if self.job is not None else with_kept_pages(plan), search
        except DoesNotFitError as error:
            with suppress(DoesNotFitError):
                self._search(config, RECIPES[DEFAULT]).best()
                error.fix = Fix.flag("--weights", "int4")
            raise

    def _search(
        self, config: ModelConfig, recipe: Recipe, packed: PackedModel | None = None, placed_bytes: int = 0
    ) -> Search:
        search = replace(self._planner, recipe=recipe).search(config, packed, placed_bytes)
        if search.machine.card is not None:  # also where nothing fits: a model that is there goes on under it
            cap_allocator(self.device, search.machine.card.memory)
        return search

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


def note_device(device: torch.device, watcher: Watcher, *, is_chosen: bool) -> None:
    """Has our kernels checked where a GPU is new to them, and says where they, or the GPU, cannot be used. is_chosen:
    nobody asked for this device."""
    if not has_card(device):
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ  # by someone who knows
        if is_chosen and not hidden and (cards := gpus()):
            name = cards[0].name or "an NVIDIA GPU"
            watcher.noting(f"the CPU computes, though {name} is here: {no_cuda()}; see localllm doctor")
        return
    if not is_known(device):
        watcher.measuring("checking the kernels on this graphics card, once")
    if reason := why_not(device):
        watcher.noting(operators_compute(reason))
