"""Keys and values for each request: room for all of it, and in it what is known of its prompt already.

Knows sequences and the pages' bookkeeping. Knows no logits: what was computed is known to later prompts once the engine
says that it is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localllm.engine.memory import is_device_out_of_memory, is_out_of_memory
from localllm.engine.prefix_config import Computed, KVReuse, kept_bytes, prefix_cache
from localllm.engine.residency import Residency
from localllm.engine.sequence import Sequence
from localllm.errors import LocalLLMError
from localllm.offload.planner.plan import Plan

_CLOSE_S = 2.0  # for the pages of the last answer, 0.1 s on most disks


def _once(warn: Callable[[str], None]) -> Callable[[str], None]:
    """The first sentence alone is told: each disk tier knows but its own."""
    told: list[str] = []

    def tell(text: str) -> None:
        if not told:
            told.append(text)
            warn(text)

    return tell


class KVSupply:
    """prefix: None where nothing is reused."""

    def __init__(self, residency: Residency, reuse: KVReuse, computed: Computed, plan: Plan | None) -> None:
        """plan: by which memory is shared out."""
        self._residency, self._computed = residency, computed
        self._reuse = replace(reuse, warn=_once(reuse.warn))
        self.prefix = prefix_cache(self._reuse, computed, residency, plan)

    def admit(self, sequence: Sequence, cancelled: Callable[[], bool]) -> None:
        """cancelled: asked while pages are read from the disk. Raises what torch does where there is no memory; nothing
        is held then."""
        kv = self._residency.new_kv(sequence.kv_capacity)
        try:
            # What is wanted of every token, its state or the logits behind it, is not in keys and values.
            reads_all = sequence.request.pooling == "mean" or sequence.reads_logits
            if self.prefix is not None and not reads_all:
                keys = self.prefix.attach(kv, sequence.token_ids, self._rotation(sequence), cancelled)
                sequence.num_cached_tokens = kv.length
                if sequence.request.explains_miss:
                    sequence.miss = self.prefix.miss(keys, kv.length, sequence.token_ids)
        except BaseException:
            kv.close()
            raise
        sequence.kv = kv

    def seal(self, sequence: Sequence) -> None:
        """What was computed of it is found by later prompts."""
        if self.prefix is not None and sequence.owns_kv and sequence.kv is not None:
            self.prefix.seal(sequence.kv, sequence.token_ids, self._rotation(sequence))

    def share_ram(self, plan: Plan | None) -> None:
        """Memory is shared out by this plan now; None: as it is."""
        if self.prefix is not None and plan is not None:
            self.prefix.limit_ram(kept_bytes(self._reuse, plan))

    def give_up_ram(self) -> bool:
        """Whether pages that only serve later prompts gave memory back."""
        return self.prefix is not None and self.prefix.ram_used_bytes > 0 and self.prefix.limit_ram(0)

    def gives_way(self, error: Exception, rows: int) -> bool:
        """Whether memory ran out, in a forward of so many tokens, and something could be given up for it: at first what
        only serves later prompts. The next step tries again."""
        try:
            if not is_out_of_memory(error):
                return False
            if not is_device_out_of_memory(error) and self.give_up_ram():
                return True
            return self._residency.give_way(error, rows)
        except (MemoryError, RuntimeError, LocalLLMError) as another:  # nothing is left: the first error is to be told
            if isinstance(another, RuntimeError) and not is_out_of_memory(another):
                raise
            return False

    def close(self) -> None:
        """Waits a moment for what is on its way to the disk."""
        if self.prefix is not None:
            self.prefix.close(_CLOSE_S)

    def _rotation(self, sequence: Sequence) -> bytes:
        """LongRoPE rotates the keys of a long sequence differently: those are other pages."""
        switch = self._residency.config.rope_switch_length
        return b"long" if switch is not None and len(sequence.token_ids) > switch else b""
