"""Which sequences run in the next step, and how many of their tokens."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from localllm.cache.paged_kv import shared_tokens
from localllm.engine.memory import is_out_of_memory
from localllm.engine.runner import Chunk
from localllm.engine.sequence import Sequence
from localllm.engine.sharing import has_same_prompt, reader_for
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.offload.planner.plan import Plan


@dataclass(frozen=True)
class Limits:
    # Of a prompt, a step: it must not keep the running answers waiting. A plan has as many as are computed at once.
    chunk_tokens: int = 512
    max_sequences: int = 8  # as many rows as the CPU kernel computes without changing a bit of any
    kv_tokens: int = 1 << 62  # of all running sequences together: what was found to fit at load
    sequence_tokens: int = 0  # that each takes of them beside its own: dense pages, and the rest of the last one
    # Whether prompts and answers share a step: where each reads blocks from the disk, one reading serves them all.
    shares_steps: bool = False

    def within(self, plan: Plan | None) -> Limits:
        """The memory that there is; where blocks are streamed, as much as can be shares one reading of them."""
        if plan is None:
            return self
        each = -(-plan.shape.kv_bytes_per_sequence // plan.shape.kv_bytes_per_token)
        limits = replace(self, kv_tokens=plan.most_kv_tokens + plan.sequences * each, sequence_tokens=each)
        if plan.ring_bytes:
            return replace(limits, chunk_tokens=plan.pass_tokens, shares_steps=True)
        asked = limits.chunk_tokens != Limits.chunk_tokens
        return replace(limits, chunk_tokens=min(limits.chunk_tokens, plan.batch_rows) if asked else plan.batch_rows)


# Of a prompt that has logits behind every token, a step: of a vocabulary of 150,000 they take 77 MB.
LOGIT_ROWS = 128
PRIORITY_CHUNKS = 32  # of prompts, by which one priority is served sooner than the next


class Scheduler:
    """First come, first served, but that a short prompt passes long ones. A step is one chunk of one prompt, or one
    token of every running answer, in turn.

    A prompt of n chunks is due when n chunks of any prompts have been read since it came, and what is due first is read
    first: one of 16 is passed by shorter ones for as long as 16 chunks take, and by none that comes later.

    A prompt that begins as one that is being read waits for it, see `engine.sharing`: that one is then due as soon as
    itself, and others pass.

    With `shares_steps` it is a token of every answer and as much of the prompts as a chunk has tokens. Either way the
    runner computes each prompt by itself: the arithmetic of a request, and so its text, does not depend on what else
    is running.
    """

    def __init__(self, limits: Limits, admit: Callable[[Sequence], None]) -> None:
        """admit: gives a sequence its KV cache, or raises what torch does where there is no memory."""
        self.limits = limits
        self._arrived: deque[Sequence] = deque()  # in any thread; all else is of the one that steps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._give_kv = admit
        self._answers_are_next = False
        self.num_chunks = 0  # of prompts, that were read
        self.used_at = time.monotonic()  # when a request came, or one ended

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._arrived)

    def add(self, sequence: Sequence) -> None:
        """It waits to be taken in; from any thread."""
        chunks = -(-sequence.num_prompt_tokens // self.limits.chunk_tokens)
        sequence.due = self.num_chunks + chunks - PRIORITY_CHUNKS * sequence.request.priority
        self._arrived.append(sequence)
        self.used_at = time.monotonic()

    def take_in(self) -> None:
        """What has arrived waits for its turn."""
        while self._arrived:
            bisect.insort(self.waiting, self._arrived.popleft(), key=_due)

    def schedule(self) -> SequenceOf[tuple[Sequence, Chunk]]:
        """What the next step computes; [] where nothing is left to do."""
        self.take_in()
        awaited = self._admit()
        answering = [sequence for sequence in self.running if _is_answering(sequence)]
        reading = [sequence for sequence in self.running if not _is_answering(sequence)]
        reading.sort(key=lambda sequence: min(sequence.due, awaited.get(sequence.request_id, sequence.due)))
        answers = [(sequence, chunk) for sequence in answering for chunk in _answer_chunks(sequence)]
        if self.limits.shares_steps:
            self.num_chunks += bool(reading)
            return [*answers, *self._chunks(reading, self.limits.chunk_tokens)]
        if answers and (self._answers_are_next or not reading):
            self._answers_are_next = False
            return answers
        self._answers_are_next = True
        self.num_chunks += 1
        return [(sequence, self._chunk(sequence, self.limits.chunk_tokens)) for sequence in reading[:1]]

    def follow(self, reader: Sequence) -> list[Sequence]:
        """Of those that wait for this prompt, which has just been read to its end, as many as there is room for now:
        they run from here on, each with a branch of its cache."""
        followers: list[Sequence] = []
        for sequence in list(self.waiting):
            if not has_same_prompt(sequence, reader):
                if self._reader_for(sequence) is None:  # it is no other's turn before this one's
                    break
                continue
            own = self._reserved(sequence) - reader.num_prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
            if sequence.wants_growth or not self._has_room(own):
                break
            assert reader.kv is not None
            try:
                sequence.kv = reader.kv.branch(sequence.kv_capacity)
            except (MemoryError, RuntimeError):
                break  # it reads what is not known by then
            sequence.num_cached_tokens = sequence.num_prompt_tokens
            sequence.clock.prefill_started, sequence.clock.ran_alone = time.perf_counter(), False
            self.waiting.remove(sequence)
            self.running.append(sequence)
            followers.append(sequence)
        return followers

    def _chunks(self, sequences: Iterable[Sequence], num_tokens: int) -> Iterator[tuple[Sequence, Chunk]]:
        """The next tokens of these sequences in turn, so many in all."""
        for sequence in sequences:
            if num_tokens <= 0:
                return
            chunk = self._chunk(sequence, num_tokens)
            num_tokens -= chunk.num_tokens
            yield sequence, chunk

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        assert sequence.kv is not None
        num_tokens = min(_pending(sequence), num_tokens, LOGIT_ROWS if sequence.reads_logits else num_tokens)
        return Chunk(sequence.token_ids, sequence.kv, num_tokens, all_logits=sequence.reads_logits)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        gone = {id(sequence): sequence for sequence in sequences}
        self.used_at = time.monotonic()
        for sequence in gone.values():
            if sequence.search is not None:
                sequence.search.close()
            if sequence.kv is not None and sequence.owns_kv:
                sequence.kv.close()
        self.running = [s for s in self.running if id(s) not in gone]
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def _admit(self) -> dict[int, int]:
        """Who can runs; who waits for another's prompt keeps a place. Of those that others wait for, by their requests'
        ids: when the first of these is due."""
        awaited: dict[int, int] = {}
        placed: list[Sequence] = []
        for sequence in list(self.waiting) if len(self.running) < self.limits.max_sequences else ():
            if sequence.wants_growth:  # blocks move for it, which no forward may be using
                break
            if (reader := self._reader_for(sequence)) is not None:
                awaited.setdefault(reader.request_id, sequence.due)
                placed.append(sequence)
                continue
            if not self._has_room(self._reserved(sequence), placed):
                break
            try:
                self._give_kv(sequence)
            except (MemoryError, RuntimeError) as error:
                if self.running and is_out_of_memory(error):  # when an answer ends there is more
                    break
                self.waiting.remove(sequence)  # who is told of it looks at the first one
                self.waiting.appendleft(sequence)
                raise
            self.waiting.remove(sequence)
            self.running.append(sequence)
        return awaited

    def _reader_for(self, sequence: Sequence) -> Sequence | None:
        return reader_for(sequence, self.running, self.limits.chunk_tokens if self.limits.shares_steps else None)

    def _has_room(self, num_tokens: int, placed: SequenceOf[Sequence] = ()) -> bool:
        """For one more that takes so many. placed: who will run beside those that do."""
        if not self.running:
            return True
        if len(self.running) + len(placed) >= self.limits.max_sequences:
            return False
        reserved = sum(self._reserved(sequence) for sequence in (*self.running, *placed))
        shared = shared_tokens(sequence.kv for sequence in self.running if sequence.kv is not None)
        return reserved + num_tokens - shared <= self.limits.kv_tokens

    def _reserved(self, sequence: Sequence) -> int:
        return tokens_needed(sequence.num_prompt_tokens, sequence.max_length, sequence.request.beams, self.limits)


def tokens_needed(num_prompt_tokens: int, max_length: int, beams: int, limits: Limits) -> int:
    """Room of keys and values for a request: beams share the full pages of its prompt, which they branch off from."""
    each = limits.sequence_tokens
    if beams == 1:
        return max_length + each
    return num_prompt_tokens + each + beams * (max_length - num_prompt_tokens + PAGE_TOKENS + each)


def _is_answering(sequence: Sequence) -> bool:
    is_searching = sequence.search is not None and sequence.search.has_begun
    return is_searching or _pending(sequence) == 1


def _answer_chunks(sequence: Sequence) -> SequenceOf[Chunk]:
    """Of the next token; of a search, one for each beam."""
    if sequence.search is not None and sequence.search.has_begun:
        return sequence.search.chunks
    assert sequence.kv is not None
    return [Chunk(sequence.token_ids, sequence.kv, 1)]


def _due(sequence: Sequence) -> int:
    return sequence.due


def _pending(sequence: Sequence) -> int:
    return len(sequence.token_ids) - (sequence.kv.length if sequence.kv else 0)
