"""Where each block of a model rests and who computes it, found by search over measured rates; and how fast that is.

Layers are alike, so that all placements worth a thought are a few hundred: they are tried, in milliseconds. Knows sizes
of blocks and rates, no tensors; works before any weight is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from localllm.errors import DoesNotFitError
from localllm.offload.ring import ring_bytes

Tier = Literal["vram", "ram", "disk"]
Bound = Literal["memory", "compute", "disk", "link"]

GIB = 1 << 30
_MIB = 1 << 20
LEAST_CTX = 128
CHAT_CTX = 2048  # a conversation has room in it; a shorter context is taken only where this one does not fit
# Where nobody asked for a context: a longer one than this share of the best speed allows is not taken.
_WORTH = 0.9
PROMPT_TOKENS = 512  # of the prompt whose first token is predicted
_SMALLER = "choose a smaller model: localllm list --all"
_STEP_S = 0.7e-3  # of a step, beside its matrices and its attention: batch, rotations, sampling, events
_LOGIT_ROWS = 16  # answers that a step may compute the logits of
_COPY_SHARE = 0.24  # the page cache is copied at 10 GB/s beside a step that reads matrices at 42
_ATTENTION_SHARE = 0.75  # of what the matrices reach, attention reads its keys and values at
# Of a prompt, between two reads of what is streamed: to read 3 GB takes as long as to compute 270 tokens of a 7B model
# on 2 cores; beyond that little is gained, and the states of all these tokens must be kept.
_PASS_TOKENS = 2048


@dataclass(frozen=True)
class BlockShape:
    """num_bytes: in memory and on the disk, whole pages. flops: multiplications and additions of one token."""

    name: str
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides where it fits and how fast it is."""

    name: str
    weights: str
    kv: str
    embed: BlockShape
    blocks: tuple[BlockShape, ...]  # attention and MLP in turn
    head: BlockShape
    kv_bytes_per_token: int
    default_ctx: int  # where nobody asked
    row_bytes: int  # of what is between two blocks and inside one, for each token that is computed at once
    state_bytes: int  # of a token that waits between two blocks while others pass
    logits_bytes: int  # of one token's
    batch_rows: tuple[int, ...]  # how many tokens may be computed at once, the best first

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in (self.embed, *self.blocks, self.head))


@dataclass(frozen=True)
class Memory:
    """ram_bytes: what the process may hold. program_bytes: what it holds without a model. most_bytes: what it could
    hold now. total_bytes: what the machine has.
    """

    ram_bytes: int
    program_bytes: int
    most_bytes: int
    total_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """What this machine does, in 1e9 a second: bytes of one token's matrices and of the disk, operations of many."""

    matrix_gbs: float
    compute_gops: float
    disk_gbs: float
    cached_share: float = 0.0  # of what is streamed, that the page cache holds
    is_measured: bool = True  # and not a guess, for where nothing has to be chosen


@dataclass(frozen=True)
class JobShape:
    """Many prompts, of which so many may be answered at once; their tokens a second together are what counts.

    tokens: of one of them, prompt and answer, as a rule. longest: of the longest.
    """

    sequences: int
    tokens: int
    longest: int


