"""Slots of memory for experts that rest on the disk: those used last stay, the others are read when they are wanted,
or a little before where the disk has nothing else to do.

Knows nothing of what a record holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.offload.streaming.disk_stream import STALLED_S, StreamClock
from localllm.offload.streaming.expert_uses import ExpertUses
from localllm.offload.streaming.foresight import Foresight
from localllm.offload.streaming.lru_slots import Expert, LruSlots
from localllm.offload.streaming.record_reads import RecordFile, RecordRead, RecordReads


@dataclass(frozen=True)
class ExpertFile:
    """The file of one block. begin: of its first record, in bytes; the records lie one behind the other.

    check: sees the bytes of a record when it is there for the first time, and raises CheckpointError where they are not
    right. fix: the command that makes the file anew. active: how many records a token wants.
    """

    block: str
    path: Path
    begin: int
    count: int
    check: Callable[[int, memoryview], None]
    fix: str
    active: int = 0


@dataclass(frozen=True)
class _Block:
    """table int64 [experts]: the addresses of the records that are here. checked: the records that have been."""

    file: ExpertFile
    opened: RecordFile
    table: Tensor
    checked: set[int] = field(default_factory=set)


class ExpertPool:
    """Records of one size in the slots of `memory`, uint8 [slots, bytes of a record], aligned to a page.

    uses: is told of every step. One thread asks. Raises CheckpointError where a file cannot be opened.
    """

    def __init__(self, files: Sequence[ExpertFile], memory: Tensor, uses: ExpertUses | None = None) -> None:
        self.memory = memory
        self.clock = StreamClock()
        self.hits = self.wanted = 0
        self._uses = uses or ExpertUses()
        self._slots = LruSlots(len(memory))
        self._arriving: dict[Expert, RecordRead] = {}  # reads that have not ended: their slots are being written
        self._foresight = Foresight()
        self._foreseen: Expert | None = None  # what was read as foreseen, until the next block is asked for
        with ExitStack() as opened:
            self._blocks = {
                file.block: _Block(
                    file,
                    opened.enter_context(closing(RecordFile(file.path, file.begin, memory.shape[1], file.fix))),
                    torch.zeros(file.count, dtype=torch.int64),
                )
                for file in files
            }
            self._opened = opened.pop_all()
        self._reads = RecordReads()

    @property
    def num_slots(self) -> int:
        return len(self.memory)

    def table(self, block: str) -> Tensor:
        """The addresses of a block's records, int64 [experts]: 0 for those that are not here. It is always the same
        tensor."""
        return self._blocks[block].table

    def is_read_by_kernel(self, block: str) -> bool:
        """Return whether no thread reads a block's experts, as far as the last read has told: only then guessing them
        is worth while."""
        return self._blocks[block].opened.is_read_by_kernel

    def record(self, block: str, index: int) -> Tensor:
        """Return the bytes of a record that is held, uint8."""
        return self.memory[self._slots[block, index]]

    def held(
        self, block: str, experts: Collection[int], foresee: Callable[[], Sequence[Expert]] | None = None
    ) -> Generator[list[int], None, None]:
        """Yield the experts in groups, whatever their order: first those that are here, then those that have been read.
        A group is in its slots until the next one is asked for. Whoever stops before the last one closes this; what the
        disk is reading then goes on, and is kept.

        foresee: says which experts the block of the next call may want, most likely ones first. It is asked while the
        disk reads for this block. Behind that the first one that is not here is read, where that is worth it.

        Raises CheckpointError naming the file and the record that cannot be read or is damaged.
        """
        while self._arriving and self._reads.look():
            self._take_next(block, ())
        self._foresight.learn(block, experts)
        here, awaited, missing = self._sorted(block, experts)
        guesses: Sequence[Expert] = ()
        kept, num_missing = {(block, index) for index in here}, len(missing)
        try:
            self._foresight.disk_is_busy()
            self._begin(block, missing, kept, awaited)
            if foresee is not None and num_missing:
                guesses = foresee()
            if here:
                yield here
            kept.clear()
            while missing or awaited:
                self._begin(block, missing, kept, awaited)  # into slots of the last group, which may be evicted now
                read = self._finished(block, awaited)
                kept = {(block, index) for index in read}
                self._begin(block, missing, kept, awaited)  # so that the disk reads while this group is computed
                if guesses and not missing and not self._arriving:
                    self._foresight.disk_is_idle(num_missing)
                    self._begin_foreseen(guesses, kept)
                if read:
                    yield read
                kept = set()
        finally:
            self._give_up()

    def close(self) -> None:
        if self._reads.close(STALLED_S):  # else the disk may still answer one
            self._opened.close()

    def _sorted(self, block: str, experts: Collection[int]) -> tuple[list[int], set[int], list[int]]:
        """Count the experts as used; return those that are here, those that are being read, and the others."""
        here: list[int] = []
        awaited: set[int] = set()
        missing: list[int] = []
        for index in experts:
            if (block, index) not in self._slots:
                missing.append(index)
                continue
            self._slots.use((block, index))
            if (block, index) in self._arriving:
                awaited.add(index)
            else:
                here.append(index)
        hits, foreseen, self._foreseen = len(here), self._foreseen, None
        if foreseen is not None and foreseen[0] == block and foreseen[1] in experts:
            hits -= foreseen[1] in here  # it had to be read
        elif foreseen is not None and foreseen in self._slots:
            self._slots.evict_next(foreseen)
        self.hits += hits
        self.wanted += len(experts)
        file = self._blocks[block].file
        self._uses.see(block, [*experts], file.count, hits if len(experts) == file.active else None)
        return here, awaited, missing

    def _begin(self, block: str, missing: list[int], kept: set[Expert], awaited: set[int]) -> None:
        """Begin to read as many of the missing ones as there are slots for; they leave `missing`."""
        begun = []
        stays = kept.union(self._arriving)
        while missing and (read := self._placed((block, missing[0]), stays)) is not None:
            stays.add(read.expert)
            awaited.add(missing.pop(0))
            begun.append(read)
        self._reads.begin(begun)

    def _begin_foreseen(self, guesses: Sequence[Expert], kept: set[Expert]) -> None:
        """Begin to read the first that is not here: with a second record the disk would not be done in time."""
        guess = next((each for each in guesses if each not in self._slots), None)
        if guess is None:
            return
        self._foresight.guess(guess)
        if self._foresight.is_worth(guess) and (read := self._placed(guess, kept.union(guesses))) is not None:
            self._foreseen = guess
            self._reads.begin([read])

    def _placed(self, expert: Expert, stays: set[Expert]) -> RecordRead | None:
        """Give an expert a slot, and return the read that fills it; None where none of the others may be evicted."""
        taken = self._slots.take(expert, stays)
        if taken is None:
            return None
        slot, evicted = taken
        if evicted is not None:
            self._blocks[evicted[0]].table[evicted[1]] = 0
        memory = self.memory[slot]
        read = RecordRead(expert, self._blocks[expert[0]].opened, memory.numpy().data, memory.data_ptr())
        self._arriving[expert] = read
        return read

    def _finished(self, block: str, awaited: set[int]) -> list[int]:
        """Wait for the next record that is read, and return those of the awaited experts that came with it."""
        began, found = time.perf_counter(), []
        try:
            while True:
                index = self._take_next(block, awaited)
                if index is not None:
                    awaited.remove(index)
                    found.append(index)
                if not awaited or not self._reads.has_next:
                    return found
        finally:
            waited_s = time.perf_counter() - began
            self.clock.wait_s += waited_s
            self.clock.reading_s += waited_s

    def _take_next(self, block: str, awaited: Collection[int]) -> int | None:
        """Wait for a record that is read, and return its number if it is an awaited one. Raises CheckpointError where
        an awaited one could not be read; what nobody awaits is forgotten then."""
        try:
            read, error = self._reads.next(STALLED_S)
        except Empty:
            raise self._stalled(block) from None
        if self._arriving.get(read.expert) is not read:  # a disk answers that was not waited for any longer
            return None
        is_awaited = read.expert[0] == block and read.index in awaited
        try:
            if error is not None:
                raise error
            self._check(read)
            self._blocks[read.expert[0]].table[read.index] = read.address
            self.clock.bytes_read += len(read.record)
        except BaseException as failure:
            self._slots.free(read.expert)
            if is_awaited or not isinstance(failure, CheckpointError):
                raise
        finally:
            del self._arriving[read.expert]
        return read.index if is_awaited else None

    def _stalled(self, block: str) -> CheckpointError:
        """Return what is to be said of a disk that gives nothing. It may still write to the slots of what it was asked
        for: they are lost."""
        self._give_up()
        for expert in self._arriving:
            self._slots.retire(expert)
        self._arriving.clear()
        return self._blocks[block].opened.refusal("gives nothing", f"no byte came for {STALLED_S:.0f} seconds")

    def _check(self, read: RecordRead) -> None:
        own = self._blocks[read.expert[0]]
        own.opened.require_unchanged(f"expert {read.index} may be another one now")
        if read.index not in own.checked:
            own.file.check(read.index, read.record)
            own.checked.add(read.index)

    def _give_up(self) -> None:
        """Forget what only waits in line for the disk; what it is reading will be here when it is wanted again."""
        for read in self._reads.drop_waiting():
            del self._arriving[read.expert]
            self._slots.free(read.expert)
