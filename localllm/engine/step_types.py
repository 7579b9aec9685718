"""The values that a step passes from the scheduler to the runner and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.offload.planner.plan import Plan


class StepCancelledError(Exception):
    """The forward was given up between two blocks; no cache has advanced."""


@dataclass(frozen=True)
class Limits:
    """What may run at once."""

    # Of a prompt, a step: it must not keep the running answers waiting. A plan has as many as are computed at once.
    chunk_tokens: int = 512
    max_sequences: int = 8  # as many rows as the CPU kernel computes without changing a bit of any
    kv_tokens: int = 1 << 62  # of all running sequences together: what was found to fit at load
    sequence_tokens: int = 0  # that each takes of them beside its own: dense pages, and the rest of the last one
    held_tokens: int = 1 << 62  # of one sequence at most at one time, where earlier ones leave memory
    # Whether prompts and answers share a step: where each reads blocks from the disk, one reading serves them all.
    shares_steps: bool = False

    def within(self, plan: Plan | None) -> Limits:
        """Return these limits in a plan's memory; where blocks are streamed, as much as can be shares one reading."""
        if plan is None:
            return self
        each = -(-(plan.shape.kv_bytes_per_sequence + plan.shape.recurrent_bytes) // plan.shape.kv_bytes_per_token)
        kv_tokens = plan.most_kv_tokens + plan.sequences * each
        limits = replace(self, kv_tokens=kv_tokens, sequence_tokens=each, held_tokens=plan.held_tokens)
        if plan.is_streamed:
            return replace(limits, chunk_tokens=plan.pass_tokens, shares_steps=True)
        is_wanted = limits.chunk_tokens != Limits.chunk_tokens
        return replace(limits, chunk_tokens=min(limits.chunk_tokens, plan.batch_rows) if is_wanted else plan.batch_rows)


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence: those after the ones that `kv` holds."""

    token_ids: Sequence[int]  # the whole sequence so far
    kv: PagedKV
    num_tokens: int
    num_drafted: int = 0  # the last of these tokens; each has logits of its own, as the one before them has
    num_ahead: int = 0  # tokens behind those that `kv` holds, which a drafter has written and nobody counts
    all_logits: bool = False  # behind each of these tokens, not behind the last one alone

    @property
    def begin(self) -> int:
        return self.kv.length + self.num_ahead

    @property
    def end(self) -> int:
        return self.begin + self.num_tokens

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The tokens that are computed: the others are in pages that were filled already."""
        return self.kv.computed_runs(self.begin, self.end)

    @property
    def num_rows(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    @property
    def num_logits(self) -> int:
        return self.num_tokens if self.all_logits else 1 + self.num_drafted

    def without_drafts(self, begin: int, end: int) -> Chunk:
        """Return the tokens [begin, end) of a chunk that was computed, and trim its cache to them."""
        self.kv.trim(end)
        return replace(self, token_ids=self.token_ids[:end], num_tokens=end - begin, num_drafted=0)


@dataclass(frozen=True)
class StepOutput:
    """What a forward computed of one chunk."""

    logits: Tensor | None  # fp32 [1 + drafted, V]; None where a device sampled already
    token_ids: Sequence[int]  # that the device sampled
    are_finite: Sequence[bool]  # for each row
    all_logits: Tensor | None = None  # [T, V] of all of its tokens, where the chunk wants these
    states: Tensor | None = None  # [T, hidden] of the chunk's tokens, where its sequence is pooled
