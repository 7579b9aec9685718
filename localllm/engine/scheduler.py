"""Which sequences run in the next step, how many of their tokens, and in which pages."""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as SetOf

from localllm.cache.paged_kv import shared_tokens
from localllm.engine.events import ignore
from localllm.engine.kv_allocator import KVAllocator, tokens_needed
from localllm.engine.memory import is_out_of_memory
from localllm.engine.sequence import Sequence
from localllm.engine.step_types import Chunk, Limits
from localllm.errors import LocalLLMError
from localllm.kernels.kv_page import PAGE_TOKENS

Scheduled = SequenceOf[tuple[Sequence, Chunk]]

# Of a prompt that has logits behind every token, a step: of a vocabulary of 150,000 they take 77 MB.
LOGIT_ROWS = 128
PRIORITY_CHUNKS = 32  # of prompts, by which one priority is served sooner than the next


class Scheduler:
    """First come, first served, but that a short prompt passes long ones. A step is one chunk of one prompt, or one
    token of every running answer, in turn.

    A prompt of n chunks is due when n chunks of any prompts have been computed since it came, and what is due first
    goes first: one of 16 is passed by shorter ones for as long as 16 chunks take, and by none that comes later.

    **Prompts that begin alike are computed once.** Who waits while a prefix leader computes what its own prompt begins
    with finds those pages when they are full; the leader is then due as soon as the follower, and others pass. Whose
    prompt is the same to its end goes on with a branch of the leader's cache, and samples its first token from the same
    logits: bit for bit what it would have computed alone. Nothing is stored of who waits for whom: when the leader
    ends, for whatever reason, the next look finds nobody to wait for.

    With `shares_steps` a step is a token of every answer and as much of the prompts as a chunk has tokens. Either way
    the runner computes each prompt by itself: the arithmetic of a request, and so its text, does not depend on what
    else is running.
    """

    def __init__(self, limits: Limits, allocator: KVAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        # Guards what arrives and the aborted set, in any thread: to abort what has not been taken in yet is heard all
        # the same. All else belongs to the thread that steps.
        self._lock = threading.Lock()
        self._arrived: deque[Sequence] = deque()
        self._aborted: set[int] = set()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.on_block: Callable[[], None] = ignore  # called between two blocks of a forward
        self._decodes_next = False
        self.num_chunks = 0  # of prompts, that were computed
        self.used_at = time.monotonic()  # when a request came, or one ended

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._arrived)

    @property
    def has_aborted(self) -> bool:
        """Whether a request was aborted whose end nobody has reported yet."""
        return bool(self._aborted)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; from any thread."""
        chunks = -(-sequence.num_prompt_tokens // self.limits.chunk_tokens)
        with self._lock:
            sequence.due = self.num_chunks + chunks - PRIORITY_CHUNKS * sequence.request.priority
            self._arrived.append(sequence)
            self.used_at = time.monotonic()

    def abort(self, request_id: int) -> None:
        """Have the next step remove a request, and a running forward of it stop; from any thread."""
        with self._lock:
            self._aborted.add(request_id)

    def is_cancelled(self, ids: SetOf[int], *, all_of_them: bool = False) -> Callable[[], bool]:
        """Return what a forward asks between two blocks: whether one of these requests was aborted, or all of them."""

        def is_cancelled() -> bool:
            self.on_block()
            return ids <= self._aborted if all_of_them else not ids.isdisjoint(self._aborted)

        return is_cancelled

    def take_in(self) -> list[Sequence]:
        """Let what has arrived wait for its turn; return the sequences that were aborted, which the caller removes."""
        with self._lock:
            self._queue_arrived()
            if not self._aborted:
                return []
            aborted = [sequence for sequence in self.sequences if sequence.request_id in self._aborted]
            self._aborted.clear()
        return aborted

    def _queue_arrived(self) -> None:
        while self._arrived:
            bisect.insort(self.waiting, self._arrived.popleft(), key=lambda sequence: sequence.due)

    def schedule(self) -> Scheduled:
        """Return what the next step computes; [] where nothing is left to do."""
        self._queue_arrived()
        awaited = self._admit()
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decoding if _pending(sequence) <= 1 else prefilling).append(sequence)
        prefilling.sort(key=lambda sequence: min(sequence.due, awaited.get(sequence.request_id, sequence.due)))
        decodes = [(sequence, self._chunk(sequence, 1)) for sequence in decoding]
        if self.limits.shares_steps:
            self.num_chunks += bool(prefilling)
            num_tokens = self.limits.chunk_tokens  # of all of them together
            for sequence in prefilling:
                if num_tokens > 0:
                    decodes.append((sequence, self._chunk(sequence, num_tokens)))
                    num_tokens -= decodes[-1][1].num_rows
            return decodes
        if decodes and (self._decodes_next or not prefilling):
            self._decodes_next = False
            return decodes
        self._decodes_next = True
        self.num_chunks += 1
        return [(sequence, self._chunk(sequence, self.limits.chunk_tokens)) for sequence in prefilling[:1]]

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Return what a step computes of a sequence, so many tokens at most. What comes for nothing in front of them is
        filled now."""
        assert sequence.kv is not None
        pending = _pending(sequence)
        if sequence.planned or (sequence.kv.moved and pending > 1):
            is_cancelled = self.is_cancelled({sequence.request_id})
            num_tokens = min(pending, self.allocator.move_in(sequence, num_tokens, is_cancelled))
        num_tokens = min(pending, num_tokens, LOGIT_ROWS if sequence.reads_logits else num_tokens)
        return Chunk(sequence.token_ids, sequence.kv, num_tokens, all_logits=sequence.reads_logits)

    def follow(self, leader: Sequence) -> list[Sequence]:
        """Admit those who wait for this prompt, which has just been computed to its end, as many as there is room for:
        each with a branch of the leader's cache."""
        followers: list[Sequence] = []
        for sequence in list(self.waiting):
            if not _has_same_prompt(sequence, leader):
                if self._leader_of(sequence) is None:  # it is no other's turn before this one's
                    break
                continue
            is_whole = leader.num_prompt_tokens <= self.limits.held_tokens  # else pages of it have left
            shared = leader.num_prompt_tokens // PAGE_TOKENS * PAGE_TOKENS if is_whole else 0
            own = self._reserved(sequence) - shared
            if sequence.wants_growth or not self._has_room(own):
                break
            try:
                self.allocator.branch(leader, sequence)
            except (MemoryError, RuntimeError):
                break  # it computes what is not known by then
            sequence.num_cached_tokens = sequence.num_prompt_tokens
            sequence.clock.prefill_started, sequence.clock.ran_alone = time.perf_counter(), False
            self.waiting.remove(sequence)
            self.running.append(sequence)
            followers.append(sequence)
        return followers

    def remove(self, sequences: Iterable[Sequence]) -> None:
        gone = {id(sequence): sequence for sequence in sequences}
        self.used_at = time.monotonic()
        for sequence in gone.values():
            self.allocator.release(sequence)
        self.running = [s for s in self.running if id(s) not in gone]
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def _admit(self) -> dict[int, int]:
        """Let those run who can; who waits for a leader keeps a place. Return when a follower of each leader is due
        first, by the leaders' request ids."""
        awaited: dict[int, int] = {}
        placed: list[Sequence] = []
        for sequence in list(self.waiting) if len(self.running) < self.limits.max_sequences else ():
            if sequence.wants_growth:  # blocks move for it, which no forward may be using
                break
            if (leader := self._leader_of(sequence)) is not None:
                awaited.setdefault(leader.request_id, sequence.due)
                placed.append(sequence)
                continue
            if not self._has_room(self._reserved(sequence), placed):
                break
            try:
                self.allocator.allocate(sequence, self.is_cancelled({sequence.request_id}))
            except (MemoryError, RuntimeError, LocalLLMError) as error:
                if self.running and is_out_of_memory(error):  # when an answer ends there is more
                    break
                self.waiting.remove(sequence)  # who hears of the failure looks at the first one
                self.waiting.appendleft(sequence)
                raise
            self.waiting.remove(sequence)
            self.running.append(sequence)
        return awaited

    def _leader_of(self, sequence: Sequence) -> Sequence | None:
        """Return the running sequence that is computing what this prompt begins with, at least a page of it."""
        if sequence.pool is not None or sequence.reads_logits:  # it needs its own states or logits
            return None
        return next((leader for leader in self.running if self._leads(leader, sequence)), None)

    def _leads(self, leader: Sequence, waiting: Sequence) -> bool:
        if leader.pool is not None or leader.kv is None or leader.kv.length >= leader.num_prompt_tokens:
            return False
        if not _is_computed_alike(leader, waiting):
            return False
        if _has_same_prompt(leader, waiting):
            return True
        # Where prompts share a step and both fit into one, waiting for a part would cost another pass over the weights;
        # where they are computed one by one, who waits loses nothing.
        if self.limits.shares_steps and leader.num_prompt_tokens - leader.kv.length < self.limits.chunk_tokens:
            return False
        own, theirs = waiting.request.prompt_ids, leader.request.prompt_ids
        end = (leader.kv.length // PAGE_TOKENS + 1) * PAGE_TOKENS  # of the next page that will be full
        if not end < len(own) or not end <= len(theirs):
            return False
        return own[:PAGE_TOKENS] == theirs[:PAGE_TOKENS] and own[:end] == theirs[:end]

    def _has_room(self, num_tokens: int, placed: SequenceOf[Sequence] = ()) -> bool:
        """Return whether one more sequence of so many tokens may run. placed: who will run beside those that do."""
        if not self.running:
            return True
        if len(self.running) + len(placed) >= self.limits.max_sequences:
            return False
        reserved = sum(self._reserved(sequence) for sequence in (*self.running, *placed))
        shared = shared_tokens(sequence.kv for sequence in self.running if sequence.kv is not None)
        return reserved + num_tokens - shared <= self.limits.kv_tokens

    def _reserved(self, sequence: Sequence) -> int:
        return tokens_needed(sequence.request, sequence.max_length, self.limits)


def _has_same_prompt(one: Sequence, other: Sequence) -> bool:
    ids, others = one.request.prompt_ids, other.request.prompt_ids
    is_plain = one.pool is other.pool is None and not one.reads_logits
    return len(ids) == len(others) and ids == others and is_plain and _is_computed_alike(one, other)


def _is_computed_alike(one: Sequence, other: Sequence) -> bool:
    has_same_adapters = one.adapters == other.adapters and one.request.adapters == other.request.adapters
    return has_same_adapters and one.request.reuse == other.request.reuse


def _pending(sequence: Sequence) -> int:
    return len(sequence.token_ids) - (sequence.kv.length if sequence.kv else 0)
