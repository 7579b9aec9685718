"""The sizes of a model, which decide where it fits and how fast it is. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from localllm.offload.planner.hit_curve import USUAL, HitCurve


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one block. num_bytes: of one of them. active: how many a token is computed by. shared_launches: of
    a GPU's kernels in a step of one token, by what all tokens share."""

    count: int
    active: int
    num_bytes: int
    shared_launches: int = 0

    def expected(self, tokens: int) -> float:
        """Return how many different ones so many tokens are computed by, if each chose at random."""
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


@dataclass(frozen=True)
class BlockShape:
    """num_bytes: in memory and on the disk, whole pages. flops: multiplications and additions of one token."""

    name: str
    num_bytes: int
    flops: int
    experts: ExpertShape | None = None

    @property
    def shared_bytes(self) -> int:
        """The bytes that every token reads."""
        return self.num_bytes - (0 if self.experts is None else self.experts.count * self.experts.num_bytes)

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes that a step of so many tokens reads."""
        if self.experts is None:
            return self.num_bytes
        return self.shared_bytes + self.experts.expected(tokens) * self.experts.num_bytes


@dataclass(frozen=True)
class Packing:
    """The one-time conversion that a model needs before it runs.

    num_bytes: memory it takes, beside the program.
    command: packs the model ahead of time; "" if none does.
    is_for_streaming: not needed if every block stays where it is computed fastest.
    """

    num_bytes: int
    command: str = ""
    is_for_streaming: bool = False


@dataclass(frozen=True)
class ModelShape:
    """packing: None where the model is packed, or never will be."""

    name: str
    weights: str
    kv: str
    embed: BlockShape
    blocks: tuple[BlockShape, ...]  # attention and MLP in turn
    head: BlockShape
    kv_bytes_per_token: int
    default_ctx: int  # where the user names none
    row_bytes: int  # between two blocks and inside one, for each token that is computed at once
    state_bytes: int  # of a token that waits between two blocks while others pass
    logits_bytes: int  # of one token
    batch_rows: tuple[int, ...]  # how many tokens may be computed at once, the best first
    sketch_bytes_per_token: int = 0  # of these, what tokens choose by that do not attend to all before them
    chosen_tokens: int | None = None  # that a token of an answer attends to, at most; None: all
    kv_bytes_per_sequence: int = 0  # beside those of its tokens
    kv_layers: int = 1  # that have keys and values of all tokens
    windowed_bytes_per_token: int = 0  # of those of a token, in layers that see a window
    windowed_tokens: int = 0  # of a sequence, that these layers have at most at one time
    resident_tokens: int | None = None  # of a sequence, whose keys and values stay in memory; None: all
    table_tokens: int = 1 << 62  # whose pages a GPU's attention has room for at most
    held_tokens: int = 1 << 62  # whose keys and values a sequence has at most at one time, where earlier ones leave
    recurrent_bytes: int = 0  # of the states of a sequence, and of the last snapshot of them
    snapshot_bytes: int = 0  # of one snapshot of all states
    cheap_ctx: int = 0  # a longer one that is taken by default where half of the memory that is left is enough for it
    num_layers: int = 0
    state_layers: int = 0  # of these, that keep a state, in place of keys and values or beside them
    keeps_tokens: bool = True  # some layer has keys and values
    is_tied: bool = False  # the embedding is the head's matrix
    can_skip: bool = True  # a draft may leave blocks out
    can_split: bool = False  # an MLP block, between a device and the host
    can_slot: bool = False  # experts in the host's memory, some of them also in slots of a device's
    packing: Packing | None = None
    draft_bytes: int = 0  # of a draft model, all of it where this one is computed fastest
    draft_blocks: int = 0
    adapter_bytes: int = 0  # set aside for adapters, where this model is computed fastest
    hit_curve: HitCurve = USUAL  # of experts that are brought to slots
    num_weights: int = 0  # of all matrices
    num_active_weights: int = 0  # that a token is multiplied by, and its embedding's matrix
    section_bytes: int = 0  # of one row: the partial result of each program of a GPU's attention

    def kv_bytes(self, num_tokens: int, sequences: int = 1) -> int:
        """Return the memory of so many tokens of all sequences together. Those that rest elsewhere pass through a ring
        that has room for two layers."""
        held = min(num_tokens, sequences * self.held_tokens)
        all_bytes = held * self.kv_bytes_per_token + sequences * self.kv_bytes_per_sequence
        if self.resident_tokens is not None:
            most = max(self.resident_tokens, self.windowed_tokens)
            all_bytes -= max(0, num_tokens - sequences * most) * self.windowed_bytes_per_token
        return all_bytes - self.spilled_bytes(num_tokens, sequences) + self.kv_ring_bytes(num_tokens, sequences)

    def kv_ring_bytes(self, num_tokens: int, sequences: int = 1) -> int:
        """Return the memory of that ring."""
        return -(-2 * self.spilled_bytes(num_tokens, sequences) // self.kv_layers)

    def spilled_bytes(self, num_tokens: int, sequences: int = 1) -> int:
        """Return the bytes of those that rest elsewhere."""
        return self.spilled_tokens(num_tokens, sequences) * self._spilled_bytes_per_token

    def chosen_bytes(self, num_tokens: int, sequences: int = 1) -> int:
        """Return how many of these tokens choose that do not attend to all."""
        spilled_tokens = self.spilled_tokens(num_tokens, sequences)
        most = spilled_tokens if self.chosen_tokens is None else sequences * self.chosen_tokens
        return min(spilled_tokens, most) * self._spilled_bytes_per_token

    @property
    def _spilled_bytes_per_token(self) -> int:
        return self.page_bytes_per_token - self.windowed_bytes_per_token

    def spilled_tokens(self, num_tokens: int, sequences: int = 1) -> int:
        """Return how many of so many tokens rest elsewhere: on the disk, of a GPU in the host's memory."""
        return 0 if self.resident_tokens is None else max(0, num_tokens - sequences * self.resident_tokens)

    @property
    def page_bytes_per_token(self) -> int:
        """Return the bytes of a token's keys and values alone."""
        return self.kv_bytes_per_token - self.sketch_bytes_per_token

    def is_chosen(self, depth: int) -> bool:
        """Return whether a token of an answer attends to some alone of so many others."""
        return self.chosen_tokens is not None and depth > self.chosen_tokens

    def attended_bytes(self, depth: int) -> int:
        """Return the bytes that a token of an answer reads of so many others."""
        if self.chosen_tokens is None or depth <= self.chosen_tokens:
            return depth * self.page_bytes_per_token
        return self.chosen_tokens * self.page_bytes_per_token + depth * self.sketch_bytes_per_token

    @property
    def lm_head(self) -> BlockShape:
        """The block whose matrix makes logits."""
        return self.embed if self.is_tied else self.head

    @cached_property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in (self.embed, *self.blocks, self.head))

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of all attention and MLP blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def block_flops(self) -> int:
        return sum(block.flops for block in self.blocks)

    @cached_property
    def mixtures(self) -> tuple[tuple[BlockShape, ExpertShape], ...]:
        """The blocks that have experts."""
        return tuple((block, block.experts) for block in self.blocks if block.experts is not None)

    @cached_property
    def mixture_launches(self) -> int:
        """A GPU's launches in a step of one token, more than as many dense blocks have: two choose and two compute,
        where an MLP has three."""
        return sum(1 + experts.shared_launches for _, experts in self.mixtures)

    @cached_property
    def expert_bytes(self) -> int:
        """The bytes of all experts."""
        return sum(experts.count * experts.num_bytes for _, experts in self.mixtures)

    @cached_property
    def active_expert_bytes(self) -> int:
        """The bytes of the experts of one token."""
        return sum(experts.active * experts.num_bytes for _, experts in self.mixtures)

    def missed_bytes(self, slots: Mapping[str, int]) -> int:
        """Return the bytes of the experts of one token that are in no slot, as a rule. slots: of each mixture."""
        return sum(
            int(experts.active * experts.num_bytes * (1 - self.hit_curve.hits(slots[block.name] / experts.count)))
            for block, experts in self.mixtures
        )

    @property
    def token_bytes(self) -> int:
        """The bytes of the weights that the step of one token reads."""
        return int(self.read_share(1) * (self.block_bytes + self.lm_head.num_bytes))

    def read_share(self, tokens: int) -> float:
        """Return the share that a step of so many tokens reads of the bytes of all blocks and the head's matrix."""
        if not self.mixtures:
            return 1.0
        if tokens not in self._read_shares:
            skipped = sum(block.num_bytes - block.read_bytes(tokens) for block, _ in self.mixtures)
            self._read_shares[tokens] = 1 - skipped / (self.block_bytes + self.lm_head.num_bytes)
        return self._read_shares[tokens]

    def expert_growth(self, tokens: int) -> float:
        """Return how many times as many experts a step of so many tokens is computed by as one of a single token."""
        if tokens not in self._expert_growths:
            active = sum(experts.active for _, experts in self.mixtures)
            wanted = sum(experts.expected(tokens) for _, experts in self.mixtures)
            self._expert_growths[tokens] = wanted / max(1, active)
        return self._expert_growths[tokens]

    @cached_property
    def _read_shares(self) -> dict[int, float]:
        return {}

    @cached_property
    def _expert_growths(self) -> dict[int, float]:
        return {}

    @property
    def streamable_bytes(self) -> int:
        """The bytes of all blocks but the embedding."""
        return self.num_bytes - self.embed.num_bytes
