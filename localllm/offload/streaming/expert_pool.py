"""Slots of memory for experts that rest on the disk: those used last stay, the others are read when they are wanted.

A record is read whole, many of them at a time, from the page cache where all of it is there and past it else. Knows
nothing of what a record holds.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.offload.streaming.disk_read import open_direct, open_plain, read_into
from localllm.offload.streaming.disk_stream import STALLED_S, StreamClock
from localllm.offload.streaming.expert_uses import ExpertUses

# Records of 2.6 MB: eight at a time reach what the disk gives, one after the other 0.6 of it.
READERS = 8
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # reads what the page cache has, and nothing else


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
        self._checked: set[Expert] = set()
        self._tables = {file.block: torch.zeros(file.count, dtype=torch.int64) for file in files}
        with ExitStack() as opened:
            self._files = {file.block: opened.enter_context(_OpenRecords(file)) for file in files}
            self._opened = opened.pop_all()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="experts")
        self._counting = threading.Lock()

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

    def held(self, block: str, experts: Sequence[int]) -> Iterator[list[int]]:
        """Yield the experts in groups, whatever their order: first those that are here, then those that have been read.
        A group is in its slots until the next one is asked for.

        Raises CheckpointError naming the file and the record that cannot be read or is damaged.
        """
        self.wanted += len(experts)
        here = [index for index in experts if (block, index) in self._slots]
        missing = [index for index in experts if (block, index) not in self._slots]
        self.hits += len(here)
        file = self._files[block].file
        self._uses.see(block, experts, file.count, len(here) if len(experts) == file.active else None)
        for index in here:
            self._slots.move_to_end((block, index))
        kept = {(block, index) for index in here}
        reads: dict[Future[None], int] = {}
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
        self._readers.shutdown()
        self._opened.close()

    def _begin(self, block: str, missing: list[int], kept: set[Expert], reads: dict[Future[None], int]) -> None:
        """Begin to read as many of the missing ones as there are slots for; they leave `missing`."""
        reading = {(block, index) for index in reads.values()}
        while missing and (slot := self._free_slot(kept | reading)) is not None:
            index = missing.pop(0)
            self._slots[block, index] = slot
            reading.add((block, index))
            reads[self._readers.submit(self._read, block, index, slot)] = index

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

    def _finished(self, block: str, reads: dict[Future[None], int]) -> list[int]:
        """Wait for some reads, and return the experts that they brought."""
        done, _ = wait(reads, timeout=STALLED_S, return_when=FIRST_COMPLETED)
        if not done:
            raise self._files[block].refusal("gives nothing", f"no byte came for {STALLED_S:.0f} seconds")
        found = []
        for read in done:
            index = reads.pop(read)
            try:
                read.result()
            except BaseException:
                self._free.append(self._slots.pop((block, index)))
                raise
            slot = self._slots[block, index]
            self._tables[block][index] = self.memory[slot].data_ptr()
            found.append(index)
        return found

    def _give_up(self, block: str, reads: dict[Future[None], int]) -> None:
        """Forget what was asked for and is not here yet."""
        for read, index in reads.items():
            if not read.cancel():
                with suppress(Exception):
                    read.result()
            self._free.append(self._slots.pop((block, index)))
        reads.clear()

    def _read(self, block: str, index: int, slot: int) -> None:
        file, into = self._files[block], self.memory[slot].numpy().data
        file.read(index, into)
        with self._counting:
            self.clock.bytes_read += len(into)
            is_new = (block, index) not in self._checked
        if is_new:
            file.file.check(index, into)
            with self._counting:
                self._checked.add((block, index))


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

    def __enter__(self) -> _OpenRecords:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in (self._plain, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def read(self, index: int, into: memoryview) -> None:
        """Fill `into` with a record. Raises CheckpointError where the file is not as it was opened."""
        self._fill(index, into)
        if self._stamped() != self._stamp:
            raise self.refusal("was written to", f"expert {index} may be another one now")

    def _stamped(self) -> tuple[int, int, int]:
        status = os.fstat(self._plain)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _fill(self, index: int, into: memoryview) -> None:
        begin = self.file.begin + index * len(into)
        with suppress(OSError):  # not all of it is cached, or the file system cannot say
            if _NOWAIT and os.preadv(self._plain, [into], begin, _NOWAIT) == len(into):
                return
        try:
            read_into(self._plain, self._direct, begin, into)
        except (OSError, EOFError) as error:
            raise self.refusal("cannot be read", f"expert {index}: {error}") from None

    def refusal(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path} {what}", why=why, fix=self.file.fix)
