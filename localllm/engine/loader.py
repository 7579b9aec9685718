"""A model on this disk made ready to compute, and a second one that drafts for it: the plan, the blocks where the plan
wants them, what must stay open."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from localllm import hub
from localllm.cache.kv_eviction import Eviction
from localllm.cache.kv_format import choose_format
from localllm.cache.prefix import PrefixCache
from localllm.engine.card import cap_allocator
from localllm.engine.events import ignore
from localllm.engine.kernel_check import scope_of
from localllm.engine.memory import is_out_of_memory, out_of_memory
from localllm.engine.placement import model_shape, smaller_kv
from localllm.engine.planner import DraftShape, ModelPlanner, has_card
from localllm.engine.residency import Residency
from localllm.engine.runner import BATCH_ROWS
from localllm.engine.speculative.drafter import Drafter, ModelDrafter
from localllm.engine.speculative.head_model import HeadModel
from localllm.engine.weights import choose_weights, is_unpacked, open_checkpoint, open_packed
from localllm.errors import FETCH_ANEW, DoesNotFitError, Fix, ModelNotFoundError, TokenizerError, UsageError
from localllm.hub import ModelFiles
from localllm.kernels.gpu.ready import CheckScope
from localllm.models.architecture import ModelConfig
from localllm.models.block_source import CheckpointBlocks
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.load import DecoderParts, Progress, load_decoder
from localllm.models.offloaded_model import OffloadedModel
from localllm.models.packed import PackedModel
from localllm.offload.planner.advice import fixes_for_context
from localllm.offload.planner.card_placements import graph_bytes
from localllm.offload.planner.machine import NOTHING, Held
from localllm.offload.planner.plan import Plan, with_kept_pages
from localllm.offload.planner.search import Search
from localllm.quant.dense import dense_name
from localllm.quant.layouts import DEFAULT, SIZES
from localllm.quant.recipe import Recipe, recipe_of
from localllm.quant.weight_format import NotCompactError
from localllm.settings import DRAFT_MODEL
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Watcher:
    """Callbacks for what takes long: reading and packing weights (bytes done, bytes in all), waiting for a process that
    packs them, measuring the machine. noting: called with what is worth a line that stays."""

    reading: Progress = ignore
    packing: Progress = ignore
    waiting: Callable[[str], None] = ignore
    measuring: Callable[[str], None] = ignore
    noting: Callable[[str], None] = ignore


@dataclass(frozen=True)
class DraftModel:
    """kv: as the setting."""

    files: ModelFiles
    config: ModelConfig
    recipe: Recipe
    dtype: torch.dtype
    device: torch.device
    kv: str

    @classmethod
    def of(cls, word: str, tokenizer: Tokenizer, planner: ModelPlanner) -> DraftModel | None:
        """Return the model of this name, in the format in which it would run by itself; None where none is named.

        tokenizer, planner: of the model that it drafts for.

        Raises ModelNotFoundError, and UsageError where the two do not have the same tokens.
        """
        if not word:
            return None
        try:
            files = hub.locate(word)
        except ModelNotFoundError as error:
            error.what = f"--speculate {DRAFT_MODEL}{word}: {error.what}"
            raise
        require_same_tokenizer(tokenizer, planner.name, files)
        config = load_config(files.directory)
        recipe = recipe_of(choose_weights("auto", files, config, planner.dtype))
        return cls(files, config, recipe, planner.torch_dtype, planner.torch_device, planner.wanted.kv)

    @property
    def check_scope(self) -> CheckScope:
        return scope_of(self.config, self.recipe, self.kv, self.dtype)

    @property
    def shape(self) -> DraftShape:
        shape = model_shape(
            self.config, self.recipe, dense_name(self.dtype), self.files.name, str(self.device), self.kv
        )
        return DraftShape(shape, self.config.longest_context)

    @property
    def label(self) -> str:
        return self.files.name

    @property
    def is_asked(self) -> bool:
        return True

    def load(self, vocab_size: int, sequences: int, watcher: Watcher) -> Callable[[Residency], ModelDrafter] | None:
        """vocab_size: of the logits that its own are compared with. sequences: that it has room for at once. None where
        there turns out to be too little memory. Raises CheckpointError."""
        try:
            if is_unpacked(self.recipe):
                opened: AbstractContextManager[CheckpointBlocks | PackedModel] = open_checkpoint(
                    self.files, self.config, self.recipe
                )
            else:
                opened = open_packed(self.files, self.config, self.recipe, watcher.packing, watcher.waiting)
            with opened as source:
                decoder = load_decoder(
                    source,
                    source.config,
                    self.recipe,
                    dtype=self.dtype,
                    device=self.device,
                    progress=watcher.reading,
                )
            kv_format = choose_format(self.kv, self.config.kv_shapes, self.dtype.itemsize)
            residency = Residency(decoder, kv_format, BATCH_ROWS)
            residency.warm_up(watcher.measuring)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        prefix = PrefixCache(secrets.token_bytes(32), residency.kv_pages, snapshot_ram_bytes=self.shape.snapshots_bytes)
        is_dynamic = any(rope.kind in ("dynamic", "longrope") for rope in self.config.ropes)  # keys that change later
        drafter = ModelDrafter(
            f"model:{self.files.name}",
            lambda: residency.runner,
            residency.new_kv,
            prefix=None if is_dynamic else prefix,
            ctx=self.config.longest_context,
            sequences=sequences,
            vocab_size=vocab_size,
        )
        return lambda _: drafter


def require_same_tokenizer(tokenizer: Tokenizer, name: str, files: ModelFiles) -> None:
    """tokenizer, name: of the model for which the one of these files shall draft. Raises UsageError where the two do
    not speak the same tokens, TokenizerError."""
    try:
        difference = tokenizer.difference(Tokenizer.load(files.directory))
    except TokenizerError as error:
        error.fix = FETCH_ANEW.with_model(files.name) if files.repo else files.copied_anew
        raise
    if difference:
        raise UsageError(
            f"--speculate {DRAFT_MODEL}{files.name}: it cannot draft for {name}, as it has another tokenizer",
            why=f"{difference}; a smaller model of the same family has the same one",
            fix=Fix.flag("--speculate", "auto"),
        )


class Replan(Protocol):
    def __call__(self, ctx: int, kv: str, held: Held) -> Plan:
        """kv: the format of keys and values. held: what they have of this process's memory, and graphs. Raises
        DoesNotFitError."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to compute.

    plan: the plan it was loaded by, if one was made.
    placed: what can move its blocks, where they need not all be in one place; `decoder` is its `decode_model` then.
    replan: by which plan it had best run now, with a context of so many tokens; without one the context never grows.
    fixes_for: the flags with which a longer context fits, as alternatives.
    held: what is closed when the model is not used any more.
    resident_tokens: of a sequence, whose keys and values stay in memory, where the others rest elsewhere.
    new_drafter: makes the second model that was asked for, or the head that drafts, where it is worth its room.
    eviction: what leaves of the keys and values of a long sequence.
    """

    decoder: Decoder
    ctx: int
    plan: Plan | None = None
    placed: OffloadedModel | None = None
    replan: Replan | None = None
    fixes_for: Callable[[int], list[Fix]] = lambda ctx: [Fix.flag("--ctx", ctx)]
    held: ExitStack = field(default_factory=ExitStack)
    resident_tokens: int | None = None
    new_drafter: Callable[[Residency], Drafter] | None = None
    eviction: Eviction | None = None


@dataclass(frozen=True)
class Loading:
    """A load by a planner. draft: the second model, or head, that the planner has room for, or ought to have."""

    planner: ModelPlanner
    files: ModelFiles
    watcher: Watcher
    draft: DraftModel | HeadModel | None = None

    def load(self, config: ModelConfig) -> LoadedModel:
        """Raises what is listed at `Engine.load`."""
        try:
            planner, reason = self.planner.with_room_for_draft(config)
            if self.draft is None or planner.draft is None:
                return replace(self, planner=planner)._without_draft(config, reason)
            try:
                loaded = self._load(config)
            except DoesNotFitError as error:  # as it was packed meanwhile it takes more than was foreseen
                return self._without_draft(config, error.why)
            try:
                drafter = self.draft.load(config.vocab_size, planner.sequences, self.watcher)
            except BaseException:
                loaded.held.close()
                raise
            if drafter is None:
                self.watcher.noting(f"{self.draft.label} does not draft: there is too little memory for it")
            return replace(loaded, new_drafter=drafter)
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(self.planner.torch_device, error) if is_out_of_memory(error) else error from None

    def _without_draft(self, config: ModelConfig, reason: str) -> LoadedModel:
        if self.draft is not None and reason and self.draft.is_asked:
            self.watcher.noting(f"{self.draft.label} does not draft: {reason}")
        return replace(self, planner=replace(self.planner, draft=None), draft=None)._load(config)

    def _load(self, config: ModelConfig) -> LoadedModel:
        if (planner := self.planner.in_best_form(config)) is not self.planner:
            with suppress(NotCompactError):
                return replace(self, planner=planner)._load(config)
        recipe, device, watcher = self.planner.recipe, self.planner.torch_device, self.watcher
        plan, search = self._plan(config)  # before minutes of conversion, not after
        with ExitStack() as opened:
            if is_unpacked(recipe) and plan.is_whole:
                blocks = opened.enter_context(open_checkpoint(self.files, config, recipe))
                plan, search = self._plan(blocks.config)
                if plan.is_whole:
                    on_host = {block.name: block.num_bytes for block in plan.blocks if block.tier == "ram"}
                    decoder = load_decoder(
                        blocks,
                        blocks.config,
                        recipe,
                        dtype=self.planner.torch_dtype,
                        device=device,
                        on_host=frozenset(on_host),
                        progress=watcher.reading,
                    )
                    replan = self._replan(plan, blocks.config, None, lambda: sum(on_host.values()))
                    return self._loaded(plan, search, decoder, replan)
            ram = self.planner.wanted.ram
            packed = opened.enter_context(
                open_packed(self.files, config, recipe, watcher.packing, watcher.waiting, ram)
            )
            plan, search = self._plan(packed.config, packed)
            parts = DecoderParts(packed.config, recipe, self.planner.torch_dtype, device)
            has_own_memory = has_card(self.planner.device)
            placed = opened.enter_context(OffloadedModel(packed, parts, device if has_own_memory else None))
            placed.place(plan.blocks, plan.many_rows, watcher.reading)
            replan = self._replan(plan, packed.config, packed, lambda: placed.host_bytes)
            return self._loaded(plan, search, placed.decode_model, replan, placed, opened.pop_all())

    def _replan(
        self, plan: Plan, config: ModelConfig, packed: PackedModel | None, host_bytes: Callable[[], int]
    ) -> Replan:
        """plan: that is loaded; as many keys and values of a sequence stay in memory as it has there. host_bytes: of
        the host's memory, what the blocks have now."""
        resident = plan.shape.resident_tokens
        kv_offload = "off" if resident is None else f"keep:{resident}"
        draft, planner = self.planner.draft, replace(self.planner, say=ignore)
        draft_bytes = draft.shape.num_bytes if draft is not None and not has_card(planner.device) else 0

        def planned(ctx: int, kv: str, held: Held) -> Plan:
            again = replace(
                self, planner=replace(planner, wanted=replace(planner.wanted, ctx=ctx, kv=kv, kv_offload=kv_offload))
            )
            held = replace(held, host_bytes=host_bytes() + held.host_bytes + draft_bytes)
            return again._plan(config, packed, held)[0]

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
        ctx, planner = plan.ctx, self.planner
        if planner.job is not None and planner.wanted.ctx is None:  # one sequence may have what several have together
            ctx = max(ctx, min(plan.most_kv_tokens, plan.shape.default_ctx))
        smaller = smaller_kv(search.shape, decoder.config, planner.dtype)
        fixes_for = partial(fixes_for_context, search, smaller=smaller)
        held, resident = held or ExitStack(), plan.shape.resident_tokens
        eviction = Eviction.of(planner.wanted.kv_evict)
        return LoadedModel(decoder, ctx, plan, placed, replan, fixes_for, held, resident, eviction=eviction)

    def _plan(
        self, config: ModelConfig, packed: PackedModel | None = None, held: Held = NOTHING
    ) -> tuple[Plan, Search]:
        """Return the plan and its search. held: of what this process holds, all that is placed anew."""
        try:
            search = self.planner.search(config, packed, held)
            if search.machine.card is not None:  # also where nothing fits: a model that is there goes on under it
                card = search.machine.card.memory
                cap_allocator(self.planner.torch_device, card, graph_bytes(search.shape, card))
            plan = search.best()
            return plan if self.planner.job is not None else with_kept_pages(plan), search
        except DoesNotFitError as error:
            with suppress(DoesNotFitError):
                replace(self.planner, sizes=SIZES[DEFAULT]).search(config).best()
                error.fix = Fix.flag("--weights", "int4")
            raise
