"""The placements of a model over a GPU's memory, the host's and the disk.

The device holds what fits: attention first, whose keys and values it then has beside it. Of what it does not hold,
every number of blocks that the host computes, while the others are copied, is a candidate; so is letting the host have
the keys and values of some layers and compute their attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, cast

from localllm.offload.placement import GRAPH_ROOMS, LEAST_SLOTS, NEVER, BlockPlacement, ExpertSlots
from localllm.offload.planner.costs import PASS_TOKENS, Costs, Work
from localllm.offload.planner.fit_errors import parts
from localllm.offload.planner.host_placements import LOGIT_ROWS, PROMPT_TOKENS
from localllm.offload.planner.machine import SPLIT_KERNELS, Card, CardMemory, Machine
from localllm.offload.planner.model_shape import BlockShape, ModelShape
from localllm.offload.planner.plan import ADAPTERS, Plan, can_be_packed
from localllm.offload.streaming.ring import ring_bytes

_MIB = 1 << 20
_RAM_STEP = 64 * _MIB
_ALLOCATOR_BYTES = 2 * _MIB  # to which torch's allocator rounds a large run up
_KV_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the layers whose keys and values are on the device
_LEAST_SPLIT = 0.1  # of a block: less of it on the device does not pay for handing over
_STEP_ROWS = 16  # of a step at most: of many sequences, or of the last tokens of one prompt
_LEAST_SECTIONS, _SECTION_TOKENS = 4, 64  # of attention: pages of one sequence
_ENDS = 8  # launches of a step beside its blocks': the embedding, the head, and what draws a token
_SPLIT_MORE = 3  # times the launches that a mixture has of one token, at most, with its copies, in graphs of more rows
_ROWS_WORTH = 0.95  # fewer tokens at once are taken only where decoding gets so much faster

Head = Literal["resident", "computed"]
Kind = Literal["resident", "streamed", "computed", "split", "disk", "slotted"]
_PLACES: Mapping[Kind, tuple[Literal["vram", "ram", "disk"], Literal["gpu", "cpu", "split"]]] = {
    "resident": ("vram", "gpu"),
    "streamed": ("ram", "gpu"),
    "slotted": ("ram", "gpu"),
    "computed": ("ram", "cpu"),
    "split": ("ram", "split"),
    "disk": ("disk", "gpu"),
}


class _Counts(NamedTuple):
    """The number of attention or MLP blocks of each kind."""

    resident: int = 0
    computed: int = 0
    split: int = 0
    disk: int = 0
    streamed: int = 0
    slotted: int = 0


@dataclass(frozen=True)
class _Choice:
    """split_bytes: of the split block, on the device. slots: of each slotted block."""

    attention: _Counts
    mlp: _Counts
    head: Head
    split_bytes: int = 0
    slots: int = 0


@dataclass(frozen=True)
class _Amount:
    """What a plan must have memory for. kv_layers: the layers whose keys and values are on the device."""

    ctx: int
    sequences: int
    kv_tokens: int
    rows: int
    pass_tokens: int
    kv_layers: int


@dataclass(frozen=True)
class CardPlacements:
    shape: ModelShape
    machine: Machine

    def best(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """Return the fastest placement with memory for so many tokens of so many sequences; None where none fits."""
        found: tuple[float, _Amount, _Choice] | None = None
        for rows, pass_tokens in self._chunks(kv_tokens):
            if found is not None and rows == self.shape.batch_rows[-1]:  # only where nothing else fits
                break
            for layers in dict.fromkeys(round(share * self._num_layers) for share in _KV_SHARES):
                amount = _Amount(ctx, sequences, kv_tokens, rows, pass_tokens, layers)
                best = self._fastest(amount)
                if best is not None and self._is_best(best[1]):
                    return self._plan(amount, best[1])
                worth = 1.0 if found is None or found[1].rows == rows else _ROWS_WORTH
                if best is not None and (found is None or best[0] < worth * found[0]):
                    found = best[0], amount, best[1]
        return None if found is None else self._plan(*found[1:])

    def least_bytes(self, ctx: int) -> int:
        """Return the least of the host's memory with which the model runs, packed in it first: a multiple of 64 MiB."""
        memory, packing = self.machine.memory, self.shape.packing
        most = memory.program_bytes + 3 * self.shape.num_bytes + (packing.num_bytes if packing else 0)
        low, high = 0, most // _RAM_STEP + 1
        while low < high:
            middle = (low + high) // 2
            given = replace(memory, ram_bytes=middle * _RAM_STEP)
            plan = replace(self, machine=replace(self.machine, memory=given)).best(ctx, 1, ctx)
            if plan is None or not can_be_packed(plan, given):
                low = middle + 1
            else:
                high = middle
        return low * _RAM_STEP

    def least_vram_bytes(self, ctx: int) -> int:
        """Return the memory with which a model runs of which the device holds nothing, or only keys and values."""
        return min(map(self._least_vram_bytes, self._least_amounts(ctx)))

    def reason(self, ctx: int, *, of_vram: bool = False) -> str:
        """Return what the least memory is needed for."""
        if of_vram:
            amount = min(self._least_amounts(ctx), key=self._least_vram_bytes)
            owners = self._vram_owners(amount)
            named = {
                "CUDA": owners["context"],
                "a matrix product": owners["workspace"],
                "graphs of launches": owners["graphs"],
                f"{ctx} tokens of context": owners["kv"] + owners["states"],
                "what is being computed": owners["activations"] + owners["logits"],
                "two blocks on their way": self._least_ring_bytes(amount),
                ADAPTERS: owners[ADAPTERS],
            }
            return f"even where no block stays there: {parts(named)}"
        if self._has_slots:
            named = {
                "the program": self.machine.memory.program_bytes,
                "the embedding": self.shape.embed.num_bytes,
                "at most, all experts": self.shape.expert_bytes,
            }
            return f"a GPU's experts rest in memory (a CPU alone also reads them from the disk): {parts(named)}"
        named = {
            "the program": self.machine.memory.program_bytes,
            "the embedding": self.shape.embed.num_bytes,
            "two blocks that come from the disk": 2 * max(block.num_bytes for block in self.shape.blocks),
            f"at most, {ctx} tokens of context": self.shape.kv_bytes(ctx) + self.shape.recurrent_bytes,
        }
        return f"where what has no room streams from the disk: {parts(named)}"

    @property
    def _card(self) -> Card:
        assert self.machine.card is not None
        return self.machine.card

    @property
    def _has_slots(self) -> bool:
        """Whether experts that rest in the host's memory can have slots on the device: our kernels look for them."""
        return self.shape.can_slot and self._card.rates.is_fused

    @property
    def _num_layers(self) -> int:
        return len(self.shape.blocks) // 2

    def _chunks(self, kv_tokens: int) -> list[tuple[int, int]]:
        """Return how many tokens are computed at once, and how many pass while blocks are copied once; best first."""
        *_, least = rows = self.shape.batch_rows
        tried = dict.fromkeys(min(count, max(kv_tokens, least)) for count in (rows[0], rows[len(rows) // 2]))
        passing = min(PASS_TOKENS, kv_tokens)
        return [*((count, max(count, passing)) for count in tried if count > least), (least, least)]

    def _least_amounts(self, ctx: int) -> list[_Amount]:
        rows = self.shape.batch_rows[-1]
        return [_Amount(ctx, 1, ctx, rows, rows, layers) for layers in (0, self._num_layers)]

    def _least_vram_bytes(self, amount: _Amount) -> int:
        return sum(self._vram_owners(amount).values()) + self._least_ring_bytes(amount)

    def _least_ring_bytes(self, amount: _Amount) -> int:
        """Return the bytes of the ring where the device holds no block.

        MLPs follow each other where the host computes what is between them, attention and MLP in a forward of many
        tokens.
        """
        attention, mlp = self._block_bytes
        return mlp + (attention if amount.kv_layers == self._num_layers else max(attention, mlp))

    @cached_property
    def _loading_bytes(self) -> int:
        """The bytes of the ring through which all blocks come from the disk."""
        return ring_bytes([block.num_bytes for block in (*self.shape.blocks, self.shape.head)])

    @cached_property
    def _block_bytes(self) -> tuple[int, int]:
        """The sizes of the largest attention block and of the largest MLP: where layers differ, more is free."""
        attention, mlp = (max(block.num_bytes for block in self.shape.blocks[kind::2]) for kind in (0, 1))
        return attention, mlp

    def _fastest(self, amount: _Amount) -> tuple[float, _Choice] | None:
        """Return the choice that makes a step the shortest, and how long that is."""
        heads: tuple[Head, ...] = ("resident", "computed")
        found: list[tuple[float, _Choice]] = []
        for head in heads:
            found += self._of_head(amount, head)
            if found and self._is_best(found[-1][1]):
                return found[-1]
            if (slotted := self._with_slots(amount, head)) is not None:
                found.append((self._costs(amount, slotted).decode_s(amount.ctx // 2, amount.sequences), slotted))
        return min(found, key=lambda pair: pair[0], default=None)

    @property
    def _card_is_fast(self) -> bool:
        """True where a block is better on the device than with the host, beyond doubt."""
        return self._card.rates.matrix_gbs > 2 * self.machine.rates.matrix_gbs

    def _is_best(self, choice: _Choice) -> bool:
        """Return whether no other choice need be tried: such a device holds everything."""
        resident = choice.attention.resident + choice.mlp.resident
        return self._card_is_fast and choice.head == "resident" and resident == len(self.shape.blocks)

    def _of_head(self, amount: _Amount, head: Head) -> Iterator[tuple[float, _Choice]]:
        """Yield choices in which the host computes a part of what does not fit on the device.

        More of it takes the host longer and the link less long, so that a step is the shortest where the two meet.
        """
        bases = [self._without_computing(amount, head)]
        if not self._card_is_fast:
            bases.append(self._without_computing(amount, head, holds_blocks=False))
        for base in bases:
            if base is not None:
                yield from self._sharing(amount, base)

    def _sharing(self, amount: _Amount, base: _Choice) -> Iterator[tuple[float, _Choice]]:
        for split in dict.fromkeys((0, base.mlp.split)):
            free = base.mlp.streamed + base.mlp.split - split

            def choice(computed: int, split: int = split, free: int = free) -> _Choice:
                mlp = base.mlp._replace(computed=computed, split=split, streamed=free - computed)
                return replace(base, mlp=mlp, split_bytes=base.split_bytes if split else 0)

            @cache
            def step_s(computed: int) -> float:
                return self._costs(amount, choice(computed)).decode_s(amount.ctx // 2, amount.sequences)

            low, high = 0, free
            while low < high:
                middle = (low + high) // 2
                if step_s(middle) <= step_s(middle + 1):
                    high = middle
                else:
                    low = middle + 1
            yield step_s(low), choice(low)

    def _without_computing(self, amount: _Amount, head: Head, holds_blocks: bool = True) -> _Choice | None:
        """Return a choice with as many blocks as fit on the device, then in the host's memory.

        holds_blocks: whether the device holds any.
        """
        shape, layers, (attention, mlp) = self.shape, self._num_layers, self._block_bytes
        vram, ram = self._free_beside_vocabulary(amount, head)
        if ram < 0:
            return None
        whole = amount.kv_layers * (attention + _ALLOCATOR_BYTES) + layers * (mlp + _ALLOCATOR_BYTES)
        if holds_blocks and amount.kv_layers == layers and whole <= vram:
            return _Choice(_Counts(resident=layers), _Counts(resident=layers), head)
        if vram < self._least_ring_bytes(amount):
            return None
        # Where attention stays, MLPs follow each other through the ring; where those are smaller and stay, attention.
        vram = max(0, vram - 2 * max(attention, mlp)) if holds_blocks else 0
        resident = min(amount.kv_layers, vram // (attention + _ALLOCATOR_BYTES))
        vram -= resident * (attention + _ALLOCATOR_BYTES)
        resident_mlp = min(layers, vram // (mlp + _ALLOCATOR_BYTES))
        vram -= resident_mlp * (mlp + _ALLOCATOR_BYTES) + _ALLOCATOR_BYTES
        splits = shape.can_split and resident_mlp < layers and _LEAST_SPLIT * mlp < vram < mlp
        to_disk = self._to_disk(ram - mlp * splits, layers - resident, layers - resident_mlp)
        if to_disk is None or (any(to_disk) and self._has_slots):  # all experts of a block at every token: seconds
            return None
        disk, disk_mlp = to_disk
        if disk > amount.kv_layers - resident:  # the device computes these, and needs their keys and values
            return None
        computed = layers - amount.kv_layers
        splits = splits and disk_mlp < layers - resident_mlp
        return _Choice(
            _Counts(resident, computed, 0, disk, layers - resident - computed - disk),
            _Counts(resident_mlp, 0, int(splits), disk_mlp, layers - resident_mlp - disk_mlp - splits),
            head,
            vram if splits else 0,
        )

    def _with_slots(self, amount: _Amount, head: Head) -> _Choice | None:
        """Return the choice with everything on the device but experts, and as many slots for those as then fit: the
        same number for each block. The experts are in the host's memory, all of them."""
        shape, layers = self.shape, self._num_layers
        if not self._has_slots or amount.kv_layers < layers:
            return None
        vram, ram = self._free_beside_vocabulary(amount, head)
        mixtures = [block for block, _ in shape.mixtures]
        others = [block.num_bytes for block in shape.blocks if block.experts is None]
        shared_bytes = sum(others) + sum(block.shared_bytes for block in mixtures)
        vram -= shared_bytes + _ALLOCATOR_BYTES * (len(shape.blocks) + 1)
        vram -= ring_bytes([block.num_bytes for block in mixtures])  # they pass in prompts
        slots = vram // sum(experts.num_bytes for _, experts in shape.mixtures)
        slots = min(slots, *(experts.count for _, experts in shape.mixtures))
        least = max(LEAST_SLOTS, *(-(-2 * experts.active // len(mixtures)) for _, experts in shape.mixtures))
        if slots < least or sum(block.num_bytes for block in mixtures) > ram:
            return None
        mlp = _Counts(resident=layers - len(mixtures), slotted=len(mixtures))
        return _Choice(_Counts(resident=layers), mlp, head, slots=slots)

    def _free_beside_vocabulary(self, amount: _Amount, head: Head) -> tuple[int, int]:
        """Return the bytes for blocks on the device and on the host, without those of embedding and head."""
        shape = self.shape
        vram = self._card.memory.vram_bytes - sum(self._vram_owners(amount).values())
        ram = self.machine.memory.ram_bytes - sum(self._ram_owners(amount).values())
        vocabulary = [shape.head.num_bytes, *([shape.embed.num_bytes] if shape.is_tied else [])]
        if head == "resident":
            vram -= sum(vocabulary) + _ALLOCATOR_BYTES * len(vocabulary)
        else:
            ram -= sum(vocabulary)
        return vram, ram if shape.is_tied else ram - shape.embed.num_bytes

    def _costs(self, amount: _Amount, choice: _Choice) -> Costs:
        shape, (attention, mlp) = self.shape, self._block_bytes
        pairs = ((choice.attention, attention), (choice.mlp, mlp))
        head = shape.lm_head.num_bytes
        on_device, on_host = (head, 0) if choice.head == "resident" else (0, head)
        split = choice.mlp.split * mlp - choice.split_bytes
        streamed = sum((counts.streamed + counts.disk) * size for counts, size in pairs)
        blocks = sum(counts.resident + counts.streamed + counts.disk for counts, _ in pairs)
        computed = choice.attention.computed + choice.mlp.computed
        slotted = choice.mlp.slotted
        missed = shape.missed_bytes({block.name: choice.slots for block, _ in shape.mixtures}) if slotted else 0
        work = Work(
            device_bytes=on_device
            + streamed
            + sum((counts.resident + counts.slotted) * size for counts, size in pairs),
            device_blocks=blocks + choice.mlp.split + slotted,
            host_bytes=on_host + split + sum(counts.computed * size for counts, size in pairs),
            copied_bytes=streamed,
            disk_bytes=sum(counts.disk * size for counts, size in pairs),
            disk_runs=sum(counts.disk for counts, _ in pairs),
            passing_bytes=sum((sum(counts) - counts.resident) * size for counts, size in pairs),
            hops=min(computed, blocks + 1) + choice.mlp.split + slotted + (choice.head == "computed"),
            kv_share=amount.kv_layers / self._num_layers,
            missed_bytes=missed,
        )
        machine = self.machine
        return Costs(shape, machine.rates, self._card.rates, work, amount.pass_tokens, machine.corrections)

    def _to_disk(self, ram: int, num_attention: int, num_mlp: int) -> tuple[int, int] | None:
        """Return how many of the blocks beside the device do not fit into the host's memory either: MLPs first."""
        attention, mlp = self._block_bytes
        missing = num_attention * attention + num_mlp * mlp - ram
        if missing <= 0:
            return 0, 0
        largest = max(attention, mlp)
        missing += largest + (largest if num_mlp > 1 else attention)
        disk_mlp = min(num_mlp, -(-missing // mlp))
        missing -= disk_mlp * mlp
        disk = max(0, -(-missing // attention))
        return (disk, disk_mlp) if disk <= num_attention else None

    def _vram_owners(self, amount: _Amount) -> dict[str, int]:
        shape, card = self.shape, self._card.memory
        attention = _sections(min(amount.ctx, shape.table_tokens)) * _STEP_ROWS * shape.section_bytes
        return {
            "context": card.context_bytes,
            "kv": self._kv_bytes(amount)[0],
            "states": amount.sequences * shape.recurrent_bytes * amount.kv_layers // self._num_layers,
            "activations": amount.rows * shape.row_bytes + amount.pass_tokens * shape.state_bytes + attention,
            "logits": max(LOGIT_ROWS, 2 * amount.sequences) * shape.logits_bytes,
            "workspace": card.workspace_bytes,
            "graphs": graph_bytes(shape, card),
            "draft": shape.draft_bytes,
            ADAPTERS: shape.adapter_bytes,
        }

    def _ram_owners(self, amount: _Amount) -> dict[str, int]:
        shape, layers = self.shape, self._num_layers - amount.kv_layers
        return {
            "program": self.machine.memory.program_bytes,
            "kv": self._kv_bytes(amount)[1],
            "states": amount.sequences * shape.recurrent_bytes * layers // self._num_layers,
            "loading": self._loading_bytes,
        }

    def _kv_bytes(self, amount: _Amount) -> tuple[int, int]:
        """Return the bytes of keys and values on the device and on the host. Of layers whose attention the device
        computes, those rest on the host that it has no room for, and pass through a ring."""
        shape, of, here = self.shape, (amount.kv_tokens, amount.sequences), amount.kv_layers
        spilled, ring = shape.spilled_bytes(*of), shape.kv_ring_bytes(*of)
        resident = shape.kv_bytes(*of) - ring
        on_device = resident * here // self._num_layers + (ring if here else 0)
        return on_device, resident + spilled - resident * here // self._num_layers

    def _plan(self, amount: _Amount, choice: _Choice) -> Plan:
        shape, costs = self.shape, self._costs(amount, choice)
        pairs = zip(_interleaved(choice.attention), self._mlp_kinds(choice), strict=True)
        kinds = [kind for pair in pairs for kind in pair]
        blocks = [_placed(shape.embed, choice.head if shape.is_tied else "computed")]
        blocks += [_placed(block, kind, choice) for block, kind in zip(shape.blocks, kinds, strict=True)]
        blocks.append(_placed(shape.head, choice.head))
        vram, ram, disk = self._ledger(amount, blocks)
        return Plan(
            shape=shape,
            ctx=amount.ctx,
            kv_tokens=amount.kv_tokens,
            sequences=amount.sequences,
            blocks=tuple(blocks),
            ring_bytes=vram["staging"],
            batch_rows=amount.rows,
            pass_tokens=amount.pass_tokens if vram["staging"] else amount.rows,
            many_rows=_STEP_ROWS + 1 if choice.slots else costs.many_rows if vram["staging"] else NEVER,
            ledger={
                "vram": {owner: count for owner, count in vram.items() if count},
                "ram": {owner: count for owner, count in ram.items() if count},
                "disk": disk,
            },
            limits={"vram": self._card.memory.vram_bytes, "ram": self.machine.memory.ram_bytes},
            prompt_tokens=max(1, min(PROMPT_TOKENS, amount.ctx // 2)),
            costs=costs,
        )

    def _mlp_kinds(self, choice: _Choice) -> list[Kind]:
        if not choice.slots:
            return _interleaved(choice.mlp)
        return ["resident" if block.experts is None else "slotted" for block in self.shape.blocks[1::2]]

    def _ledger(
        self, amount: _Amount, blocks: Sequence[BlockPlacement]
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        vram, ram = self._vram_owners(amount), self._ram_owners(amount)
        on_device = [block.num_bytes for block in blocks if block.tier == "vram"]
        in_ram = [block.num_bytes for block in blocks if block.tier == "ram"]
        from_disk = [block.num_bytes for block in blocks if block.tier == "disk"]
        split = [block for block in blocks if block.exec == "split"]
        slotted = [block for block in blocks if block.is_slotted]
        vram["experts"] = sum(block.experts.slots * block.experts.num_bytes for block in slotted if block.experts)
        vram["weights"] = sum(on_device) + sum(block.device_bytes for block in split) - vram["experts"]
        vram["weights"] += sum(block.slotted_bytes for block in slotted)
        vram["slack"] = _ALLOCATOR_BYTES * (len(on_device) + len(split) + len(slotted) + bool(slotted))
        # The host computes a head that the device does not hold: of a prompt, too, only a few rows are wanted. Where it
        # computes what lies between two large blocks, these follow each other in a step of a few tokens.
        passing = [block for block in blocks[1:-1] if block.tier != "vram"]
        in_decode = [block for block in passing if block.exec == "gpu" and not block.is_slotted]
        vram["staging"] = max(ring_bytes([block.num_bytes for block in some]) for some in (passing, in_decode))
        # Of a split block the host has all, for prompts, and what it computes of it in memory of its own.
        ram["weights"] = sum(in_ram) + sum(block.num_bytes - block.device_bytes for block in split)
        ram["staging"] = ring_bytes(from_disk)
        return vram, ram, {"weights": sum(from_disk)}


def graph_bytes(shape: ModelShape, card: CardMemory) -> int:
    """Return what the driver takes for the graphs of a model's steps, wherever its blocks are, and of its drafts'."""
    launches = SPLIT_KERNELS * (len(shape.blocks) + shape.draft_blocks) + _SPLIT_MORE * shape.mixture_launches + _ENDS
    return int(GRAPH_ROOMS * launches * card.graph_node_bytes)


def _sections(ctx: int) -> int:
    """Return the number of pages that a GPU's attention has room for: 4, 8, 16, ..."""
    sections = _LEAST_SECTIONS
    while sections * _SECTION_TOKENS < ctx:
        sections *= 2
    return sections


def _placed(block: BlockShape, kind: Kind, choice: _Choice | None = None) -> BlockPlacement:
    tier, computed_by = _PLACES[kind]
    placed = BlockPlacement(block.name, block.num_bytes, tier, computed_by)
    if choice is not None and kind == "split":
        return replace(placed, device_bytes=choice.split_bytes)
    if choice is not None and kind == "slotted" and block.experts is not None:
        slots = ExpertSlots(block.experts.count, block.experts.num_bytes, choice.slots)
        return replace(placed, experts=slots)
    return placed


def _interleaved(counts: _Counts) -> list[Kind]:
    """Return so many blocks of each kind, spread evenly: copies arrive while others compute."""
    total, given = sum(counts), dict.fromkeys(counts._fields, 0)
    order: list[Kind] = []
    for place in range(1, total + 1):
        owed = {kind: place * count / total - given[kind] for kind, count in counts._asdict().items()}
        most = max(owed, key=lambda kind: owed[kind])
        given[most] += 1
        order.append(cast(Kind, most))
    return order
