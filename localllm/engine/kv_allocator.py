"""Pages and states for each request: room for all of it, and in it what is cached of its prompt already.

Knows sequences and the pages' bookkeeping. Knows no logits: what was computed is sealed, so that later prompts find it,
once the engine says that it is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from localllm.cache.moved_pages import PageMover
from localllm.cache.paged_kv import PagedKV
from localllm.engine.adapters import AdapterCache, adapter_bytes, variant
from localllm.engine.events import ignore
from localllm.engine.memory import is_device_out_of_memory, is_out_of_memory
from localllm.engine.model_options import EVICTION_AND_MOVED, why_not_moved
from localllm.engine.prefix_config import (
    Computed,
    KVReuse,
    kept_bytes,
    page_mover,
    prefix_cache,
    snapshot_bytes,
)
from localllm.engine.request import Request
from localllm.engine.residency import Residency
from localllm.engine.sequence import Sequence
from localllm.engine.step_types import Limits
from localllm.errors import Fix, LocalLLMError, UsageError
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.offload.planner.plan import Plan

# Snapshots on the way through a prompt are at least this far apart: one takes as much as the keys and values of some
# 1,000 tokens do (Qwen 3.5 4B: 50 MB, 64 KB a token in bf16).
_SNAPSHOT_TOKENS = 1024
_CLOSE_S = 2.0  # for the pages of the last answer, 0.1 s on most disks


def tokens_needed(request: Request, max_length: int, limits: Limits) -> int:
    """Return the tokens of keys and values that a request takes: beams share the full pages of its prompt."""
    each, num_prompt, most = limits.sequence_tokens, len(request.prompt_ids), limits.held_tokens
    if request.beams == 1:
        return min(max_length, most) + each
    return min(num_prompt, most) + each + request.beams * (min(max_length - num_prompt, most) + PAGE_TOKENS + each)


def snapshot_borders(token_ids: SequenceOf[int], end_ids: Collection[int] = ()) -> list[int]:
    """Return the borders of pages in a prompt at which snapshots of recurrent states are worth their memory: before the
    answer, where the next turn and another try begin; behind the first message, with which other chats begin; and
    behind others, each some way from the last."""
    ends = [number + 1 for number, token in enumerate(token_ids) if token in end_ids]
    borders = [end // PAGE_TOKENS * PAGE_TOKENS for end in ends]
    chosen = borders[:1]
    for border in borders[1:]:
        if border - chosen[-1] >= _SNAPSHOT_TOKENS:
            chosen.append(border)
    last = (len(token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    return sorted({border for border in (*chosen, last) if border})


class KVAllocator:
    """prefix: the cache of earlier prompts; None where nothing is reused."""

    def __init__(
        self,
        residency: Residency,
        reuse: KVReuse,
        computed: Computed,
        plan: Plan | None,
        adapters: AdapterCache,
        end_ids: Collection[int] = (),
    ) -> None:
        """end_ids: tokens that end a message."""
        self._residency, self._end_ids, self.adapters = residency, end_ids, adapters
        warnings = iter([reuse.warn])  # the first sentence is passed on, and no other
        self._reuse = replace(reuse, warn=lambda text: next(warnings, ignore)(text))
        self.prefix = prefix_cache(self._reuse, computed, residency, plan)
        self._mover: PageMover | None = None  # once a request wants it

    def allocate(self, sequence: Sequence, is_cancelled: Callable[[], bool]) -> None:
        """Give a sequence its pages, with what is cached of its prompt.

        `is_cancelled` is asked while pages are read from the disk. Raises what torch does where there is no memory;
        nothing is held then.
        """
        adapters = self.adapters.take(sequence.request.adapters)
        try:
            kv = self._residency.new_kv(sequence.kv_capacity)
        except BaseException:
            self.adapters.give_back(adapters)
            raise
        kv.adapters = adapters
        kv.attend_from = len(sequence.request.prompt_ids)
        if kv.choice is not None:
            kv.exact_tokens = kv.choice.first_position
        try:
            # What is wanted of every token, its state or the logits behind it, is not in keys and values.
            needs_all = sequence.request.pooling == "mean" or sequence.reads_logits
            if self.prefix is not None and not needs_all:
                variant, takes_moved = self._variant(sequence, kv), self.takes_moved(sequence.request)
                keys = self.prefix.attach(kv, sequence.token_ids, variant, is_cancelled, takes_moved=takes_moved)
                sequence.num_cached_tokens = kv.length
                if takes_moved:
                    sequence.num_moved_tokens = PAGE_TOKENS * len(kv.moved)  # of earlier prompts of this kind
                    share = self._reuse.computed_share
                    self._mover = self._mover or page_mover(self.prefix, self._residency, share)
                    sequence.planned = self._mover.plan(sequence.token_ids, kv.length, variant)
                if sequence.request.explains_miss:
                    sequence.miss = self.prefix.miss(keys, kv.length, sequence.token_ids)
            self._watch(sequence, kv)
        except BaseException:
            kv.close()
            self.adapters.give_back(adapters)
            raise
        sequence.kv = kv

    def takes_moved(self, request: Request) -> bool:
        """Return whether pages of a prompt may be filled from other positions: not where all of it is asked for."""
        wants = self._reuse.moves if request.reuse is None else request.reuse == "chunks"
        return wants and self.prefix is not None and request.pooling is None and request.prompt_logprobs is None

    def require_movable(self, request: Request) -> None:
        """Raise UsageError where a request wants what this model's pages do not allow."""
        if request.reuse == "chunks":
            evicts = any(group.eviction is not None for group in self._residency.kv_pages.groups)
            fix = Fix.advice('leave "reuse" out of the request')
            if why := EVICTION_AND_MOVED if evicts else why_not_moved(self._residency.config):
                raise UsageError("reuse chunks is not possible here", why=why, fix=fix)
            if self.prefix is None:
                raise UsageError("documents cannot be reused", why="this engine keeps nothing of earlier prompts")

    def move_in(self, sequence: Sequence, num_tokens: int, is_cancelled: Callable[[], bool]) -> int:
        """Fill what can be filled of the pages in front of the next tokens to be computed; return how many tokens a
        forward takes in that computes so many of them."""
        kv = sequence.kv
        assert kv is not None
        end = kv.length + kv.reach(num_tokens, kv.moved | sequence.planned.keys())
        due = {number: span for number, span in sequence.planned.items() if number * PAGE_TOKENS < end}
        if due:
            assert self._mover is not None
            for number in due:
                del sequence.planned[number]
            try:
                kv.make_room(end)
                self._mover.move(kv, due, is_cancelled)
            except (MemoryError, RuntimeError, LocalLLMError) as error:  # what is not filled is computed
                if not isinstance(error, LocalLLMError) and not is_out_of_memory(error):
                    raise
            count = PAGE_TOKENS * len(due.keys() & kv.moved)
            sequence.num_cached_tokens += count
            sequence.num_moved_tokens += count
        return kv.reach(num_tokens, kv.moved)

    def branch(self, leader: Sequence, follower: Sequence) -> None:
        """Give a sequence a branch of what another one has computed. Raises what torch does where there is no
        memory."""
        assert leader.kv is not None
        follower.kv = leader.kv.branch(follower.kv_capacity)
        self.adapters.share(follower.kv.adapters)
        self._watch(follower, follower.kv)

    def _watch(self, sequence: Sequence, kv: PagedKV) -> None:
        """Have snapshots taken of a sequence's states, on the way through its prompt and through its answer."""
        if kv.state is not None and self.prefix is not None:
            kv.state.watch(snapshot_borders(sequence.request.prompt_ids, self._end_ids))

    def seal(self, sequence: Sequence) -> None:
        """Let later prompts find the full pages of a sequence, and the states behind some of them."""
        if self.prefix is not None and sequence.owns_kv and sequence.kv is not None:
            variant = self._variant(sequence, sequence.kv)
            self.prefix.seal(sequence.kv, sequence.token_ids, variant)
            self.prefix.keep_snapshots(sequence.kv, sequence.token_ids, variant, ends=False)

    def release(self, sequence: Sequence) -> None:
        """Give back what a sequence has that has ended; the last snapshot of its states is kept."""
        if sequence.kv is None or not sequence.owns_kv:
            return
        if self.prefix is not None and sequence.finish_reason != "error":
            variant = self._variant(sequence, sequence.kv)
            self.prefix.keep_snapshots(sequence.kv, sequence.token_ids, variant, ends=True)
        self.adapters.give_back(sequence.kv.adapters)
        sequence.num_evicted_tokens = max(sequence.num_evicted_tokens, sequence.kv.num_evicted)
        sequence.kv.close()

    def share_ram(self, plan: Plan | None) -> None:
        """Give the cached pages and adapters the memory that a plan has for them; None: what they have."""
        if plan is not None:
            self.adapters.limit(adapter_bytes(plan))
        if self.prefix is not None and plan is not None:
            self.prefix.limit_ram(kept_bytes(self._reuse, plan), snapshot_bytes(self._reuse, plan))

    def give_up_ram(self) -> bool:
        """Give back the memory of pages that only serve later prompts; return whether there was any."""
        return self.prefix is not None and self.prefix.holds_ram and self.prefix.limit_ram(0)

    def gives_way(self, error: Exception, rows: int) -> bool:
        """Return whether memory ran out in a forward of so many tokens and something was given up for it, cached pages
        first. The next step tries again."""
        try:
            if not is_out_of_memory(error):
                return False
            if not is_device_out_of_memory(error) and self.give_up_ram():
                return True
            if self.adapters.unload():
                return True
            return self._residency.give_way(error, rows)
        except (MemoryError, RuntimeError, LocalLLMError) as another:  # nothing is left: the first error is reported
            if isinstance(another, RuntimeError) and not is_out_of_memory(another):
                raise
            return False

    def close(self) -> None:
        """Wait a moment for what is on its way to the disk."""
        if self.prefix is not None:
            self.prefix.close(_CLOSE_S)

    def _variant(self, sequence: Sequence, kv: PagedKV) -> bytes:
        """Return what tells its pages from others of the same tokens: its adapters, that LongRoPE rotates the keys of a
        long sequence differently, and what they were computed without."""
        switch = self._residency.config.rope_switch_length
        is_long = switch is not None and len(sequence.token_ids) > switch
        eviction = kv.pages.eviction
        evicted = b"" if eviction is None else eviction.variant
        return variant(kv.adapters) + (b"long" if is_long else b"") + evicted
