"""Slots of memory for experts that rest on the disk: those used last stay, the others are read when they are wanted.

Knows nothing of what a record holds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import torch
from torch import Tensor

from localllm.offload.streaming.disk_stream import STALLED_S, StreamClock
from localllm.offload.streaming.expert_uses import ExpertUses
from localllm.offload.streaming.record_reads import RecordFile, RecordRead, RecordReads


@dataclass(frozen=True)
class ExpertFile:
    """The file of one block. begin: of its first record, in bytes; the records lie one behind the other.

    check: sees the bytes of a record when it is there for the first time, and raises LocalLLMError where they are not
    right. fix: the command that makes the file anew. active: how many records a token wants.
    """

    block: str
    path: Path
    begin: int
    count: int
    check: Callable[[int, memoryview], None]
    fix: str
    active: int = 0


Expert = tuple[str, int]  # a block's name, and a number in it


class ExpertPool:
    """Records of one size in the slots of `memory`, uint8 [slots, bytes of a record], aligned to a page.

    uses: is told of every step. One thread asks. Raises CheckpointError where a file cannot be opened.
    """

    def __init__(self, files: Sequence[ExpertFile], memory: Tensor, uses: ExpertUses | None = None) -> None:
        self.memory = memory
        self.clock = StreamClock()
        self.hits = self.wanted = 0
        self._uses = uses or ExpertUses()
        self._slots: OrderedDict[Expert, int] = OrderedDict()  # those used last at the end
        self._free = list(range(len(memory)))
        self._tables = {file.block: torch.zeros(file.count, dtype=torch.int64) for file in files}
        self._experts = {file.block: file for file in files}
        self._checked: set[Expert] = set()
        self._call = 0  # of `held`: what a disk gives after an earlier one has given up is not taken for this one's
        self._unwritten: set[int] = set()  # the experts of this call whose slots are still written to
        with ExitStack() as opened:
            self._files = {
                file.block: opened.enter_context(closing(RecordFile(file.path, file.begin, memory.shape[1], file.fix)))
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
        return self._tables[block]

    def record(self, block: str, index: int) -> Tensor:
        """Return the bytes of a record that is held, uint8."""
        return self.memory[self._slots[block, index]]

    def held(self, block: str, experts: Sequence[int]) -> Generator[list[int], None, None]:
        """Yield the experts in groups, whatever their order: first those that are here, then those that have been read.
        A group is in its slots until the next one is asked for; whoever stops before the last one closes this.

        Raises CheckpointError naming the file and the record that cannot be read or is damaged.
        """
        self.wanted += len(experts)
        self._call += 1
        here = [index for index in experts if (block, index) in self._slots]
        missing = [index for index in experts if (block, index) not in self._slots]
        self.hits += len(here)
        file = self._experts[block]
        self._uses.see(block, experts, file.count, len(here) if len(experts) == file.active else None)
        for index in here:
            self._slots.move_to_end((block, index))
        kept = {(block, index) for index in here}
        reads: set[int] = set()  # the experts that are still to come
        try:
            self._begin(block, missing, kept, reads)
            if here:
                yield here
            kept.clear()
            while missing or reads:
                self._begin(block, missing, kept, reads)
                read = self._finished(block, reads)
                kept = {(block, index) for index in read}
                self._begin(block, missing, kept, reads)
                yield read
                kept = set()
        finally:
            self._give_up(block, reads)

    def close(self) -> None:
        if self._reads.close(STALLED_S):  # else the disk may still answer one
            self._opened.close()

    def _begin(self, block: str, missing: list[int], kept: set[Expert], reads: set[int]) -> None:
        """Begin to read as many of the missing ones as there are slots for; they leave `missing`."""
        stays, begun = kept | {(block, index) for index in reads}, []
        while missing and (slot := self._free_slot(stays)) is not None:
            index = missing.pop(0)
            self._slots[block, index] = slot
            reads.add(index)
            self._unwritten.add(index)
            stays.add((block, index))
            memory = self.memory[slot]
            begun.append(RecordRead(self._call, self._files[block], index, memory.numpy().data, memory.data_ptr()))
        self._reads.begin(begun)

    def _free_slot(self, kept: set[Expert]) -> int | None:
        """Return a slot, of the expert that was used longest ago where all are taken; None where all must stay."""
        if self._free:
            return self._free.pop()
        oldest = next((expert for expert in self._slots if expert not in kept), None)
        if oldest is None:
            return None
        block, index = oldest
        self._tables[block][index] = 0
        return self._slots.pop(oldest)

    def _finished(self, block: str, reads: set[int]) -> list[int]:
        """Wait for the next expert that is read, and return it with those that came with it."""
        file, began = self._files[block], time.perf_counter()
        found = [self._next_read(file).index]
        while len(found) < len(reads) and self._reads.has_next:
            found.append(self._next_read(file).index)
        waited_s = time.perf_counter() - began
        self.clock.wait_s += waited_s
        self.clock.reading_s += waited_s
        for index in found:
            file.require_unchanged(f"expert {index} may be another one now")
            if (block, index) not in self._checked:
                self._experts[block].check(index, self.record(block, index).numpy().data)
                self._checked.add((block, index))
        for index in found:
            reads.remove(index)
            self._tables[block][index] = self.record(block, index).data_ptr()
            self.clock.bytes_read += self.memory.shape[1]
        return found

    def _next_read(self, file: RecordFile) -> RecordRead:
        """Return what was read next. Raises CheckpointError where it could not be."""
        try:
            read, error = self._reads.next(STALLED_S)
            while read.call != self._call:
                read, error = self._reads.next(STALLED_S)
        except Empty:
            raise file.refusal("gives nothing", f"no byte came for {STALLED_S:.0f} seconds") from None
        self._unwritten.remove(read.index)
        if error is not None:
            raise error
        return read

    def _give_up(self, block: str, reads: set[int]) -> None:
        """Forget what was asked for and is not here, once nothing is written to its slots any more."""
        self._unwritten -= {read.index for read in self._reads.drop_waiting() if read.call == self._call}
        while self._unwritten:
            try:
                read, _ = self._reads.next(STALLED_S)
            except Empty:  # the slots stay with a disk that may still write to them
                break
            if read.call == self._call:
                self._unwritten.discard(read.index)
        for index in reads:
            slot = self._slots.pop((block, index))
            if index not in self._unwritten:
                self._free.append(slot)
        self._unwritten.clear()
        reads.clear()
