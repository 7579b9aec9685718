"""Search the best placement of a model on a machine.

Layers are alike, so only a few hundred placements are worth trying, which takes milliseconds. No weights are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from localllm.errors import DoesNotFitError, Fix
from localllm.offload.planner.card_placements import CardPlacements
from localllm.offload.planner.fit_errors import SMALLER, amount, cannot_be_packed, does_not_fit, more_of
from localllm.offload.planner.host_placements import HostPlacements
from localllm.offload.planner.machine import Machine
from localllm.offload.planner.machine_memory import HEADROOM
from localllm.offload.planner.model_shape import ModelShape
from localllm.offload.planner.plan import JobShape, Plan, can_be_packed, cap

LEAST_CTX = 128
LEAST_RESIDENT = 2048  # tokens of a sequence in memory where others rest elsewhere: a forward writes 512 of them
RESIDENT_STEP = 1024  # tokens: those of an extent, which leave memory together
CHAT_CTX = 2048  # long enough for a conversation; a shorter context is taken only where this one does not fit
# Where the user names no context: a longer one than this share of the best speed allows is not taken.
_WORTH = 0.9


@dataclass(frozen=True)
class Search:
    """All plans of a model on a machine.

    ctx: the context that the user asked for, if any.
    spills: keys and values may rest elsewhere than in the fastest memory, as few as must.
    job: None for one answer, as fast as possible.
    """

    shape: ModelShape
    machine: Machine
    ctx: int | None = None
    job: JobShape | None = None
    spills: bool = False

    def best(self) -> Plan:
        """Return the plan with the longest context that costs little of the speed, or the one that was asked for.

        Raises DoesNotFitError naming the least memory that would do.
        """
        return self._best

    @cached_property
    def _best(self) -> Plan:
        if self.job is not None:
            return self._best_for(self.job)
        possible = contexts(self.shape, self.ctx)
        enough = min(CHAT_CTX, possible[0])
        fitting: list[Plan] = []
        for ctx in (ctx for ctx in reversed(possible) if ctx >= enough):
            plan = self._runnable(ctx, 1, ctx)
            if plan is not None and (self.ctx is not None or _is_modest(plan)):
                fitting.append(plan)
            elif ctx > self.shape.default_ctx:  # a still longer one takes more
                break
        if fitting:
            return next(plan for plan in reversed(fitting) if plan.decode_s * _WORTH <= fitting[0].decode_s)
        shorter = (self._runnable(ctx, 1, ctx) for ctx in possible if ctx < enough)
        best = next((plan for plan in shorter if plan is not None), None)
        if best is None:
            raise self.refusal()
        return best

    @cached_property
    def fitting(self) -> Plan | None:
        """The best plan; None where nothing fits."""
        try:
            return self.best()
        except DoesNotFitError:
            return None

    def with_ram(self, ram_bytes: int) -> Search:
        """Return the same search with so much of the host's memory."""
        memory = replace(self.machine.memory, ram_bytes=ram_bytes)
        return replace(self, machine=replace(self.machine, memory=memory))

    def with_vram(self, vram_bytes: int) -> Search:
        """Return the same search with so much of the GPU's memory."""
        card = self.machine.card
        assert card is not None
        card = replace(card, memory=replace(card.memory, vram_bytes=vram_bytes))
        return replace(self, machine=replace(self.machine, card=card))

    def with_fast_memory(self, num_bytes: int) -> Search:
        """Return the same search with so much of the GPU's memory, or of the host's where there is no GPU."""
        return self.with_ram(num_bytes) if self.machine.card is None else self.with_vram(num_bytes)

    def without_limit(self) -> Search:
        """Return the search with as much of the fast memory as may be wanted. Where keys and values may rest elsewhere,
        the fewest stay: more of them is no faster behind a short text, and takes gigabytes."""
        few = replace(self, shape=self._placements.shape, spills=False)
        return few.with_fast_memory(1 << 62)

    def spilling(self) -> Search | None:
        """Return the search in which as few keys and values rest elsewhere as must; None where they may already, or
        cannot."""
        shape = self.shape
        leave = shape.held_tokens < (self.ctx or shape.default_ctx)  # by --kv-evict
        are_windows = shape.page_bytes_per_token <= shape.windowed_bytes_per_token
        if self.job is not None or self.spills or leave or are_windows:
            return None
        return replace(self, shape=replace(shape, resident_tokens=None), spills=True)

    def is_better_than(self, own: Search) -> bool:
        """Compare a form of the weights in fewer bytes with their own, which does not fit as a whole."""
        plan, own_plan = self.fitting, own.fitting
        if plan is None and own_plan is None:
            return self.least_ram_bytes() < own.least_ram_bytes()
        if plan is None or own_plan is None:
            return own_plan is None
        return plan.ctx >= own_plan.ctx and plan.streamed_bytes <= own_plan.streamed_bytes

    def least_vram_bytes(self) -> int:
        """Return the least of the GPU's memory with which the model runs; 0 without a GPU."""
        return self._placements.least_vram_bytes(self._least_ctx)

    def least_ram_bytes(self) -> int:
        """Return the least of the host's memory with which the model runs, packed in it first."""
        return self._placements.least_bytes(self._least_ctx)

    def refusal(self) -> DoesNotFitError:
        """Return the error where nothing fits: what is missing, and the least that would do."""
        shape, memory, card, ctx = self.shape, self.machine.memory, self.machine.card, self._least_ctx
        if card is not None and (least := self.least_vram_bytes()) > card.memory.vram_bytes:
            reason = self._placements.reason(ctx, of_vram=True)
            return does_not_fit(shape, "the GPU's memory", card.memory.vram_bytes, least, reason, self.fixes())
        least, packed_bytes = self.least_ram_bytes(), self._packed_ram_bytes()
        place = "memory" if card is None else "memory beside the GPU"
        if shape.packing is not None and least > packed_bytes:
            packing_bytes = memory.program_bytes + shape.packing.num_bytes
            if card is not None or least >= packing_bytes:
                return cannot_be_packed(shape.name, shape.weights, memory, shape.packing, self.fixes(), packed_bytes)
            reason = f"with everything in memory; to pack it, so that less would do, needs {amount(packing_bytes)}"
            return does_not_fit(shape, place, memory.ram_bytes, least, reason, self.fixes())
        reason = self._placements.reason(ctx)
        return does_not_fit(shape, place, memory.ram_bytes, least, reason, self.fixes())

    def fixes(self) -> list[Fix]:
        """Return flags and commands, each of which would help alone where nothing fits."""
        memory, card, packing = self.machine.memory, self.machine.card, self.shape.packing
        least_vram = self.least_vram_bytes()
        if card is not None and least_vram > card.memory.vram_bytes:
            more = more_of("--vram", least_vram, card.memory.most_bytes)
            return [*more, *self._shorter_contexts()] or [Fix.flag(*self.machine.cpu_flags)]
        least = self.least_ram_bytes()
        if self.machine.is_other:
            found = [Fix.flag("--ram", cap(int(least / HEADROOM)))]
        else:
            found = more_of("--ram", least, memory.most_bytes)
        if packing is not None and packing.command and self._packed_ram_bytes() <= memory.ram_bytes:
            found.append(Fix.advice(packing.command))  # ahead of time: it runs in memory as small as this
        if card is not None and self.shape.can_slot:  # which reads experts from the disk
            found.append(Fix.flag(*self.machine.cpu_flags))
        return [*found, *self._spilled_contexts(), *self._shorter_contexts()] or [self._smaller()]

    @cached_property
    def _placements(self) -> HostPlacements | CardPlacements:
        """All placements; where keys and values may rest elsewhere, those with as few of them in memory as
        may be."""
        return self._placements_with(LEAST_RESIDENT if self.spills else self.shape.resident_tokens)

    def _placements_with(self, resident_tokens: int | None) -> HostPlacements | CardPlacements:
        shape = replace(self.shape, resident_tokens=resident_tokens)
        return (HostPlacements if self.machine.card is None else CardPlacements)(shape, self.machine)

    def _plans(self, ctx: int, sequences: int, kv_tokens: int) -> Iterator[Plan | None]:
        """Yield the best plan for each amount of keys and values in memory that may be: all first, then fewer."""
        if self.spills:
            yield self._placements_with(None).best(ctx, sequences, kv_tokens)
            resident = kv_tokens // sequences * 3 // 4
            while resident > LEAST_RESIDENT:
                yield self._placements_with(resident).best(ctx, sequences, kv_tokens)
                resident = resident * 3 // 4
        yield self._placements.best(ctx, sequences, kv_tokens)

    def _best_for(self, job: JobShape) -> Plan:
        """Return the plan with as many sequences as give the most tokens a second: each takes memory from weights."""
        longest = self.ctx or min(job.longest, self.shape.default_ctx)
        counts = [job.sequences]
        while counts[-1] > 1:
            counts.append(counts[-1] * 3 // 4)
        tried = (self._runnable(longest, count, max(longest, count * job.tokens)) for count in counts)
        plans = [plan for plan in tried if plan is not None]
        if not plans:
            raise self.refusal()
        return max(plans, key=lambda plan: plan.decode_tok_s)

    def _runnable(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """Return the plan with the most keys and values in memory that leave all weights where they are fast, or the
        fastest; None where nothing fits, or memory is too small to pack the model for it first."""
        plans = []
        for plan in self._plans(ctx, sequences, kv_tokens):
            plans += [] if plan is None else [plan]
            if plan is not None and plan.is_whole:
                plan = self._filled(plan)
                break
        else:
            plan = min(plans, key=lambda each: each.costs.decode_s(ctx // 2, sequences), default=None)
        return plan if plan is not None and can_be_packed(plan, self.machine.memory) else None

    def _filled(self, plan: Plan) -> Plan:
        """Return the plan with as many more keys and values in memory as take room from no weights and from no rows of
        a forward: up to a third more, of which the plan before had too many."""
        fits = plan.shape.resident_tokens
        if fits is None or not self.spills:
            return plan
        too_many = min(plan.kv_tokens // plan.sequences, fits * 4 // 3 + 2)
        while too_many - fits > RESIDENT_STEP:
            middle = (fits + too_many) // 2
            fuller = self._placements_with(middle).best(plan.ctx, plan.sequences, plan.kv_tokens)
            if fuller is not None and fuller.is_whole and fuller.batch_rows == plan.batch_rows:
                plan, fits = fuller, middle
            else:
                too_many = middle
        return plan

    def _packed_ram_bytes(self) -> int:
        """Return the least of the host's memory for a model that is packed already."""
        return replace(self, shape=replace(self.shape, packing=None)).least_ram_bytes()

    def _smaller(self) -> Fix:
        """Return what helps where no flag gives enough: less memory for adapters, or a smaller model."""
        alone = replace(self, shape=replace(self.shape, adapter_bytes=0))
        room_mib = (self.machine.memory.ram_bytes - alone.least_ram_bytes()) >> 20
        return Fix.flag("--adapter-memory", f"{room_mib}MiB") if self.shape.adapter_bytes and room_mib > 0 else SMALLER

    def _spilled_contexts(self) -> list[Fix]:
        """Return the flag by which keys and values of a long context rest on the disk, where it would fit then."""
        spilling = self.spilling()
        if self.ctx is None or spilling is None or spilling._runnable(self.ctx, 1, self.ctx) is None:
            return []
        return [Fix.flag("--kv-offload", "auto")]

    def _shorter_contexts(self) -> list[Fix]:
        """Return the flag for the longest context below the one that was asked for with which it would fit, if any."""
        if self.ctx is None or self.job is not None:
            return []
        shorter = (ctx for ctx in contexts(self.shape, None) if ctx < self.ctx)
        return [Fix.flag("--ctx", ctx) for ctx in shorter if self._runnable(ctx, 1, ctx) is not None][:1]

    @property
    def _least_ctx(self) -> int:
        """The shortest context that would do."""
        if self.job is not None:
            return self.ctx or min(self.job.longest, self.shape.default_ctx)
        return contexts(self.shape, self.ctx)[-1]


def _is_modest(plan: Plan) -> bool:
    """Return whether a context that nobody asked for is the usual one, or takes from nothing: all blocks stay where
    they are fast, and as much memory stays free as it takes beside the usual one."""
    longer = plan.shape.kv_bytes(plan.ctx) - plan.shape.kv_bytes(plan.shape.default_ctx)
    return longer <= 0 or (plan.is_whole and longer <= plan.free_bytes)


def contexts(shape: ModelShape, asked: int | None) -> list[int]:
    """Return the contexts that may be taken, the longest first."""
    if asked is not None:
        return [asked]
    found = [max(shape.default_ctx, shape.cheap_ctx)]
    while found[-1] > LEAST_CTX:
        found.append(max(LEAST_CTX, 1 << ((found[-1] - 1).bit_length() - 1)))
    return found
