"""The placements of a model in the memory of a machine without a GPU, and over its disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

from localllm.offload.placement import LEAST_SLOTS, NEVER, BlockPlacement, ExpertSlots, Tier
from localllm.offload.planner.costs import PASS_TOKENS, Costs, Work
from localllm.offload.planner.fit_errors import amount, parts
from localllm.offload.planner.machine import Machine
from localllm.offload.planner.model_shape import BlockShape, ModelShape
from localllm.offload.planner.plan import ADAPTERS, Plan
from localllm.offload.streaming.ring import ALIGN_BYTES, ring_bytes

PROMPT_TOKENS = 512  # of the prompt whose first token is predicted
LOGIT_ROWS = 16  # answers that a step may compute the logits of


@dataclass(frozen=True)
class _Choice:
    """One placement: the resident and the streamed blocks, in the order of a forward pass."""

    resident: frozenset[str]
    streamed: tuple[BlockShape, ...]
    ring_bytes: int

    @property
    def streamed_bytes(self) -> int:
        return sum(block.num_bytes for block in self.streamed)


@dataclass(frozen=True)
class HostPlacements:
    shape: ModelShape
    machine: Machine

    def best(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """Return the fastest placement with memory for so many tokens of so many sequences; None where none fits.

        Computing fewer tokens at once is better than looking the embedding's rows up on the disk, and that is better
        than reading blocks at every step; else the most that fit stay.
        """
        embeddings = (False,) if self.shape.is_tied else (False, True)  # a tied head reads all rows at every step
        for stores, rows in itertools.product(embeddings, self.shape.batch_rows):
            owners = self._owners(kv_tokens, sequences, rows, 0, stores_embedding=stores)
            if self.shape.streamable_bytes <= self._free(owners):
                whole = self._choice({block.name for block in self._streamable})
                return self._plan(ctx, sequences, kv_tokens, (rows, rows), owners, whole)
        if self.shape.mixtures:
            return self._with_slots(ctx, sequences, kv_tokens)
        for rows, most_tokens in self._chunks():
            pass_tokens = min(most_tokens, max(kv_tokens, rows))
            owners = self._owners(kv_tokens, sequences, rows, pass_tokens, stores_embedding=True)
            if (choice := self._streaming_least(self._free(owners))) is not None:
                return self._plan(ctx, sequences, kv_tokens, (rows, pass_tokens), owners, choice)
        return None

    def _with_slots(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """Return the placement in which experts come from the disk into slots, as many as there is memory for."""
        for rows, most_tokens in self._chunks():
            pass_tokens = min(most_tokens, max(kv_tokens, rows))
            owners = self._owners(kv_tokens, sequences, rows, pass_tokens, stores_embedding=True)
            slots = self._slots(self._free(owners))
            if sum(slots.values()) >= self._least_slots:
                whole = self._choice({block.name for block in self._streamable})
                return self._plan(ctx, sequences, kv_tokens, (rows, pass_tokens), owners, whole, slots)
        return None

    @property
    def _least_slots(self) -> int:
        """The fewest slots: for the experts of a token in each block, or of two tokens where blocks are few."""
        active = [experts.active for _, experts in self.shape.mixtures]
        total = sum(experts.count for _, experts in self.shape.mixtures)
        return min(total, max(len(active) * LEAST_SLOTS, 2 * max(active)))

    def _slots(self, free_bytes: int) -> dict[str, int]:
        """Return how many slots the experts of each block have in the memory that all else leaves: of a few large ones
        some blocks have one more."""
        free_bytes -= self.shape.streamable_bytes - self.shape.expert_bytes
        total = sum(experts.count for _, experts in self.shape.mixtures)
        slots = min(max(0, free_bytes) // self._record_bytes, total)
        counts = (experts.count for _, experts in self.shape.mixtures)
        ends = [slots * count // total for count in itertools.accumulate(counts, initial=0)]
        pairs = zip(self.shape.mixtures, itertools.pairwise(ends), strict=True)
        return {block.name: end - begin for (block, _), (begin, end) in pairs}

    @property
    def _record_bytes(self) -> int:
        """The bytes of a slot, which takes an expert of any block."""
        return max(experts.num_bytes for _, experts in self.shape.mixtures)

    def least_bytes(self, ctx: int) -> int:
        """Return the least memory in which the model runs with this context, packed in it first."""
        packing = self.shape.packing
        streamed = sum(self._least_owners(ctx).values())
        if packing is None:
            return streamed
        least = max(streamed, self.machine.memory.program_bytes + packing.num_bytes)
        owners = self._owners(ctx, 1, self.shape.batch_rows[-1], 0, stores_embedding=False)
        return min(least, sum(owners.values()) + self.shape.streamable_bytes) if packing.is_for_streaming else least

    def least_vram_bytes(self, _ctx: int) -> int:
        return 0

    def reason(self, ctx: int, *, of_vram: bool = False) -> str:
        """Return what the least memory is needed for."""
        assert not of_vram
        owners = self._least_owners(ctx)
        if self.shape.mixtures:
            blocks, how = "what every token reads, and a few experts", "where experts are read from the disk"
        else:
            largest = max(self._streamable, key=lambda block: block.num_bytes)
            blocks = f"blocks on their way (the largest block, {largest.name}: {amount(largest.num_bytes)})"
            how = "where all blocks are streamed from the disk"
        named = {
            "the program": owners["program"],
            f"{ctx} tokens of context": owners["kv"] + owners["states"],
            "what is being computed": owners["activations"],
            "the embedding": owners["embedding"],
            ADAPTERS: owners[ADAPTERS],
            blocks: owners["blocks"],
        }
        return f"even {how}: {parts(named)}"

    def _least_owners(self, ctx: int) -> dict[str, int]:
        owners = self._owners(ctx, 1, self.shape.batch_rows[-1], 0, stores_embedding=True)
        passing_bytes = self._chunks()[-1][1] * self.shape.state_bytes
        if self.shape.mixtures:
            shared_bytes = self.shape.streamable_bytes - self.shape.expert_bytes
            streams = self._least_slots * self._record_bytes + passing_bytes
            return {**owners, "blocks": shared_bytes + streams}
        # A block that stays takes more than it saves in the ring, but where it is the last of its kind or the head.
        kinds = (self.shape.blocks[::2], self.shape.blocks[1::2], (self.shape.head,))
        needed_bytes = []
        for stay in itertools.product((True, False), repeat=len(kinds)):
            names = {block.name for kind, stays in zip(kinds, stay, strict=True) if stays for block in kind}
            choice = self._choice(names)
            needed_bytes.append(self.shape.streamable_bytes - choice.streamed_bytes + choice.ring_bytes)
        streams = min(needed_bytes) + passing_bytes
        return {**owners, "blocks": min(streams, self.shape.streamable_bytes)}

    @property
    def _streamable(self) -> tuple[BlockShape, ...]:
        return (*self.shape.blocks, self.shape.head)

    def _chunks(self) -> list[tuple[int, int]]:
        """Return how many tokens are computed at once, and how many pass between two reads: the best first."""
        rows = self.shape.batch_rows
        return [*((count, max(count, PASS_TOKENS)) for count in rows), (rows[-1], rows[-1])]

    def _free(self, owners: Mapping[str, int]) -> int:
        return self.machine.memory.ram_bytes - sum(owners.values())

    def _owners(
        self, kv_tokens: int, sequences: int, rows: int, pass_tokens: int, *, stores_embedding: bool
    ) -> dict[str, int]:
        """Return what every placement needs. stores_embedding: on the disk, where it may be."""
        shape, logit_rows = self.shape, max(LOGIT_ROWS, 2 * sequences)
        looks_up = stores_embedding and not shape.is_tied
        at_once = min(rows, max(kv_tokens, sequences))  # a short context never fills a chunk
        activations = at_once * shape.row_bytes + pass_tokens * shape.state_bytes + logit_rows * shape.logits_bytes
        if looks_up:  # rows from the disk pass through torch: as they are read, in fp32, and as they are wanted
            activations += 4 * at_once * shape.state_bytes
        return {
            "program": self.machine.memory.program_bytes,
            "kv": shape.kv_bytes(kv_tokens, sequences),
            "states": sequences * shape.recurrent_bytes,
            "activations": activations,
            "embedding": 0 if looks_up else shape.embed.num_bytes,
            "draft": shape.draft_bytes,
            ADAPTERS: shape.adapter_bytes,
        }

    def _choice(self, resident: set[str]) -> _Choice:
        streamed = tuple(block for block in self._streamable if block.name not in resident)
        return _Choice(frozenset(resident), streamed, ring_bytes([block.num_bytes for block in streamed], ALIGN_BYTES))

    @cached_property
    def _evenly(self) -> Callable[[bool, int, int], _Choice]:
        """Return what makes the placement in which the head stays or not, and so many attention and MLP blocks. Each is
        made once: every context asks for the same ones."""
        attention, mlp, head = self.shape.blocks[::2], self.shape.blocks[1::2], self.shape.head

        @cache
        def choice(keeps_head: bool, attention_count: int, mlp_count: int) -> _Choice:
            resident = {head.name} if keeps_head else set()
            return self._choice(resident | _spread(attention, attention_count) | _spread(mlp, mlp_count))

        return choice

    def _streaming_least(self, free_bytes: int) -> _Choice | None:
        """Return the placement in which the least is read at every step.

        Tried is every number of attention blocks, with as many MLP blocks as then fit beside a ring for the rest.
        """
        attention, mlp, head = self.shape.blocks[::2], self.shape.blocks[1::2], self.shape.head
        # Those of a hybrid differ: as many of the largest ones fit in any case.
        attention_bytes, mlp_bytes = (max(block.num_bytes for block in kind) for kind in (attention, mlp))
        best = None
        for head_bytes, count in itertools.product((head.num_bytes, 0), range(len(attention) + 1)):
            kept_bytes = head_bytes + count * attention_bytes
            for more in range(min((free_bytes - kept_bytes) // mlp_bytes, len(mlp)), -1, -1):
                streamed_bytes = self.shape.streamable_bytes - kept_bytes - more * mlp_bytes
                if best is not None and streamed_bytes >= best.streamed_bytes:
                    break
                choice = self._evenly(head_bytes > 0, count, more)
                if kept_bytes + more * mlp_bytes + choice.ring_bytes <= free_bytes:
                    best = choice
                    break
        return best

    def _plan(
        self,
        ctx: int,
        sequences: int,
        kv_tokens: int,
        chunk: tuple[int, int],
        owners: Mapping[str, int],
        choice: _Choice,
        slots: Mapping[str, int] = MappingProxyType({}),
    ) -> Plan:
        """chunk: as `_chunks` returns it. slots: of the experts of each block that come from the disk."""
        shape, machine, (rows, pass_tokens) = self.shape, self.machine, chunk
        embed = _placed(shape.embed, "ram" if owners["embedding"] else "disk")
        on_disk = {*slots, *(block.name for block in choice.streamed)}
        placed = (
            embed,
            *(_placed(b, "disk" if b.name in on_disk else "ram", slots.get(b.name)) for b in self._streamable),
        )
        pool_bytes = sum(slots[block.name] * experts.num_bytes for block, experts in shape.mixtures if slots)
        held_bytes = sum(block.held_bytes for block in placed) - pool_bytes
        resident_bytes = sum(block.num_bytes for block in placed if block.tier == "ram") + held_bytes
        ram = {**owners, "weights": resident_bytes, "experts": pool_bytes, "staging": choice.ring_bytes}
        del ram["embedding"]
        absent_bytes = shape.expert_bytes - pool_bytes if slots else 0
        work = Work(
            shape.block_bytes + shape.lm_head.num_bytes,
            choice.streamed_bytes,
            len(choice.streamed),
            missed_bytes=shape.missed_bytes(slots) if slots else 0,
            absent_bytes=absent_bytes,
        )
        return Plan(
            shape=shape,
            ctx=ctx,
            kv_tokens=kv_tokens,
            sequences=sequences,
            blocks=placed,
            ring_bytes=choice.ring_bytes,
            batch_rows=rows,
            pass_tokens=pass_tokens,
            many_rows=NEVER,
            ledger={
                "ram": {owner: count for owner, count in ram.items() if count},
                "disk": {
                    "weights": choice.streamed_bytes,
                    "experts": absent_bytes,
                    "embedding": embed.num_bytes - owners["embedding"],
                    "kv": shape.spilled_bytes(kv_tokens, sequences),
                },
            },
            limits={"ram": machine.memory.ram_bytes},
            prompt_tokens=max(1, min(PROMPT_TOKENS, ctx // 2)),
            costs=Costs(shape, machine.rates, None, work, pass_tokens, machine.corrections),
        )


def _placed(block: BlockShape, tier: Tier, slots: int | None = None) -> BlockPlacement:
    """slots: of its experts, None for all of them."""
    experts = None
    if block.experts is not None:
        count = block.experts.count
        experts = ExpertSlots(count, block.experts.num_bytes, count if slots is None else slots)
    return BlockPlacement(block.name, block.num_bytes, tier, "cpu", experts=experts)


def _spread(blocks: tuple[BlockShape, ...], count: int) -> set[str]:
    """Return the names of so many of the blocks, at even distances."""
    return {blocks[(2 * index + 1) * len(blocks) // (2 * count)].name for index in range(count)}
