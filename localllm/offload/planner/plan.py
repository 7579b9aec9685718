"""A plan: where each block of a model is placed and who computes it, the memory this takes, and its speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from localllm.offload.placement import BlockPlacement, ExpertCount, Tier
from localllm.offload.planner.calibration import Bound
from localllm.offload.planner.costs import Costs
from localllm.offload.planner.machine import Memory
from localllm.offload.planner.model_shape import ModelShape

GIB = 1 << 30
_CAP_STEP_BYTES = 16 << 20  # below 2 GiB: what a program holds differs by some MB from run to run
KEPT_PAGES, SNAPSHOTS, ADAPTERS = "kept pages", "snapshots", "adapters"  # owners in the ledger
_MOST_SNAPSHOTS = 16  # a few turns of a few chats; the disk has more
_MOST_KEPT_BYTES = 512 << 20  # 40,000 tokens of a 1.1B model in INT8; more of what is free is the machine's


@dataclass(frozen=True)
class JobShape:
    """A job of many prompts; the tokens a second of all of them together count.

    sequences: the most prompts that are answered at once.
    tokens: of a usual prompt and its answer.
    longest: tokens of the longest.
    """

    sequences: int
    tokens: int
    longest: int


@dataclass(frozen=True)
class Plan:
    """ledger: the bytes of each owner in each tier. pass_tokens: of a prompt, between two reads of what is streamed."""

    shape: ModelShape
    ctx: int
    kv_tokens: int  # of all sequences together
    sequences: int  # that are answered at once, each with its share of them
    blocks: tuple[BlockPlacement, ...]
    ring_bytes: int
    batch_rows: int
    pass_tokens: int
    many_rows: int  # of a forward, from which on a device computes what else the host does
    ledger: Mapping[Tier, Mapping[str, int]]
    limits: Mapping[Tier, int]
    prompt_tokens: int  # of the prompt whose first token is predicted
    costs: Costs

    @property
    def decode_s(self) -> float:
        """Seconds of a step behind that prompt, which gives every sequence a token."""
        return self.costs.decode_s(self.prompt_tokens, self.sequences)

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second of all sequences together."""
        return self.sequences / self.decode_s

    @property
    def ttft_s(self) -> float:
        """Seconds until that prompt is computed and its first token sampled."""
        return self.costs.prompt_s(self.prompt_tokens)

    @property
    def bound_by(self) -> Bound:
        return self.costs.bound_by(self.sequences)

    @property
    def fast(self) -> Tier:
        """The tier that blocks are computed fastest from."""
        return "vram" if "vram" in self.limits else "ram"

    @property
    def streamed(self) -> tuple[str, ...]:
        """Names of the blocks that come from the disk at every step."""
        return tuple(block.name for block in self.blocks[1:] if block.tier == "disk")

    @property
    def is_whole(self) -> bool:
        """True where every matrix stays where it is computed fastest, and nothing is read from the disk."""
        return self.blocks[0].tier != "disk" and all(block.tier == self.fast for block in self.blocks[1:])

    @property
    def is_streamed(self) -> bool:
        """True where steps read the disk or copy blocks, so that what shares a step shares that."""
        return bool(self.ring_bytes or self.costs.work.absent_bytes)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from the disk at every step, as a rule where experts are."""
        missed_bytes = self.costs.work.missed_bytes if self.costs.card is None else 0
        return self.ledger["disk"]["weights"] + missed_bytes

    @property
    def experts(self) -> ExpertCount | None:
        """The experts of a mixture; None for any other model."""
        return ExpertCount.of(self.blocks)

    @property
    def hit_rate(self) -> float:
        """The share of the experts of a token that is in memory, as a rule."""
        return 1 - self.costs.work.missed_bytes / max(1, self.shape.active_expert_bytes)

    @property
    def learnt_tokens(self) -> int:
        """Tokens of earlier runs that this share was learnt from; 0 where it is a usual one."""
        return self.shape.hit_curve.learnt_from // max(1, sum(experts.active for _, experts in self.shape.mixtures))

    def total_bytes(self, tier: Tier) -> int:
        return sum(self.ledger.get(tier, {}).values())

    @property
    def free_bytes(self) -> int:
        """Bytes of the fast memory's limit that have no owner."""
        return self.limits[self.fast] - self.total_bytes(self.fast)

    @property
    def held_tokens(self) -> int:
        """The most tokens that one sequence takes in memory, where some of it leaves or rests on the disk."""
        shape = self.shape
        if shape.resident_tokens is None:
            return shape.held_tokens
        return -(-(shape.kv_bytes(self.ctx) - shape.kv_bytes_per_sequence) // shape.kv_bytes_per_token)

    @property
    def most_kv_tokens(self) -> int:
        """The most tokens of all sequences together, as far as memory has them.

        If nothing is streamed, they may also use the free memory, except for a tenth that no ledger accounts for: gaps
        between torch's allocations.
        """
        rests_on_host = self.shape.resident_tokens is not None and self.fast == "vram"  # where others have the rest
        spare = 0 if self.is_streamed or rests_on_host else self.free_bytes * 9 // 10 // self.shape.kv_bytes_per_token
        return min(self.kv_tokens, self.sequences * self.held_tokens) + spare


def with_kept_pages(plan: Plan) -> Plan:
    """Return the plan with some of the host's free memory for keys and values that no running request has."""
    spare, each = max(0, plan.limits["ram"] - plan.total_bytes("ram")), plan.shape.snapshot_bytes
    kept = {KEPT_PAGES: min(_MOST_KEPT_BYTES, spare // 4)}
    if each:
        kept[SNAPSHOTS] = min(_MOST_SNAPSHOTS, spare // 4 // each) * each
    ram = {**plan.ledger["ram"], **{owner: count for owner, count in kept.items() if count}}
    return replace(plan, ledger={**plan.ledger, "ram": ram})


def can_be_packed(plan: Plan, memory: Memory) -> bool:
    """Return whether the model can be packed in this memory for the plan, or need not be."""
    packing = plan.shape.packing
    if packing is None or (packing.is_for_streaming and plan.is_whole):
        return True
    return memory.program_bytes + packing.num_bytes <= memory.ram_bytes


def cap(num_bytes: int) -> str:
    """Return the next round amount, as --ram and --vram take it."""
    if num_bytes < 2 * GIB:
        return f"{max(1, -(-num_bytes // _CAP_STEP_BYTES)) * (_CAP_STEP_BYTES >> 20)}MiB"
    return f"{-(-num_bytes * 10 // GIB) / 10:g}GiB"
