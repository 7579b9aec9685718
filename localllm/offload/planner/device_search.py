"""The best placement of a model over a GPU's memory, the host's and the disk, by trying all that are worth a thought.

The device keeps what there is room for: attention first, whose keys and values it then has beside it. Of what it does
not keep, every number of blocks that the host computes, while the others are copied, is a candidate; so is letting the
host have the keys and values of some layers and compute their attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

from localllm.errors import DoesNotFitError
from localllm.offload.planner.calibration import Corrections
from localllm.offload.planner.costs import PASS_TOKENS
from localllm.offload.planner.device_costs import CardRates, DeviceCosts, Work
from localllm.offload.planner.fit_errors import SMALLER, cannot_be_packed, does_not_fit, more_of, parts
from localllm.offload.planner.plan import NEVER, BlockShape, JobShape, Memory, ModelShape, Placed, Plan, Rates
from localllm.offload.planner.search import (
    LOGIT_ROWS,
    PROMPT_TOKENS,
    Search,
    best_plan,
    least_ctx,
    packing_commands,
    runnable,
    shorter_contexts,
)
from localllm.offload.planner.speculation_gain import fork_bytes, needed, rate
from localllm.offload.streaming.ring import ring_bytes
from localllm.settings import DRAFT_TOKENS

_MIB = 1 << 20
_RAM_STEP = 64 * _MIB
_ALLOCATOR_BYTES = 2 * _MIB  # to which torch's allocator rounds a large run up
_KV_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the layers whose keys and values are on the device
_LEAST_SPLIT = 0.1  # of a block: less of it on the device does not pay for handing over
_FEWER_ROWS = 512  # at once, where the most are too many for a small card
_STEP_ROWS = 16  # of a step at most: of many sequences, or of the last tokens of one prompt
_SECTION_TOKENS = 256  # of the pages of one sequence
_ROWS_WORTH = 0.95  # fewer tokens at once are taken only where decoding gets so much faster

Head = Literal["resident", "computed"]
Kind = Literal["resident", "streamed", "computed", "split", "disk"]
_PLACES: Mapping[Kind, tuple[Literal["vram", "ram", "disk"], Literal["gpu", "cpu", "split"]]] = {
    "resident": ("vram", "gpu"),
    "streamed": ("ram", "gpu"),
    "computed": ("ram", "cpu"),
    "split": ("ram", "split"),
    "disk": ("disk", "gpu"),
}


@dataclass(frozen=True)
class CardMemory:
    """vram_bytes: what this process may hold on the card. context_bytes: what it holds there without a model, and
    workspace_bytes what a matrix product takes in passing. most_bytes: what it could hold now; total_bytes: the card's.
    """

    vram_bytes: int
    context_bytes: int
    workspace_bytes: int
    most_bytes: int
    total_bytes: int


class _Counts(NamedTuple):
    """Of the attention or the MLP blocks, how many are of each kind."""

    resident: int = 0
    computed: int = 0
    split: int = 0
    disk: int = 0
    streamed: int = 0


@dataclass(frozen=True)
class _Choice:
    """split_bytes: of the split block, on the device."""

    attention: _Counts
    mlp: _Counts
    head: Head
    split_bytes: int = 0


@dataclass(frozen=True)
class _Amount:
    """What a plan must have room for. kv_layers: whose keys and values are on the device."""

    ctx: int
    sequences: int
    kv_tokens: int
    rows: int
    pass_tokens: int
    kv_layers: int


@dataclass(frozen=True)
class DeviceSearch:
    """All plans of a model on a machine with a GPU; `best` is the answer."""

    shape: ModelShape
    memory: Memory
    card: CardMemory
    rates: Rates
    card_rates: CardRates
    ctx: int | None = None  # asked for
    job: JobShape | None = None
    corrections: Corrections = field(default_factory=Corrections)
    harm: Mapping[str, float] = field(default_factory=dict)  # as `Search` has it
    draft_tokens: int = DRAFT_TOKENS  # as well

    @property
    def room(self) -> CardMemory:
        """Where blocks stay, and how much of that there is."""
        return self.card

    def with_room(self) -> DeviceSearch:
        """As if there were as much of it as may be wanted."""
        return replace(self, card=replace(self.card, vram_bytes=1 << 62))

    def best(self) -> Plan:
        """As `best_plan` has it. Raises DoesNotFitError naming the least memory that would do."""
        return best_plan(self)

    def placed(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        found: tuple[float, _Amount, _Choice] | None = None
        for rows, pass_tokens in self._amounts(kv_tokens):
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

    def _amounts(self, kv_tokens: int) -> list[tuple[int, int]]:
        """How many tokens are computed at once, and how many pass while blocks are copied once: the best first."""
        *_, least = rows = self.shape.batch_rows
        tried = dict.fromkeys(
            min(count, rows[0], max(kv_tokens, least)) for count in (rows[0], _FEWER_ROWS, rows[len(rows) // 2])
        )
        passing = min(PASS_TOKENS, kv_tokens)
        return [*((count, max(count, passing)) for count in tried if count > least), (least, least)]

    def least_vram_bytes(self) -> int:
        """With which a model runs of which the device keeps nothing, or nothing but the keys and values."""
        return min(map(self._least_vram_bytes, self._least_amounts()))

    def _least_amounts(self) -> list[_Amount]:
        ctx, rows = least_ctx(self), self.shape.batch_rows[-1]
        return [_Amount(ctx, 1, ctx, rows, rows, layers) for layers in (0, self._num_layers)]

    def _least_vram_bytes(self, amount: _Amount) -> int:
        return sum(self._vram_owners(amount).values()) + self._least_ring_bytes(amount)

    def _least_ring_bytes(self, amount: _Amount) -> int:
        """Of the ring, where the device keeps no block. MLPs follow each other where the host computes what is between
        them, attention and MLP in a forward of many tokens."""
        attention, mlp = (block.num_bytes for block in self.shape.blocks[:2])
        return mlp + (attention if amount.kv_layers == self._num_layers else max(attention, mlp))

    def refusal(self) -> DoesNotFitError:
        shape, least = self.shape, self.least_vram_bytes()
        if least > self.card.vram_bytes:
            return does_not_fit(
                shape, "the GPU's memory", self.card.vram_bytes, least, self._vram_reason(), self.fixes()
            )
        packed_bytes, least = self._packed_ram_bytes(), self.least_ram_bytes()
        if shape.packing is not None and least > packed_bytes:
            return cannot_be_packed(shape.name, shape.weights, self.memory, shape.packing, self.fixes(), packed_bytes)
        named = {
            "the program": self.memory.program_bytes,
            "the embedding": shape.embed.num_bytes,
            "two blocks that come from the disk": 2 * max(block.num_bytes for block in shape.blocks),
            f"at most, {least_ctx(self)} tokens of context": shape.kv_bytes(least_ctx(self)),
        }
        reason = f"where what has no room streams from the disk: {parts(named)}"
        return does_not_fit(shape, "memory beside the GPU", self.memory.ram_bytes, least, reason, self.fixes())

    def fixes(self) -> list[str]:
        least = self.least_vram_bytes()
        if least > self.card.vram_bytes:
            return [*more_of("--vram", least, self.card.most_bytes), *shorter_contexts(self)] or ["--device cpu"]
        found = more_of("--ram", self.least_ram_bytes(), self.memory.most_bytes)
        return [*found, *packing_commands(self, self._packed_ram_bytes()), *shorter_contexts(self)] or [SMALLER]

    def _vram_reason(self) -> str:
        amount = min(self._least_amounts(), key=self._least_vram_bytes)
        owners = self._vram_owners(amount)
        named = {
            "CUDA": owners["context"],
            "a matrix product": owners["workspace"],
            f"{amount.ctx} tokens of context": owners["kv"],
            "what is being computed": owners["activations"] + owners["logits"],
            "two blocks on their way": self._least_ring_bytes(amount),
        }
        return f"even where no block stays there: {parts(named)}"

    def least_ram_bytes(self) -> int:
        """The least of the host's memory beside this card, the model packed in it first, to a sixteenth of a GiB."""
        ctx, packing = least_ctx(self), self.shape.packing
        most = self.memory.program_bytes + 3 * self.shape.num_bytes + (packing.num_bytes if packing else 0)
        low, high = 0, most // _RAM_STEP + 1
        while low < high:
            middle = (low + high) // 2
            if runnable(replace(self, memory=replace(self.memory, ram_bytes=middle * _RAM_STEP)), ctx, 1, ctx) is None:
                low = middle + 1
            else:
                high = middle
        return low * _RAM_STEP

    def _packed_ram_bytes(self) -> int:
        """The same where it is packed already."""
        return replace(self, shape=replace(self.shape, packing=None)).least_ram_bytes()

    @property
    def _num_layers(self) -> int:
        return len(self.shape.blocks) // 2

    def _fastest(self, amount: _Amount) -> tuple[float, _Choice] | None:
        """The choice that makes a step the shortest, and how long that is."""
        room = self._room(amount)
        heads: tuple[Head, ...] = ("resident", "computed")
        found: list[tuple[float, _Choice]] = []
        for head in heads:
            found += self._of_head(amount, room, head)
            if found and self._is_best(found[-1][1]):
                return found[-1]
        return min(found, key=lambda pair: pair[0], default=None)

    @property
    def _card_is_fast(self) -> bool:
        """Beyond doubt: a block that it has room for is better there than with the host."""
        return self.card_rates.matrix_gbs > 2 * self.rates.matrix_gbs

    def _is_best(self, choice: _Choice) -> bool:
        """Whether no other need be looked at: such a device holds everything."""
        kept = choice.attention.resident + choice.mlp.resident
        return self._card_is_fast and choice.head == "resident" and kept == len(self.shape.blocks)

    def _of_head(self, amount: _Amount, room: tuple[int, int], head: Head) -> Iterator[tuple[float, _Choice]]:
        """What the device has no room for, computed by the host in part: more of it takes the host longer and the link
        less long, so that a step is the shortest where the two meet."""
        bases = [self._without_computing(amount, room, head)]
        if not self._card_is_fast:
            bases.append(self._without_computing(amount, room, head, keeps=False))
        for base in bases:
            if base is not None:
                yield from self._sharing(amount, base)

    def _sharing(self, amount: _Amount, base: _Choice) -> Iterator[tuple[float, _Choice]]:
        for split in dict.fromkeys((0, base.mlp.split)):
            free = base.mlp.streamed + base.mlp.split - split

            def choice(computed: int, split: int = split, free: int = free) -> _Choice:
                mlp = base.mlp._replace(computed=computed, split=split, streamed=free - computed)
                return replace(base, mlp=mlp, split_bytes=base.split_bytes if split else 0)

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

    def _without_computing(
        self, amount: _Amount, room: tuple[int, int], head: Head, keeps: bool = True
    ) -> _Choice | None:
        """As many blocks as have room on the device, then in the host's memory; split: 1 where a block may be. keeps:
        whether the device keeps any."""
        attention, mlp = self.shape.blocks[0].num_bytes, self.shape.blocks[1].num_bytes
        layers, (vram, ram) = self._num_layers, room
        vocabulary = [self.shape.head.num_bytes, *([self.shape.embed.num_bytes] if self.shape.is_tied else [])]
        if head == "resident":
            vram -= sum(vocabulary) + _ALLOCATOR_BYTES * len(vocabulary)
        else:
            ram -= sum(vocabulary)
        if not self.shape.is_tied:
            ram -= self.shape.embed.num_bytes
        if ram < 0:
            return None
        whole = amount.kv_layers * (attention + _ALLOCATOR_BYTES) + layers * (mlp + _ALLOCATOR_BYTES)
        if keeps and amount.kv_layers == layers and whole <= vram:
            return _Choice(_Counts(resident=layers), _Counts(resident=layers), head)
        if vram < self._least_ring_bytes(amount):
            return None
        # Where attention stays, MLPs follow each other through the ring; where those are smaller and stay, attention.
        vram = max(0, vram - 2 * max(attention, mlp)) if keeps else 0
        kept = min(amount.kv_layers, vram // (attention + _ALLOCATOR_BYTES))
        vram -= kept * (attention + _ALLOCATOR_BYTES)
        kept_mlp = min(layers, vram // (mlp + _ALLOCATOR_BYTES))
        vram -= kept_mlp * (mlp + _ALLOCATOR_BYTES) + _ALLOCATOR_BYTES
        splits = self.shape.can_split and kept_mlp < layers and _LEAST_SPLIT * mlp < vram < mlp
        to_disk = self._to_disk(ram - mlp * splits, attention, mlp, layers - kept, layers - kept_mlp)
        if to_disk is None:
            return None
        disk, disk_mlp = to_disk
        computed = layers - amount.kv_layers
        if disk > amount.kv_layers - kept:  # the device computes what is from the disk, and needs its keys and values
            return None
        splits = splits and disk_mlp < layers - kept_mlp
        return _Choice(
            _Counts(kept, computed, 0, disk, layers - kept - computed - disk),
            _Counts(kept_mlp, 0, int(splits), disk_mlp, layers - kept_mlp - disk_mlp - splits),
            head,
            vram if splits else 0,
        )

    def _costs(self, amount: _Amount, choice: _Choice) -> DeviceCosts:
        shape, (attention, mlp) = self.shape, (self.shape.blocks[0].num_bytes, self.shape.blocks[1].num_bytes)
        pairs = ((choice.attention, attention), (choice.mlp, mlp))
        head = shape.lm_head.num_bytes
        on_device, on_host = (head, 0) if choice.head == "resident" else (0, head)
        split = choice.mlp.split * mlp - choice.split_bytes
        streamed = sum((counts.streamed + counts.disk) * size for counts, size in pairs)
        blocks = [counts.resident + counts.streamed + counts.disk for counts, _ in pairs]
        computed = choice.attention.computed + choice.mlp.computed
        work = Work(
            device_bytes=on_device + streamed + sum(counts.resident * size for counts, size in pairs),
            device_blocks=sum(blocks) + choice.mlp.split,
            host_bytes=on_host + split + sum(counts.computed * size for counts, size in pairs),
            copied_bytes=streamed,
            disk_bytes=sum(counts.disk * size for counts, size in pairs),
            disk_runs=sum(counts.disk for counts, _ in pairs),
            passing_bytes=sum((sum(counts) - counts.resident) * size for counts, size in pairs),
            hops=min(computed, sum(blocks) + 1) + choice.mlp.split + (choice.head == "computed"),
            kv_share=amount.kv_layers / self._num_layers,
        )
        return DeviceCosts(shape, self.rates, self.card_rates, work, amount.pass_tokens, self.corrections)

    def _to_disk(self, ram: int, attention: int, mlp: int, num_attention: int, num_mlp: int) -> tuple[int, int] | None:
        """How many of the blocks that the device does not keep do not fit into the host's memory either: MLPs first."""
        missing = num_attention * attention + num_mlp * mlp - ram
        if missing <= 0:
            return 0, 0
        largest = max(attention, mlp)
        missing += largest + (largest if num_mlp > 1 else attention)
        disk_mlp = min(num_mlp, -(-missing // mlp))
        missing -= disk_mlp * mlp
        disk = max(0, -(-missing // attention))
        return (disk, disk_mlp) if disk <= num_attention else None

    def _room(self, amount: _Amount) -> tuple[int, int]:
        """On the device and on the host, for blocks."""
        vram = self.card.vram_bytes - sum(self._vram_owners(amount).values())
        return vram, self.memory.ram_bytes - sum(self._ram_owners(amount).values())

    def _vram_owners(self, amount: _Amount) -> dict[str, int]:
        shape = self.shape
        logits = max(LOGIT_ROWS, 2 * amount.sequences) * shape.logits_bytes
        attention = _sections(amount.ctx) * _STEP_ROWS * shape.section_bytes
        kv = shape.kv_bytes(amount.kv_tokens, amount.sequences) * amount.kv_layers // self._num_layers
        return {
            "context": self.card.context_bytes,
            "kv": kv,
            "activations": amount.rows * shape.row_bytes + amount.pass_tokens * shape.state_bytes + attention,
            "logits": logits,
            "workspace": self.card.workspace_bytes,
            "draft": shape.draft_bytes + shape.fork_bytes,
        }

    def _ram_owners(self, amount: _Amount) -> dict[str, int]:
        shape = self.shape
        layers = self._num_layers - amount.kv_layers
        return {
            "program": self.memory.program_bytes,
            "kv": shape.kv_bytes(amount.kv_tokens, amount.sequences) * layers // self._num_layers,
            "loading": ring_bytes([block.num_bytes for block in (*shape.blocks, shape.head)]),
        }

    def _plan(self, amount: _Amount, choice: _Choice) -> Plan:
        evenly = self._arranged(amount, choice, {})
        if not self.harm or evenly.is_whole or amount.sequences > 1:
            return evenly
        plans = (evenly, self._arranged(amount, choice, self.harm))
        return max(plans, key=lambda plan: rate(plan, self.harm, self.draft_tokens))

    def _arranged(self, amount: _Amount, choice: _Choice, harm: Mapping[str, float]) -> Plan:
        """harm: of each block, where those that are near shall be the ones that guesses need; none: evenly."""
        shape, costs = self.shape, self._costs(amount, choice)
        of_attention = _kinds(shape.blocks[::2], choice.attention, harm)
        pairs = zip(of_attention, _kinds(shape.blocks[1::2], choice.mlp, harm), strict=True)
        kinds = [kind for pair in pairs for kind in pair]
        blocks = [_placed(shape.embed, choice.head if shape.is_tied else "computed")]
        blocks += [_placed(block, kind, choice.split_bytes) for block, kind in zip(shape.blocks, kinds, strict=True)]
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
            many_rows=costs.many_rows if vram["staging"] else NEVER,
            ledger={
                "vram": {owner: count for owner, count in vram.items() if count},
                "ram": {owner: count for owner, count in ram.items() if count},
                "disk": disk,
            },
            limits={"vram": self.card.vram_bytes, "ram": self.memory.ram_bytes},
            prompt_tokens=max(1, min(PROMPT_TOKENS, amount.ctx // 2)),
            costs=costs,
        )

    def _ledger(
        self, amount: _Amount, blocks: Sequence[Placed]
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        vram, ram = self._vram_owners(amount), self._ram_owners(amount)
        kept = [block.num_bytes for block in blocks if block.tier == "vram"]
        in_ram = [block.num_bytes for block in blocks if block.tier == "ram"]
        from_disk = [block.num_bytes for block in blocks if block.tier == "disk"]
        split = [block for block in blocks if block.exec == "split"]
        vram["weights"] = sum(kept) + sum(block.device_bytes for block in split)
        vram["slack"] = _ALLOCATOR_BYTES * (len(kept) + len(split))
        # The host computes a head that the device does not keep: of a prompt, too, only a few rows are wanted. Where it
        # computes what lies between two large blocks, these follow each other in a step of a few tokens.
        passing = [block for block in blocks[1:-1] if block.tier != "vram"]
        by_few = [block for block in passing if block.exec == "gpu"]
        vram["staging"] = max(ring_bytes([block.num_bytes for block in some]) for some in (passing, by_few))
        # Of a split block the host has all, for prompts, and what it computes of it in memory of its own.
        ram["weights"] = sum(in_ram) + sum(block.num_bytes - block.device_bytes for block in split)
        ram["staging"] = ring_bytes(from_disk)
        return vram, ram, {"weights": sum(from_disk)}


def _sections(ctx: int) -> int:
    """Of pages, over which a GPU's attention is shared out: room is made for 1, 4, 16, 64, ... of 256 tokens."""
    sections = 1
    while sections * _SECTION_TOKENS < ctx:
        sections *= 4
    return sections


def _placed(block: BlockShape, kind: Kind, split_bytes: int = 0) -> Placed:
    tier, computed_by = _PLACES[kind]
    return Placed(block.name, block.num_bytes, tier, computed_by, split_bytes if kind == "split" else 0)


def _kinds(blocks: Sequence[BlockShape], counts: _Counts, harm: Mapping[str, float]) -> list[Kind]:
    """Of each block."""
    if not harm:
        return _interleaved(counts)
    near, others = needed(blocks, counts.resident, harm), iter(_interleaved(counts._replace(resident=0)))
    return ["resident" if block.name in near else next(others) for block in blocks]


def _interleaved(counts: _Counts) -> list[Kind]:
    """So many of each kind, each as evenly as can be among the others: what is copied comes while others compute."""
    total, given = sum(counts), dict.fromkeys(counts._fields, 0)
    order: list[Kind] = []
    for place in range(1, total + 1):
        owed = {kind: place * count / total - given[kind] for kind, count in counts._asdict().items()}
        most = max(owed, key=lambda kind: owed[kind])
        given[most] += 1
        order.append(cast(Kind, most))
    return order


AnySearch = Search | DeviceSearch


def with_room_for_forks(search: AnySearch) -> AnySearch:
    """With room for another end of a sequence, unless the context would be shorter or a block leave for that alone."""
    forking = replace(search, shape=replace(search.shape, fork_bytes=fork_bytes(search.shape)))
    with suppress(DoesNotFitError):
        plan, own = forking.best(), search.best()
        if plan.ctx >= own.ctx and (plan.is_whole or not own.is_whole):
            return forking
    return search
