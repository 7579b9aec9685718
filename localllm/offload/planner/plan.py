"""Where each block of a model rests and who computes it, what that takes of which memory, and how fast it is: what a
search over a machine decides. Knows sizes of blocks and rates, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

from localllm.offload.planner.calibration import Bound, Corrections, Term

Tier = Literal["vram", "ram", "disk"]

GIB = 1 << 30
_CAP_STEP_BYTES = 16 << 20  # below 2 GiB: what a program holds differs by some MB from run to run
NEVER = 1 << 62  # rows that no forward has
KEPT_PAGES = "kept pages"  # an owner in the ledger
_MOST_KEPT_BYTES = 512 << 20  # 40,000 tokens of a 1.1B model in INT8; more of what is free is the machine's


@dataclass(frozen=True)
class BlockShape:
    """num_bytes: in memory and on the disk, whole pages. flops: multiplications and additions of one token."""

    name: str
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Packing:
    """What has to be done once before a model runs. num_bytes: of memory, beside the program. command: that does it
    ahead of time, "" where none does. is_for_streaming: not done where every block stays where it is computed fastest.
    """

    num_bytes: int
    command: str = ""
    is_for_streaming: bool = False


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides where it fits and how fast it is. packing: None where it is packed, or never will be."""

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
    kv_bytes_per_sequence: int = 0  # beside those of its tokens
    is_tied: bool = False  # the embedding is the head's matrix
    can_split: bool = False  # an MLP block, between a device and the host
    packing: Packing | None = None
    fork_bytes: int = 0  # of a second end of one sequence, for other guesses
    draft_bytes: int = 0  # of a second model that guesses, all of it where this one is computed fastest
    section_bytes: int = 0  # of one row, what each program of a GPU's attention leaves that has a section of the pages

    def kv_bytes(self, num_tokens: int, sequences: int = 1) -> int:
        return num_tokens * self.kv_bytes_per_token + sequences * self.kv_bytes_per_sequence

    @property
    def lm_head(self) -> BlockShape:
        """The block whose matrix makes logits."""
        return self.embed if self.is_tied else self.head

    @cached_property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in (self.embed, *self.blocks, self.head))

    @cached_property
    def block_bytes(self) -> int:
        """Of all attention and MLP blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def block_flops(self) -> int:
        return sum(block.flops for block in self.blocks)


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


class Costs(Protocol):
    """What steps under a plan cost."""

    @property
    def rates(self) -> Rates: ...

    @property
    def corrections(self) -> Corrections: ...

    def decode_s(self, depth: int, rows: int = 1) -> float:
        """Of a step of `rows` sequences, each with `depth` tokens behind it."""
        ...

    def fast_s(self, num_bytes: int) -> float:
        """Of a step of one token of a model of so many bytes, all where they are computed fastest."""
        ...

    def prompt_s(self, num_tokens: int) -> float:
        """Until a prompt is read and its first token drawn."""
        ...

    def bound_by(self, rows: int = 1) -> Bound:
        """What such a step waits for."""
        ...

    def step_term(self, rows: int = 1) -> Term:
        """What such a step is corrected by."""
        ...

    def prompt_term(self, num_tokens: int) -> Term:
        """What the reading of such a prompt is corrected by."""
        ...


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
    costs: Costs

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
    def fast(self) -> Tier:
        """Where blocks are computed from as fast as they can be."""
        return "vram" if "vram" in self.limits else "ram"

    @property
    def streamed(self) -> tuple[str, ...]:
        """Names of the blocks that come from the disk at every step."""
        return tuple(block.name for block in self.blocks[1:] if block.tier == "disk")

    @property
    def is_whole(self) -> bool:
        """Whether every matrix stays where it is computed fastest, and nothing is read from the disk."""
        return self.blocks[0].tier != "disk" and all(block.tier == self.fast for block in self.blocks[1:])

    @property
    def streamed_bytes(self) -> int:
        """Read from the disk at every step."""
        return self.ledger["disk"]["weights"]

    def total_bytes(self, tier: Tier) -> int:
        return sum(self.ledger.get(tier, {}).values())

    @property
    def free_bytes(self) -> int:
        """Of the fast memory's limit, what nobody has."""
        return self.limits[self.fast] - self.total_bytes(self.fast)

    @property
    def most_kv_tokens(self) -> int:
        """That all sequences may have together: where nothing is streamed, what is free is theirs too, but for a tenth
        that is left for what no ledger sees: what lies between torch's runs of memory."""
        spare = 0 if self.ring_bytes else self.free_bytes * 9 // 10 // self.shape.kv_bytes_per_token
        return self.kv_tokens + spare


def with_kept_pages(plan: Plan) -> Plan:
    """Some of what is left of the host's memory, for keys and values that no running request has."""
    spare = max(0, plan.limits["ram"] - plan.total_bytes("ram"))
    kept = min(_MOST_KEPT_BYTES, spare // 4)
    ram = {**plan.ledger["ram"], KEPT_PAGES: kept}
    return replace(plan, ledger={**plan.ledger, "ram": ram}) if kept else plan


def cap(num_bytes: int) -> str:
    """The next round amount, as --ram and --vram take it."""
    if num_bytes < 2 * GIB:
        return f"{max(1, -(-num_bytes // _CAP_STEP_BYTES)) * (_CAP_STEP_BYTES >> 20)}MiB"
    return f"{-(-num_bytes * 10 // GIB) / 10:g}GiB"
