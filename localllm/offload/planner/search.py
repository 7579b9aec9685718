"""The best placement of a model on a machine without a GPU, by trying all that are worth a thought.

Layers are alike, so that these are a few hundred, tried in milliseconds. Works before any weight is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from localllm.errors import DoesNotFitError
from localllm.offload.planner.calibration import Corrections
from localllm.offload.planner.costs import PASS_TOKENS, StepCosts
from localllm.offload.planner.fit_errors import SMALLER, amount, cannot_be_packed, does_not_fit, more_of, parts
from localllm.offload.planner.plan import (
    NEVER,
    BlockShape,
    JobShape,
    Memory,
    ModelShape,
    Placed,
    Plan,
    Rates,
)
from localllm.offload.planner.speculation_gain import needed, rate
from localllm.offload.streaming.page_map import ALIGN_BYTES
from localllm.offload.streaming.ring import ring_bytes
from localllm.settings import DRAFT_TOKENS

LEAST_CTX = 128
CHAT_CTX = 2048  # a conversation has room in it; a shorter context is taken only where this one does not fit
PROMPT_TOKENS = 512  # of the prompt whose first token is predicted
LOGIT_ROWS = 16  # answers that a step may compute the logits of
# Where nobody asked for a context: a longer one than this share of the best speed allows is not taken.
_WORTH = 0.9
# Of the best speed without guesses, what a placement must keep that is better for them; and one with which they are
# expected to more than double it.
_PLAIN_WORTH, _PLAIN_WORTH_DOUBLED = 0.97, 0.9


class Placements(Protocol):
    """Of one model on one machine. ctx: what was asked for. job: None for one answer, as fast as can be."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def ctx(self) -> int | None: ...

    @property
    def job(self) -> JobShape | None: ...

    @property
    def memory(self) -> Memory: ...

    def placed(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """The fastest with room for so many tokens of so many sequences; None where none fits."""
        ...

    def refusal(self) -> DoesNotFitError:
        """Where nothing fits: what is missing, and the least that would do."""
        ...

    def fixes(self) -> list[str]:
        """Where nothing fits: flags and commands, each of which would help alone."""
        ...


def best_plan(of: Placements) -> Plan:
    """The longest context that costs little of the speed, or the one that was asked for, placed as fast as can be.

    Raises DoesNotFitError.
    """
    if of.job is not None:
        return _best_for(of, of.job)
    possible = contexts(of.shape, of.ctx)
    enough = min(CHAT_CTX, possible[0])
    plans = [runnable(of, ctx, 1, ctx) for ctx in possible if ctx >= enough]
    fitting = [plan for plan in plans if plan is not None]
    if fitting:
        return next(plan for plan in fitting if plan.decode_s * _WORTH <= fitting[-1].decode_s)
    shorter = (runnable(of, ctx, 1, ctx) for ctx in possible if ctx < enough)
    best = next((plan for plan in shorter if plan is not None), None)
    if best is None:
        raise of.refusal()
    return best


def _best_for(of: Placements, job: JobShape) -> Plan:
    """As many sequences as give the most tokens a second: each takes room from the weights."""
    longest = of.ctx or min(job.longest, of.shape.default_ctx)
    counts = [job.sequences]
    while counts[-1] > 1:
        counts.append(counts[-1] * 3 // 4)
    amounts = ((count, max(longest, count * job.tokens)) for count in counts)
    plans = [plan for amount in amounts if (plan := runnable(of, longest, *amount)) is not None]
    if not plans:
        raise of.refusal()
    return max(plans, key=lambda plan: plan.decode_tok_s)


def runnable(of: Placements, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
    """As `placed` has it; None too where the model would have to be packed for it first, and memory is too small."""
    plan, packing = of.placed(ctx, sequences, kv_tokens), of.shape.packing
    if plan is None or packing is None or (packing.is_for_streaming and plan.is_whole):
        return plan
    return plan if of.memory.program_bytes + packing.num_bytes <= of.memory.ram_bytes else None


def shorter_contexts(of: Placements) -> list[str]:
    """The flag for the longest context below the one that was asked for with which it would fit; [] where none does."""
    if of.ctx is None or of.job is not None:
        return []
    shorter = (ctx for ctx in contexts(of.shape, None) if ctx < of.ctx)
    return [f"--ctx {ctx}" for ctx in shorter if runnable(of, ctx, 1, ctx) is not None][:1]


def packing_commands(of: Placements, packed_bytes: int) -> list[str]:
    """What packs the model ahead of time, so that it then runs in memory as small as this; [] where nothing does."""
    packing = of.shape.packing
    helps = packing is not None and packing.command and packed_bytes <= of.memory.ram_bytes
    return [packing.command] if packing is not None and helps else []


def least_ctx(of: Placements) -> int:
    """The shortest context that would do."""
    if of.job is not None:
        return of.ctx or min(of.job.longest, of.shape.default_ctx)
    return contexts(of.shape, of.ctx)[-1]


def contexts(shape: ModelShape, asked: int | None) -> list[int]:
    """Those that may be taken, the longest first."""
    if asked is not None:
        return [asked]
    found = [shape.default_ctx]
    while found[-1] > LEAST_CTX:
        found.append(max(LEAST_CTX, 1 << ((found[-1] - 1).bit_length() - 1)))
    return found


@dataclass(frozen=True)
class _Choice:
    """One placement of the search."""

    resident: frozenset[str]
    streamed: tuple[BlockShape, ...]  # in the order of a forward
    ring_bytes: int

    @property
    def streamed_bytes(self) -> int:
        return sum(block.num_bytes for block in self.streamed)


@dataclass(frozen=True)
class Search:
    """All plans of a model in the memory of a machine without a GPU; `best` is the answer."""

    shape: ModelShape
    memory: Memory
    rates: Rates
    ctx: int | None = None  # asked for
    job: JobShape | None = None  # None: one answer, as fast as can be
    corrections: Corrections = field(default_factory=Corrections)  # of earlier runs
    harm: Mapping[str, float] = field(default_factory=dict)  # of each block, where it may be left out while guessing
    draft_tokens: int = DRAFT_TOKENS  # that are guessed at once then, at most

    def best(self) -> Plan:
        """As `best_plan` has it. Raises DoesNotFitError naming the least memory that would do."""
        return self._best

    @cached_property
    def _best(self) -> Plan:
        return best_plan(self)

    @property
    def room(self) -> Memory:
        """Where blocks stay, and how much of that there is."""
        return self.memory

    def with_room(self) -> Search:
        """As if there were as much of it as may be wanted."""
        return replace(self, memory=replace(self.memory, ram_bytes=1 << 62))

    def least_bytes(self) -> int:
        """The least memory in which the model runs, with the context that was asked for, packed in it first."""
        packing = self.shape.packing
        streamed = sum(self._least_owners().values())
        if packing is None:
            return streamed
        least = max(streamed, self.memory.program_bytes + packing.num_bytes)
        owners = self._owners(least_ctx(self), 1, self.shape.batch_rows[-1], 0, stores_embedding=False)
        return min(least, sum(owners.values()) + self._streamable_bytes) if packing.is_for_streaming else least

    def _least_owners(self) -> dict[str, int]:
        """Of the least memory in which the model runs once it is packed."""
        ctx, rows = least_ctx(self), self.shape.batch_rows[-1]
        owners = self._owners(ctx, 1, rows, 0, stores_embedding=True)
        # To keep a block takes more room than it saves in the ring, but where it is the last of its kind or the head.
        kinds = (self.shape.blocks[::2], self.shape.blocks[1::2], (self.shape.head,))
        needed_bytes = []
        for kept in itertools.product((True, False), repeat=len(kinds)):
            names = {block.name for kind, stays in zip(kinds, kept, strict=True) if stays for block in kind}
            choice = self._choice(names)
            needed_bytes.append(self._streamable_bytes - choice.streamed_bytes + choice.ring_bytes)
        streams = min(needed_bytes) + self._amounts()[-1][1] * self.shape.state_bytes
        return {**owners, "blocks": min(streams, self._streamable_bytes)}

    def _amounts(self) -> list[tuple[int, int]]:
        """How many tokens are computed at once, and how many pass between two reads: the best first."""
        rows = self.shape.batch_rows
        return [*((count, max(count, PASS_TOKENS)) for count in rows), (rows[-1], rows[-1])]

    def placed(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """Computing fewer tokens at once is better than looking the embedding's rows up on the disk, and that is better
        than reading blocks at every step; else the most that fit."""
        for stores, rows in itertools.product(self._embeddings, self.shape.batch_rows):
            owners = self._owners(kv_tokens, sequences, rows, 0, stores)
            if (choice := self._everything(self._room(owners))) is not None:
                return self._plan(ctx, sequences, kv_tokens, (rows, rows), owners, choice)
        for rows, most_tokens in self._amounts():
            pass_tokens = min(most_tokens, max(kv_tokens, rows))
            owners = self._owners(kv_tokens, sequences, rows, pass_tokens, True)
            if (choice := self._some(self._room(owners))) is not None:
                plain, *others = (
                    self._plan(ctx, sequences, kv_tokens, (rows, pass_tokens), owners, each)
                    for each in (choice, *(self._for_guessing(self._room(owners)) if sequences == 1 else ()))
                )
                return self._fastest(plain, others)
        return None

    def _fastest(self, plain: Plan, others: Sequence[Plan]) -> Plan:
        """Of the best plan without guesses and such as may be better with them."""
        best, most = plain, rate(plain, self.harm, self.draft_tokens)
        least = plain.decode_tok_s
        for plan in others:
            guessed = rate(plan, self.harm, self.draft_tokens)
            worth = _PLAIN_WORTH if guessed < 2 * least else _PLAIN_WORTH_DOUBLED
            if guessed > most and plan.decode_tok_s >= worth * least:
                best, most = plan, guessed
        return best

    @property
    def _embeddings(self) -> tuple[bool, ...]:
        """Whether its rows may be looked up on the disk: not where the head reads all of them at every step."""
        return (False,) if self.shape.is_tied else (False, True)

    def _room(self, owners: Mapping[str, int]) -> int:
        return self.memory.ram_bytes - sum(owners.values())

    def _owners(
        self, kv_tokens: int, sequences: int, rows: int, pass_tokens: int, stores_embedding: bool
    ) -> dict[str, int]:
        """What every placement needs. stores_embedding: on the disk, where it may be."""
        shape, logit_rows = self.shape, max(LOGIT_ROWS, 2 * sequences)
        looks_up = stores_embedding and not shape.is_tied
        at_once = min(rows, max(kv_tokens, sequences))  # a short context never fills a chunk
        activations = at_once * shape.row_bytes + pass_tokens * shape.state_bytes + logit_rows * shape.logits_bytes
        if looks_up:  # rows from the disk pass through torch: as they are read, in fp32, and as they are wanted
            activations += 4 * at_once * shape.state_bytes
        return {
            "program": self.memory.program_bytes,
            "kv": shape.kv_bytes(kv_tokens, sequences),
            "activations": activations,
            "embedding": 0 if looks_up else shape.embed.num_bytes,
            "draft": shape.draft_bytes + shape.fork_bytes,
        }

    def _everything(self, room_bytes: int) -> _Choice | None:
        if self._streamable_bytes > room_bytes:
            return None
        return self._choice({block.name for block in (*self.shape.blocks, self.shape.head)})

    def _choice(self, resident: set[str]) -> _Choice:
        streamed = tuple(block for block in (*self.shape.blocks, self.shape.head) if block.name not in resident)
        return _Choice(frozenset(resident), streamed, ring_bytes([block.num_bytes for block in streamed], ALIGN_BYTES))

    def _some(self, room_bytes: int) -> _Choice | None:
        """What stays in the room that is left, so that as little as possible is read at every step.

        Every number of attention blocks, with as many MLP blocks as then have room beside a ring for the rest.
        """
        attention, mlp, head = self.shape.blocks[::2], self.shape.blocks[1::2], self.shape.head
        best = None
        for kept_head, count in itertools.product((head.num_bytes, 0), range(len(attention) + 1)):
            kept_bytes = kept_head + count * attention[0].num_bytes
            for more in range(min((room_bytes - kept_bytes) // mlp[0].num_bytes, len(mlp)), -1, -1):
                streamed_bytes = self._streamable_bytes - kept_bytes - more * mlp[0].num_bytes
                if best is not None and streamed_bytes >= best.streamed_bytes:
                    break
                resident = {head.name} if kept_head else set()
                resident |= _spread(attention, count) | _spread(mlp, more)
                choice = self._choice(resident)
                if kept_bytes + more * mlp[0].num_bytes + choice.ring_bytes <= room_bytes:
                    best = choice
                    break
        return best

    def _for_guessing(self, room_bytes: int) -> Iterator[_Choice]:
        """Head and blocks that guess well together, in the same room: of the attention blocks and of the MLPs those
        without which the most is lost."""
        attention, mlp, head = self.shape.blocks[::2], self.shape.blocks[1::2], self.shape.head
        for count in range(len(attention) + 1) if self.harm else ():
            kept_bytes = head.num_bytes + count * attention[0].num_bytes
            for more in range(min((room_bytes - kept_bytes) // mlp[0].num_bytes, len(mlp)), -1, -1):
                resident = {head.name} | needed(attention, count, self.harm) | needed(mlp, more, self.harm)
                choice = self._choice(resident)
                if kept_bytes + more * mlp[0].num_bytes + choice.ring_bytes <= room_bytes:
                    yield choice
                    break

    @property
    def _streamable_bytes(self) -> int:
        return self.shape.num_bytes - self.shape.embed.num_bytes

    def _plan(
        self,
        ctx: int,
        sequences: int,
        kv_tokens: int,
        amount: tuple[int, int],
        owners: Mapping[str, int],
        choice: _Choice,
    ) -> Plan:
        """amount: as in `_amounts`."""
        rows, pass_tokens = amount
        shape, memory = self.shape, self.memory
        placed = [Placed(shape.embed.name, shape.embed.num_bytes, "ram" if owners["embedding"] else "disk", "cpu")]
        for block in (*shape.blocks, shape.head):
            placed.append(
                Placed(block.name, block.num_bytes, "ram" if block.name in choice.resident else "disk", "cpu")
            )
        kept_bytes = sum(block.num_bytes for block in placed if block.tier == "ram")
        ram = {**owners, "weights": kept_bytes, "staging": choice.ring_bytes}
        del ram["embedding"]
        streamed_bytes = choice.streamed_bytes
        return Plan(
            shape=shape,
            ctx=ctx,
            kv_tokens=kv_tokens,
            sequences=sequences,
            blocks=tuple(placed),
            ring_bytes=choice.ring_bytes,
            batch_rows=rows,
            pass_tokens=pass_tokens,
            many_rows=NEVER,
            ledger={
                "ram": {owner: count for owner, count in ram.items() if count},
                "disk": {"weights": streamed_bytes, "embedding": shape.embed.num_bytes - owners["embedding"]},
            },
            limits={"ram": memory.ram_bytes},
            prompt_tokens=max(1, min(PROMPT_TOKENS, ctx // 2)),
            costs=StepCosts(shape, self.rates, streamed_bytes, len(choice.streamed), pass_tokens, self.corrections),
        )

    def refusal(self) -> DoesNotFitError:
        shape, least, owners = self.shape, self.least_bytes(), self._least_owners()
        packed_bytes = sum(owners.values())
        packing_bytes = 0 if shape.packing is None else self.memory.program_bytes + shape.packing.num_bytes
        if packed_bytes < least < packing_bytes:
            reason = f"with everything in memory; to pack it, so that less would do, needs {amount(packing_bytes)}"
            return does_not_fit(shape, "memory", self.memory.ram_bytes, least, reason, self.fixes())
        if shape.packing is not None and least > packed_bytes:
            return cannot_be_packed(shape.name, shape.weights, self.memory, shape.packing, self.fixes(), packed_bytes)
        largest = max((*shape.blocks, shape.head), key=lambda block: block.num_bytes)
        named = {
            "the program": owners["program"],
            f"{least_ctx(self)} tokens of context": owners["kv"],
            "what is being computed": owners["activations"],
            "the embedding": owners["embedding"],
            f"blocks on their way (the largest block, {largest.name}: {amount(largest.num_bytes)})": owners["blocks"],
        }
        reason = f"even where all blocks are streamed from the disk: {parts(named)}"
        return does_not_fit(shape, "memory", self.memory.ram_bytes, least, reason, self.fixes())

    def fixes(self) -> list[str]:
        packed_bytes = sum(self._least_owners().values())
        found = more_of("--ram", self.least_bytes(), self.memory.most_bytes)
        return [*found, *packing_commands(self, packed_bytes), *shorter_contexts(self)] or [SMALLER]


def fits_whole(search: Search) -> bool:
    """Whether the best plan leaves every block where it is computed fastest."""
    plan = fitting(search)
    return plan is not None and plan.is_whole


def is_better(other: Search, own: Search) -> bool:
    """Of a model in another form, of fewer bytes, beside its own, which does not fit as a whole."""
    plan, own_plan = fitting(other), fitting(own)
    if plan is None and own_plan is None:
        return other.least_bytes() < own.least_bytes()
    if plan is None or own_plan is None:
        return own_plan is None
    return plan.ctx >= own_plan.ctx and plan.streamed_bytes <= own_plan.streamed_bytes


def fitting(search: Search) -> Plan | None:
    """The best plan; None where nothing fits."""
    try:
        return search.best()
    except DoesNotFitError:
        return None


def _spread(blocks: tuple[BlockShape, ...], count: int) -> set[str]:
    """The names of so many of the blocks, at even distances."""
    return {blocks[(2 * index + 1) * len(blocks) // (2 * count)].name for index in range(count)}
