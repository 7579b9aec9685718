"""Slots of memory for experts that rest on the disk: those used last stay, the others are read when they are wanted.

A record is read whole, many of them at a time, from the page cache where that has the file and past it else. Knows
nothing of what a record holds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.offload.streaming.disk_read import CACHED_SHARE, cached_share, open_direct, open_plain, read_into
from localllm.offload.streaming.disk_stream import STALLED_S, StreamClock
from localllm.offload.streaming.expert_uses import ExpertUses

# A token misses two or three experts of a block, 2.6 MB each. Read whole by four threads they come at 3.3 GB/s, as
# fast as the disk is; in pieces of 1 MB by eight, which the interpreter passes on one by one, at 1.2.
READERS = 4


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
        with ExitStack() as opened:
            self._files = {file.block: opened.enter_context(_OpenRecords(file)) for file in files}
            self._opened = opened.pop_all()
        self._wanted: SimpleQueue[_Read | None] = SimpleQueue()  # None ends a reader
        self._read: SimpleQueue[tuple[_Read, Exception | None]] = SimpleQueue()  # with why it could not be, if so
        self._call = 0  # of `held`: what a disk gives after an earlier one has given up is not taken for this one's
        self._readers = [threading.Thread(target=self._work, name="experts", daemon=True) for _ in range(READERS)]
        for reader in self._readers:
            reader.start()

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
        self._call = call = self._call + 1
        here = [index for index in experts if (block, index) in self._slots]
        missing = [index for index in experts if (block, index) not in self._slots]
        self.hits += len(here)
        file = self._files[block].file
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
            self._give_up(block, reads, call)

    def close(self) -> None:
        for _ in self._readers:
            self._wanted.put(None)
        for reader in self._readers:
            reader.join(STALLED_S)
        if not any(reader.is_alive() for reader in self._readers):  # else the disk may still answer one
            self._opened.close()

    def _begin(self, block: str, missing: list[int], kept: set[Expert], reads: set[int]) -> None:
        """Begin to read as many of the missing ones as there are slots for; they leave `missing`."""
        while missing and (slot := self._free_slot(kept | {(block, index) for index in reads})) is not None:
            index = missing.pop(0)
            self._slots[block, index] = slot
            reads.add(index)
            self._wanted.put(_Read(self._call, self._files[block], index, self.memory[slot].numpy().data))

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
        while len(found) < len(reads) and not self._read.empty():
            found.append(self._next_read(file).index)
        waited_s = time.perf_counter() - began
        self.clock.wait_s += waited_s
        self.clock.reading_s += waited_s
        for index in found:
            file.check(index, self.record(block, index).numpy().data)
        for index in found:
            reads.remove(index)
            self._tables[block][index] = self.record(block, index).data_ptr()
            self.clock.bytes_read += self.memory.shape[1]
        return found

    def _next_read(self, file: _OpenRecords) -> _Read:
        """Return what was read next. Raises CheckpointError where it could not be."""
        try:
            read, error = self._read.get(timeout=STALLED_S)
            while read.call != self._call:
                read, error = self._read.get(timeout=STALLED_S)
        except Empty:
            raise file.refusal("gives nothing", f"no byte came for {STALLED_S:.0f} seconds") from None
        if error is not None:
            self._read.put((read, None))  # for `_give_up`, which waits for all that was begun
            raise error
        return read

    def _give_up(self, block: str, reads: set[int], call: int) -> None:
        """Forget what was asked for and is not here, once nothing is written to its slots any more."""
        written = set(reads)
        while written:
            try:
                read, _ = self._read.get(timeout=STALLED_S)
            except Empty:  # the slots stay with a disk that may still write to them
                break
            if read.call == call:
                written.discard(read.index)
        for index in reads:
            slot = self._slots.pop((block, index))
            if index not in written:
                self._free.append(slot)
        reads.clear()

    def _work(self) -> None:
        while (read := self._wanted.get()) is not None:
            try:
                read.file.read(read.index, read.record)
            except Exception as error:  # told to whoever waits
                self._read.put((read, error))
            else:
                self._read.put((read, None))


@dataclass(frozen=True)
class _Read:
    """A record that is wanted, and the memory for it. call: of `held`, that it was begun in."""

    call: int
    file: _OpenRecords
    index: int
    record: memoryview


class _OpenRecords:
    """A file's descriptors, through the page cache and past it. It goes on as it was where it is replaced."""

    def __init__(self, file: ExpertFile) -> None:
        self.file = file
        try:
            self._plain = open_plain(file.path)
        except OSError as error:
            raise self.refusal("cannot be read", error.strerror or "unknown") from None
        self._direct = open_direct(file.path)
        self._stamp = self._stamped()
        self._checked: set[int] = set()

    def __enter__(self) -> _OpenRecords:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in (self._plain, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def read(self, index: int, record: memoryview) -> None:
        """Fill a record, from the page cache where that has nearly all of it. Raises CheckpointError."""
        begin = self.file.begin + index * len(record)
        is_cached = cached_share(self._plain, len(record), begin) >= CACHED_SHARE
        try:
            read_into(self._plain, None if is_cached else self._direct, begin, record)
        except (OSError, EOFError) as error:
            raise self.refusal("cannot be read", f"expert {index}: {error}") from None

    def check(self, index: int, record: memoryview) -> None:
        """Raise CheckpointError where the file is not as it was opened, or the record not as it was written."""
        if self._stamped() != self._stamp:
            raise self.refusal("was written to", f"expert {index} may be another one now")
        if index not in self._checked:
            self.file.check(index, record)
            self._checked.add(index)

    def _stamped(self) -> tuple[int, int]:
        try:
            status = os.fstat(self._plain)
        except OSError as error:  # of a network that is gone
            raise self.refusal("cannot be read", str(error)) from None
        return status.st_size, status.st_mtime_ns

    def refusal(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path} {what}", why=why, fix=self.file.fix)
