"""The plan of one model on this machine: the one search behind `plan`, a load, and a model that is placed anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from localllm.cache.kv_format import wanted_format
from localllm.engine.device import DTYPES, device_name, dtype_name, has_cuda
from localllm.engine.device import has_card as has_card
from localllm.engine.model_options import require_effect
from localllm.engine.placement import (
    BATCH_ROWS,
    held_tokens,
    model_shape,
    process_memory,
    require_cap,
    require_context,
    with_choice,
    with_windows,
)
from localllm.engine.weights import as_stored, choose_weights, compact_form, is_unpacked
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_directory, packed_recipes
from localllm.models.architecture import ModelConfig
from localllm.offload.planner.hit_curve import HitCurve
from localllm.offload.planner.host_placements import LOGIT_ROWS
from localllm.offload.planner.machine import NOTHING, Held, Machine, Memory, Rates
from localllm.offload.planner.model_shape import ModelShape
from localllm.offload.planner.plan import JobShape
from localllm.offload.planner.profile import kept_profile
from localllm.offload.planner.search import Search
from localllm.offload.planner.speculation_gain import why_left_out
from localllm.quant.layouts import DTYPE_NAMES, Sizes, torch_dtype
from localllm.settings import EngineConfig, number_of

if TYPE_CHECKING:
    import torch

    from localllm.models.packed import PackedModel
    from localllm.offload.planner.card_sheets import OtherMachine
    from localllm.quant.recipe import Recipe

# Rates for a plan that needs none measured: everything fits, whatever they are.
_TYPICAL = Rates(matrix_gbs=20.0, compute_gops=500.0, disk_gbs=1.0, is_measured=False)


_DRAFT_SNAPSHOTS = 4  # a turn of a chat has two or three


@dataclass(frozen=True)
class DraftShape:
    """A second model that drafts, or a head.

    sequence_bytes: memory of a sequence beside its keys, values and states.
    shares_head: it makes logits by the matrix of the model that it drafts for.
    """

    shape: ModelShape
    longest_ctx: int
    sequence_bytes: int = 0
    shares_head: bool = False

    def num_bytes(self, ctx: int, sequences: int = 1) -> int:
        """Return its memory: it computes prompts in parts, and never has many logits at once."""
        activations = BATCH_ROWS * self.shape.row_bytes + LOGIT_ROWS * self.shape.logits_bytes
        kv_bytes = self.shape.kv_bytes(sequences * min(ctx, self.longest_ctx), sequences)
        sequences_bytes = sequences * (self.sequence_bytes + self.shape.recurrent_bytes)
        return self.shape.num_bytes + kv_bytes + sequences_bytes + activations + self.snapshots_bytes

    @property
    def snapshots_bytes(self) -> int:
        """The most that the snapshots take by which a hybrid finds again what it has read."""
        return _DRAFT_SNAPSHOTS * self.shape.snapshot_bytes

    def read_bytes(self, model: ModelShape) -> int:
        """Return the bytes of the weights that one draft reads. model: that it drafts for."""
        return self.shape.num_bytes + (model.lm_head.num_bytes if self.shares_head else 0)


@dataclass(frozen=True)
class ModelPlanner:
    """One model in one format, and what the user asked for.

    files: where the model is on this disk, if it is.
    sizes: the recipe of its weights.
    dtype, device: names, the last as torch has it.
    wanted, job: as `Engine.load` has them.
    say: is told of each measurement before it begins, and may raise.
    draft: a second model that drafts.
    measures: the rates are measured even where the plan does not depend on them, as predictions do.
    other: the machine that is planned for, where that is not this one.
    """

    name: str
    files: ModelFiles | None
    sizes: Sizes
    dtype: str
    device: str
    wanted: EngineConfig
    job: JobShape | None
    say: Callable[[str], None]
    draft: DraftShape | None = None
    measures: bool = False
    other: OtherMachine | None = None

    @classmethod
    def of(
        cls,
        name: str,
        files: ModelFiles | None,
        config: ModelConfig,
        wanted: EngineConfig,
        job: JobShape | None,
        say: Callable[[str], None],
        other: OtherMachine | None = None,
    ) -> ModelPlanner:
        """Return the planner, without a second model. Raises UsageError for what cannot be honoured."""
        if wanted.threads is not None:
            from localllm.engine.memory import use_threads

            use_threads(wanted.threads)
        device = device_name(wanted.device) if other is None else other.device
        require_context(config, wanted.ctx)
        require_effect(config, wanted, device)
        is_by_weights = wanted.dtype == "auto" and wanted.weights in DTYPES
        named = wanted.weights if is_by_weights else wanted.dtype
        dtype = dtype_name(named, device) if other is None else other.dtype_name(named)
        wanted = replace(wanted, kv=wanted_format(wanted.kv, wanted.dtype, wanted.weights))
        sizes = choose_weights(wanted.weights, files, config, dtype)
        return cls(name, files, sizes, dtype, device, wanted, job, say, other=other)

    @property
    def weights(self) -> str:
        return self.sizes.name

    @cached_property
    def recipe(self) -> Recipe:
        from localllm.quant.recipe import recipe_of

        return recipe_of(self.sizes)

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(DTYPE_NAMES[self.dtype])

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)

    @property
    def sequences(self) -> int:
        """The most sequences at once."""
        return 1 if self.job is None else self.job.sequences

    def search(self, config: ModelConfig, packed: PackedModel | None = None, held: Held = NOTHING) -> Search:
        """Return the search for the best plan; what it needs to know of the machine is measured first, once.

        packed: the packed model, once it is open.
        held: of what this process holds, blocks and all else that is placed anew.

        Raises UsageError for a cap above what exists, DoesNotFitError where a GPU has no memory for a measurement.
        """
        packing, cached_share = None, 0.0
        if packed is None:
            config, packing = as_stored(self.files, self.name, config, self.sizes)
        else:
            cached_share = packed.cached_share()
        shape = model_shape(config, self.sizes, self.dtype, self.name, self.device, self.wanted.kv, packing)
        shape = with_windows(with_choice(shape, config, self.wanted.chosen_pages), config, self.dtype)
        most = held_tokens(config, self.wanted.kv_evict) or shape.held_tokens
        # The tables of layers with a window have all pages.
        shape = replace(shape, held_tokens=most, table_tokens=shape.table_tokens if any(config.windows) else most)
        if shape.mixtures and self.files is not None:
            from localllm.models.kept_uses import kept_uses  # no other model's plan needs it

            directory = packed_directory(self.files, self.weights) if packed is None else packed.directory
            shape = replace(shape, hit_curve=HitCurve.of(kept_uses(directory), shape.hit_curve))
        if self.draft is not None:
            draft_bytes = self.draft.num_bytes(self.wanted.ctx or shape.default_ctx, self.sequences)
            shape = replace(shape, draft_bytes=draft_bytes, draft_blocks=len(self.draft.shape.blocks))
        shape = replace(shape, adapter_bytes=self.wanted.adapter_memory or 0)
        shape = replace(shape, resident_tokens=number_of(self.wanted.kv_offload, "keep"))
        memory = partial(
            process_memory, self.wanted.ram, self.sizes, config.vocab_size, held.host_bytes, packs=packing is not None
        )
        if self.other is not None:
            machine = self.other.of(self._host(shape, memory), self.weights, self.wanted.vram)
        elif has_card(self.device):
            from localllm.engine.card import card_machine

            machine = card_machine(
                self.torch_device,
                self.recipe,
                self.torch_dtype,
                self.wanted.vram,
                memory,
                self.say,
                held.graph_bytes,
            )
        else:
            machine = self._host(shape, memory)
        machine = replace(machine, rates=replace(machine.rates, cached_share=cached_share))
        return Search(shape, machine, self.wanted.ctx, self.job, spills=self.wanted.kv_offload == "auto")

    def in_best_form(self, config: ModelConfig, held: Held = NOTHING) -> ModelPlanner:
        """Return the planner for a form of the same weights in fewer bytes, where they have one that is better."""
        if has_card(self.device) or not is_unpacked(self.sizes):
            return self
        own = self.search(config, held=held)
        if own.fitting is not None and own.fitting.is_whole:
            return self
        compact = compact_form(self.sizes, config, () if self.files is None else packed_recipes(self.files))
        if compact is None:
            return self
        other = replace(self, sizes=compact)
        return other if other.search(config, held=held).is_better_than(own) else self

    def with_room_for_draft(self, config: ModelConfig, held: Held = NOTHING) -> tuple[ModelPlanner, str]:
        """Return the planner without the second model, and why, where that does not fit or costs more than it gives."""
        if self.draft is None:
            return self, ""
        alone = replace(self, draft=None)
        with_it = self.search(config, held=held)
        without = alone.search(config, held=held).fitting
        if without is None:  # nothing fits: that is the error to report
            return alone, ""
        draft_bytes, weight_bytes = with_it.shape.draft_bytes, self.draft.read_bytes(with_it.shape)
        reason = why_left_out(draft_bytes, weight_bytes, with_it.fitting, without)
        return alone if reason else self, reason

    def _host(self, shape: ModelShape, memory: Callable[[], Memory]) -> Machine:
        """Return the machine without a GPU.

        memory: asked again after a measurement, which leaves something behind.
        """
        require_cap(self.wanted.ram)  # before seconds of measuring
        profile, weights = kept_profile(), self.weights
        plan_flags = () if self.other is not None or not has_cuda() else ("--device", "cpu")
        if not self.measures and profile.rates(weights) is None:
            typical = Machine(memory(), _TYPICAL, plan_flags=plan_flags)
            plan = Search(shape, typical, self.wanted.ctx, self.job).fitting
            is_whole = plan is not None and not plan.streamed and plan.ctx >= (self.wanted.ctx or shape.default_ctx)
            if plan is None or (is_whole and not shape.draft_bytes):
                return typical
        if profile.lacks(weights) and "torch" not in sys.modules:
            self._measure_apart()
            profile = kept_profile()
        if profile.lacks(weights):
            from localllm.offload.measurements.measurement import measured

            # Torch is loaded now, and says for certain which machine this is.
            profile = measured(kept_profile(), weights, self.recipe.blocks, self.torch_dtype, self.say)
        rates = profile.rates(weights)
        assert rates is not None
        return Machine(memory(), rates, corrections=profile.corrections(weights), plan_flags=plan_flags)

    def _measure_apart(self) -> None:
        """Measure in a process of its own, which keeps what it finds: torch takes seconds and 300 MB of this one."""
        command = [sys.executable, "-P", "-m", "localllm.offload.measurements", self.weights, DTYPE_NAMES[self.dtype]]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            started = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null, text=True)
        except OSError:  # no process can be started: it is measured in this one
            return
        with started as child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    self.say(line.rstrip())
            except BaseException:
                child.kill()
                raise
