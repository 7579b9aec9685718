"""Pages of keys and values for each request: room for all of it, and in it what is cached of its prompt already.

Knows sequences and the pages' bookkeeping. Knows no logits: what was computed is sealed, so that later prompts find it,
once the engine says that it is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localllm.engine.events import ignore
from localllm.engine.memory import is_device_out_of_memory, is_out_of_memory
from localllm.engine.prefix_config import Computed, KVReuse, kept_bytes, prefix_cache
from localllm.engine.request import Request
from localllm.engine.residency import Residency
from localllm.engine.sequence import Sequence
from localllm.engine.step_types import Limits
from localllm.errors import LocalLLMError
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.offload.planner.plan import Plan

_CLOSE_S = 2.0  # for the pages of the last answer, 0.1 s on most disks


def tokens_needed(request: Request, max_length: int, limits: Limits) -> int:
    """Return the tokens of keys and values that a request takes: beams share the full pages of its prompt."""
    each, num_prompt = limits.sequence_tokens, len(request.prompt_ids)
    if request.beams == 1:
        return max_length + each
    return num_prompt + each + request.beams * (max_length - num_prompt + PAGE_TOKENS + each)


class KVAllocator:
    """prefix: the cache of earlier prompts; None where nothing is reused."""

    def __init__(self, residency: Residency, reuse: KVReuse, computed: Computed, plan: Plan | None) -> None:
        self._residency = residency
        warnings = iter([reuse.warn])  # the first sentence is passed on, and no other
        self._reuse = replace(reuse, warn=lambda text: next(warnings, ignore)(text))
        self.prefix = prefix_cache(self._reuse, computed, residency, plan)

    def allocate(self, sequence: Sequence, is_cancelled: Callable[[], bool]) -> None:
        """Give a sequence its pages, with what is cached of its prompt.

        `is_cancelled` is asked while pages are read from the disk. Raises what torch does where there is no memory;
        nothing is held then.
        """
        kv = self._residency.new_kv(sequence.kv_capacity)
        try:
            # What is wanted of every token, its state or the logits behind it, is not in keys and values.
            needs_all = sequence.request.pooling == "mean" or sequence.reads_logits
            if self.prefix is not None and not needs_all:
                keys = self.prefix.attach(kv, sequence.token_ids, self._rotation(sequence), is_cancelled)
                sequence.num_cached_tokens = kv.length
                if sequence.request.explains_miss:
                    sequence.miss = self.prefix.miss(keys, kv.length, sequence.token_ids)
        except BaseException:
            kv.close()
            raise
        sequence.kv = kv

    def seal(self, sequence: Sequence) -> None:
        """Let later prompts find the full pages of a sequence."""
        if self.prefix is not None and sequence.owns_kv and sequence.kv is not None:
            self.prefix.seal(sequence.kv, sequence.token_ids, self._rotation(sequence))

    def share_ram(self, plan: Plan | None) -> None:
        """Give the cached pages the memory that a plan has for them; None: what they have."""
        if self.prefix is not None and plan is not None:
            self.prefix.limit_ram(kept_bytes(self._reuse, plan))

    def give_up_ram(self) -> bool:
        """Give back the memory of pages that only serve later prompts; return whether there was any."""
        return self.prefix is not None and self.prefix.ram_used_bytes > 0 and self.prefix.limit_ram(0)

    def gives_way(self, error: Exception, rows: int) -> bool:
        """Return whether memory ran out in a forward of so many tokens and something was given up for it, cached pages
        first. The next step tries again."""
        try:
            if not is_out_of_memory(error):
                return False
            if not is_device_out_of_memory(error) and self.give_up_ram():
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

    def _rotation(self, sequence: Sequence) -> bytes:
        """LongRoPE rotates the keys of a long sequence differently: those are other pages."""
        switch = self._residency.config.rope_switch_length
        return b"long" if switch is not None and len(sequence.token_ids) > switch else b""