@dataclass(frozen=True)
class Placed:
    """A block, where its bytes rest between two steps, and who computes it in a step of a few tokens.

    split: both, side by side; of its bytes in RAM the device has a copy of `device_bytes`.
    """

    name: str
    num_bytes: int
    tier: Tier
    exec: Literal["cpu", "gpu", "split"]
    device_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """ledger: the bytes of each owner in each tier. pass_tokens: of a prompt, between two reads of what is streamed."""

    shape: ModelShape
    ctx: int
    kv_tokens: int  # of all sequences together
    sequences: int  # that are answered at once, each with its share of them
    blocks: tuple[Placed, ...]
    ring_bytes: int
    batch_rows: int
    pass_tokens: int
    many_rows: int  # of a forward, from which on a device computes what else the host does
    ledger: Mapping[Tier, Mapping[str, int]]
    limits: Mapping[Tier, int]
    prompt_tokens: int  # of the prompt whose first token is predicted
    costs: StepCosts

    @property
    def decode_s(self) -> float:
        """Of a step behind that prompt, which gives every sequence a token."""
        return self.costs.decode_s(self.prompt_tokens, self.sequences)

    @property
    def decode_tok_s(self) -> float:
        """Of all sequences together."""
        return self.sequences / self.decode_s

    @property
    def ttft_s(self) -> float:
        """Until that prompt is read and its first token drawn."""
        return self.costs.prompt_s(self.prompt_tokens)

    @property
    def bound_by(self) -> Bound:
        return self.costs.bound_by(self.sequences)

    @property
    def streamed(self) -> tuple[str, ...]:
        """Names of the blocks that come from the disk at every step."""
        return tuple(block.name for block in self.blocks if block.tier == "disk")

    def total_bytes(self, tier: Tier) -> int:
        return sum(self.ledger.get(tier, {}).values())

    @property
    def free_bytes(self) -> int:
        """Of the fast memory's limit, what nobody has."""
        return self.limits["ram"] - self.total_bytes("ram")


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
    corrections: Mapping[Bound, float] = field(default_factory=dict)  # measured over predicted seconds, of earlier runs

    def best(self) -> Plan:
        """The longest context that costs little of the speed, or the one that was asked for, placed as fast as can be.

        Raises DoesNotFitError naming the least memory that would do.
        """
        if self.job is not None:
            return self._best_for(self.job)
        contexts = self._contexts()
        enough = min(CHAT_CTX, contexts[0])
        plans = [self._of_context(ctx) for ctx in contexts if ctx >= enough]
        fitting = [plan for plan in plans if plan is not None]
        if fitting:
            return next(plan for plan in fitting if plan.decode_s * _WORTH <= fitting[-1].decode_s)
        shorter = (self._of_context(ctx) for ctx in contexts if ctx < enough)
        best = next((plan for plan in shorter if plan is not None), None)
        if best is None:
            raise self._refusal()
        return best

    def _best_for(self, job: JobShape) -> Plan:
        """As many sequences as give the most tokens a second: each takes room from the weights."""
        longest = self.ctx or min(job.longest, self.shape.default_ctx)
        counts = [job.sequences]
        while counts[-1] > 1:
            counts.append(counts[-1] * 3 // 4)
        amounts = ((count, max(longest, count * job.tokens)) for count in counts)
        plans = [plan for amount in amounts if (plan := self._placed(longest, *amount)) is not None]
        if not plans:
            raise self._refusal()
        return max(plans, key=lambda plan: plan.decode_tok_s)

    def resident_bytes(self, ctx: int) -> int:
        """What the process holds where no block is streamed."""
        blocks = (*self.shape.blocks, self.shape.head)
        owners = self._owners(ctx, 1, self.shape.batch_rows[0], 0)
        return sum(owners.values()) + sum(block.num_bytes for block in blocks)

    def least_bytes(self) -> int:
        """The least memory in which the model runs, with the context that was asked for."""
        fixed = sum(self._owners(self._contexts()[-1], 1, self.shape.batch_rows[-1], 0).values())
        # To keep a block takes more room than it saves in the ring, but where it is the last of its kind or the head.
        kinds = (self.shape.blocks[::2], self.shape.blocks[1::2], (self.shape.head,))
        needed_bytes = []
        for kept in itertools.product((True, False), repeat=len(kinds)):
            names = {block.name for kind, stays in zip(kinds, kept, strict=True) if stays for block in kind}
            choice = self._choice(names)
            needed_bytes.append(self._streamable_bytes - choice.streamed_bytes + choice.ring_bytes)
        streams = min(needed_bytes) + self._amounts()[-1][1] * self.shape.state_bytes
        return fixed + min(streams, self._streamable_bytes)

    def _contexts(self) -> list[int]:
        """Those that may be taken, the longest first."""
        if self.ctx is not None:
            return [self.ctx]
        contexts = [self.shape.default_ctx]
        while contexts[-1] > LEAST_CTX:
            contexts.append(max(LEAST_CTX, 1 << ((contexts[-1] - 1).bit_length() - 1)))
        return contexts

    def _amounts(self) -> list[tuple[int, int]]:
        """How many tokens are computed at once, and how many pass between two reads: the best first."""
        rows = self.shape.batch_rows
        return [*((count, max(count, _PASS_TOKENS)) for count in rows), (rows[-1], rows[-1])]

    def _of_context(self, ctx: int) -> Plan | None:
        return self._placed(ctx, 1, ctx)

    def _placed(self, ctx: int, sequences: int, kv_tokens: int) -> Plan | None:
        """Computing fewer tokens at once is better than reading blocks at every step; else the most that fit."""
        for rows in self.shape.batch_rows:
            owners = self._owners(kv_tokens, sequences, rows, 0)
            if (choice := self._everything(self._room(owners))) is not None:
                return self._plan(ctx, sequences, kv_tokens, rows, owners, choice)
        for rows, pass_tokens in self._amounts():
            owners = self._owners(kv_tokens, sequences, rows, min(pass_tokens, max(kv_tokens, rows)))
            if (choice := self._some(self._room(owners))) is not None:
                return self._plan(ctx, sequences, kv_tokens, rows, owners, choice)
        return None

    def _room(self, owners: Mapping[str, int]) -> int:
        return self.memory.ram_bytes - sum(owners.values())

    def _owners(self, kv_tokens: int, sequences: int, rows: int, pass_tokens: int) -> dict[str, int]:
        """What every placement needs."""
        shape, logit_rows = self.shape, max(_LOGIT_ROWS, 2 * sequences)
        return {
            "program": self.memory.program_bytes,
            "kv": kv_tokens * shape.kv_bytes_per_token,
            "activations": rows * shape.row_bytes + pass_tokens * shape.state_bytes + logit_rows * shape.logits_bytes,
            "embedding": shape.embed.num_bytes,
        }

    def _everything(self, room_bytes: int) -> _Choice | None:
        if self._streamable_bytes > room_bytes:
            return None
        return self._choice({block.name for block in (*self.shape.blocks, self.shape.head)})

    def _choice(self, resident: set[str]) -> _Choice:
        streamed = tuple(block for block in (*self.shape.blocks, self.shape.head) if block.name not in resident)
        return _Choice(frozenset(resident), streamed, ring_bytes([block.num_bytes for block in streamed]))

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

    @property
    def _streamable_bytes(self) -> int:
        return self.shape.num_bytes - self.shape.embed.num_bytes

    def _plan(
        self, ctx: int, sequences: int, kv_tokens: int, rows: int, owners: Mapping[str, int], choice: _Choice
    ) -> Plan:
        shape, memory = self.shape, self.memory
        placed = [Placed(shape.embed.name, shape.embed.num_bytes, "ram", "cpu")]
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
            pass_tokens=max(rows, min(_PASS_TOKENS, kv_tokens)) if streamed_bytes else rows,
            many_rows=1 << 62,
            ledger={
                "ram": {owner: count for owner, count in ram.items() if count},
                "disk": {"weights": streamed_bytes},
            },
            limits={"ram": memory.ram_bytes},
            prompt_tokens=max(1, min(PROMPT_TOKENS, ctx // 2)),
            costs=StepCosts(shape, self.rates, streamed_bytes, self.corrections),
        )

    def _refusal(self) -> DoesNotFitError:
        least, shape = self.least_bytes(), self.shape
        largest = max((shape.embed, *shape.blocks, shape.head), key=lambda block: block.num_bytes)
        return DoesNotFitError(
            f"{shape.name} does not fit into {_gib(self.memory.ram_bytes)} of memory",
            why=f"in {shape.weights} it needs {_gib(least)} even where all blocks are streamed from the disk: the "
            f"program has {_gib(self.memory.program_bytes)}, the embedding {_gib(shape.embed.num_bytes)}, the "
            f"largest block, {largest.name}, {_gib(largest.num_bytes)}",
            fix=f"--ram {cap(least)}" if least <= self.memory.most_bytes else _SMALLER,
        )


@dataclass(frozen=True)
class StepCosts:
    """What a step costs: the longest of what goes on side by side, and what cannot."""

    shape: ModelShape
    rates: Rates
    streamed_bytes: int
    corrections: Mapping[Bound, float]

    def decode_s(self, depth: int, rows: int = 1) -> float:
        """Of a step of `rows` sequences, each with `depth` tokens behind it."""
        return max(self._computing_s(depth, rows), self._disk_s()) + self._copying_s()

    def prompt_s(self, num_tokens: int) -> float:
        """Until a prompt is read and its first token drawn."""
        passes = -(-num_tokens // _PASS_TOKENS)
        flops = num_tokens * sum(block.flops for block in self.shape.blocks) + self.shape.head.flops
        computing = flops / self.rates.compute_gops / 1e9 * self.corrections.get("compute", 1.0)
        return max(computing, passes * self._disk_s()) + passes * self._copying_s() + _STEP_S

    def bound_by(self, rows: int = 1) -> Bound:
        """What such a step waits for."""
        if self._disk_s() + self._copying_s() > self._computing_s(0, rows):
            return "disk"
        return "memory" if self._computing_s(0, 1) * 1.5 > self._computing_s(0, rows) else "compute"

    def _computing_s(self, depth: int, rows: int) -> float:
        shape, rates = self.shape, self.rates
        matrices = (*shape.blocks, shape.head)
        read_s = sum(block.num_bytes for block in matrices) / rates.matrix_gbs / 1e9
        many_s = rows * sum(block.flops for block in matrices) / rates.compute_gops / 1e9
        attention_s = rows * depth * shape.kv_bytes_per_token / (_ATTENTION_SHARE * rates.matrix_gbs) / 1e9
        return (max(read_s, many_s) + attention_s + _STEP_S) * self.corrections.get("memory", 1.0)

    def _disk_s(self) -> float:
        from_disk = self.streamed_bytes * (1 - self.rates.cached_share)
        return from_disk / self.rates.disk_gbs / 1e9 * self.corrections.get("disk", 1.0)

    def _copying_s(self) -> float:
        """Out of the page cache: the cores do it, which else would compute."""
        cached = self.streamed_bytes * self.rates.cached_share
        return cached / (_COPY_SHARE * self.rates.matrix_gbs) / 1e9


def _spread(blocks: tuple[BlockShape, ...], count: int) -> set[str]:
    """The names of so many of the blocks, at even distances."""
    return {blocks[(2 * index + 1) * len(blocks) // (2 * count)].name for index in range(count)}


def cap(num_bytes: int) -> str:
    """The next round amount, as --ram takes it."""
    return f"{-(-num_bytes // _MIB)}MiB" if num_bytes < 2 * GIB else f"{-(-num_bytes * 10 // GIB) / 10:g}GiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
