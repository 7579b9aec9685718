"""Files that pass through a ring of memory, again and again, as fast as the disk gives them.

Reader threads fill the ring in the order in which its runs are needed, past the last one into the next lap, and stop
only where a run is still in use, or on its way to a device. Knows nothing of what the files hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from localllm.errors import CheckpointError
from localllm.offload.streaming.disk_read import CACHED_SHARE, READERS, cached_share, read_into
from localllm.offload.streaming.open_file import OpenFile
from localllm.offload.streaming.page_map import MappableMemory, can_map, unwritten
from localllm.offload.streaming.ring import Ring

# A run of 100 MB in pieces of 8 MB keeps four readers busy to its end; smaller ones cost calls.
_PIECE_BYTES = 8 << 20
# Pages that are in the cache are mapped at 14 GB/s and more; slower than this, some of them had to be read.
_MAPPED_GBS = 4.0
# So long without a byte: a disk that was unplugged or a network that is gone, not one that is busy.
STALLED_S = 60.0
_STALL_PARTS = 60
_MOST_REACH = 2  # of a ring: no run takes the place of one farther back


@dataclass(frozen=True)
class StreamedFile:
    """A file of which the first `num_bytes`, whole pages, are read each time.

    check: sees its bytes when they are there for the first time, and raises LocalLLMError where they are not right.
    fix: the command that makes the file anew.
    """

    name: str
    path: Path
    num_bytes: int
    check: Callable[[memoryview], None]
    fix: str


@dataclass
class StreamClock:
    """Counts since the stream began. reading_s: the time in which anything was being read. wait_s: the time in which a
    run was waited for. bytes_sent, sending_s: what went to a device, and how long that took, beside the rest."""

    bytes_read: int = 0
    reading_s: float = 0.0
    wait_s: float = 0.0
    bytes_sent: int = 0
    sending_s: float = 0.0

    def __add__(self, other: StreamClock) -> StreamClock:
        return StreamClock(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class DiskStream:
    """Streams `files` through `memory` (uint8 [ring.num_bytes], aligned to a page). One forward at a time.

    The files are open as long as this is: one that is replaced meanwhile goes on as it was, and one that is written to
    is refused.
    """

    def __init__(self, files: Sequence[StreamedFile], ring: Ring, memory: Tensor, *, maps: bool = True) -> None:
        """maps: pages of files may take the place of those of `memory`, which no device has registered. Raises
        CheckpointError where a file cannot be opened, RuntimeError where no thread can be started."""
        self.names = frozenset(file.name for file in files)
        self.clock = StreamClock()
        self._ring = ring
        self._memory = MappableMemory(memory)
        self._index = {file.name: index for index, file in enumerate(files)}
        with ExitStack() as opened:
            self._files = [opened.enter_context(closing(_BlockFile(file, maps=maps))) for file in files]
            self._opened = opened.pop_all()
        self._changed = threading.Condition()
        # Runs are counted on over the laps: number n is file n % len(files).
        self._released = 0  # runs that are no longer needed
        self._next = (0, 0)  # the piece that is read next: of which run, and which of its pieces
        self._pieces: Sequence[tuple[int, int]] = ()  # those of that run
        self._missing: dict[int, int] = {}  # of a run that is being read: pieces that are not there yet
        self._copied: dict[int, Any] = {}  # of runs that are copied: an event, behind which their places are free
        self._under_way = 0  # pieces that are being read
        self._reading_since = 0.0
        self._stops = False  # nothing more is begun
        self._failure: Exception | None = None
        self._readers = [threading.Thread(target=self._work, name="stream", daemon=True) for _ in range(READERS)]
        try:
            for reader in self._readers:
                reader.start()
        except RuntimeError:  # those that were started would wait for work as long as the process lives
            self.close()
            raise

    def begin(self) -> None:
        """As BlockStream says. What was read ahead of a lap that was given up is dropped. Raises CheckpointError where
        the disk still has not given what it was asked for then."""
        if self._released % len(self._files) == 0 and self._failure is None:
            return
        with self._changed:
            self._stop()
            self._released, self._next, self._failure = 0, (0, 0), None
            self._missing.clear()
            for number in list(self._copied):
                self._copied.pop(number).synchronize()
            self._stops = False
            self._changed.notify_all()

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Inside, the run of this name is in its place. Raises CheckpointError naming the file that cannot be read, and
        MemoryError where a reader found too little."""
        if name not in self.names:
            yield
            return
        number = self._released
        assert self._index[name] == number % len(self._files), "runs are asked for in their order"
        started = time.perf_counter()
        begin, file = self._ring.offsets[number % len(self._files)], self._files[number % len(self._files)]
        with self._changed:
            while self._failure is None and self._missing.get(number, 1):
                if not self._progresses():
                    raise file.stalled()
            if self._failure is not None:
                raise self._failure
        with file.in_use(self._memory, begin):
            self.clock.wait_s += time.perf_counter() - started
            yield
        with self._changed:
            self._released = number + 1
            self._missing.pop(number, None)
            self._changed.notify_all()

    def is_read(self, name: str) -> bool:
        """Return whether the run of this name is the next one, and in its place already."""
        number = self._released
        with self._changed:
            is_next = self._index[name] == number % len(self._files)
            return is_next and self._failure is None and self._missing.get(number) == 0

    def copied(self, name: str, copy: Callable[[], Any]) -> Any:
        """Have the run of this name copied once it is in its place: `copy` begins that, and returns the event behind
        it, as this does. The place is the readers' once the event has come. Raises as `held`."""
        with self.held(name):
            number, event = self._released, copy()
            recent = {n: before for n, before in self._copied.items() if n > number - _MOST_REACH}
            self._copied = {**recent, number: event}
        return event

    def close(self) -> None:
        with self._changed:
            has_stopped = False
            with suppress(CheckpointError):
                self._stop()
                has_stopped = True
            self._files = []
            self._changed.notify_all()
        if has_stopped:  # else a reader may come back to its descriptor, which must be no other's by then
            self._opened.close()

    def _stop(self) -> None:
        """Begin nothing more, and wait for what is under way. Raises CheckpointError where the disk does not answer:
        what it gives later would overwrite what was read in between."""
        self._stops = True
        while self._under_way:
            if not self._progresses():
                raise self._files[self._next[0] % len(self._files)].stalled()

    def _progresses(self) -> bool:
        """Wait until something changes; return False after as much time as a disk may take. It is counted in small
        parts: a process that was stopped and goes on finds one of them over, not all."""
        return any(self._changed.wait(STALLED_S / _STALL_PARTS) for _ in range(_STALL_PARTS))

    def _work(self) -> None:
        """Read piece after piece, until the stream is closed: the work of one reader."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._files or self._may_read())
                if not self._files:
                    return
                number, (begin, end) = self._take()
                index = number % len(self._files)
                file, at = self._files[index], self._ring.offsets[index]
                copied = self._copied.get(number - self._ring.reach[index])
            failure: Exception | None = None
            try:
                if copied is not None:
                    copied.synchronize()
                file.read(begin, end, self._memory, at)
            except (OSError, EOFError) as error:
                failure = file.refusal("cannot be read", str(error))
            except Exception as error:  # memory that ran out, as a rule: a reader that ended of it would be waited for
                failure = error
            with self._changed:
                self._under_way -= 1
                now = time.perf_counter()
                self.clock.reading_s += now - self._reading_since
                self._reading_since = now
                self._failure = self._failure or failure
                self._missing[number] -= 1
                self.clock.bytes_read += end - begin
                self._changed.notify_all()

    def _may_read(self) -> bool:
        number = self._next[0]
        is_free = self._released > number - self._ring.reach[number % len(self._files)]
        return is_free and not self._stops and self._failure is None

    def _take(self) -> tuple[int, tuple[int, int]]:
        number, piece = self._next
        if not piece:
            self._pieces = self._files[number % len(self._files)].pieces()
            self._missing[number] = len(self._pieces)
        if not self._under_way:
            self._reading_since = time.perf_counter()
        self._under_way += 1
        self._next = (number, piece + 1) if piece + 1 < len(self._pieces) else (number + 1, 0)
        return number, self._pieces[piece]


class _BlockFile(OpenFile):
    """One of the files. While the page cache holds it, it is mapped, or copied from there where that is not possible;
    else it is read past the cache, in which it would only push out what others need."""

    def __init__(self, file: StreamedFile, *, maps: bool) -> None:
        """Raises CheckpointError."""
        super().__init__(file.path, file.fix)
        self._file = file
        self.num_bytes = file.num_bytes
        self._is_checked = False
        self._is_cached = self.direct is None or self._lies_in_cache()
        self._may_map = maps and self.direct is not None and can_map(self.plain)

    def pieces(self) -> Sequence[tuple[int, int]]:
        """Return the bounds, in bytes, of the pieces in which it is read. What is mapped is one piece."""
        step = self.num_bytes if self._may_map and self._is_cached else _PIECE_BYTES
        return [(begin, min(begin + step, self.num_bytes)) for begin in range(0, self.num_bytes, step)]

    def read(self, begin: int, end: int, memory: MappableMemory, at: int) -> None:
        """Read one of the pieces into its part of `memory`, in which the file begins `at`. Raises OSError, and EOFError
        where the file has become too short."""
        if self._may_map and self._is_cached and self._map(begin, end, memory, at):
            return
        if not begin and self.direct is not None:
            self._is_cached = self._lies_in_cache()
        direct = None if self._is_cached else self.direct
        read_into(self.plain, direct, begin, memory.writable(at + begin, at + end))

    def _map(self, begin: int, end: int, memory: MappableMemory, at: int) -> bool:
        started = time.perf_counter()
        try:
            memory.map(at + begin, at + end, self.plain, begin)
        except OSError:  # what is wrong with it, reading tells
            self._may_map = False
            return False
        # Asked now, the cache would have what was just read into it: the next lap asks before it reads.
        self._is_cached = time.perf_counter() - started < (end - begin) / _MAPPED_GBS / 1e9
        return True

    @contextmanager
    def in_use(self, memory: MappableMemory, at: int) -> Iterator[None]:
        """Inside, its bytes stay as they are. Raises CheckpointError where they are not those of the file as it was
        opened."""
        end = at + self.num_bytes
        if not memory.is_mapped(at, end):
            self._examine(memory[at:end])
            yield
            return
        with unwritten(self.plain) as is_unwritten:
            if not is_unwritten:  # it is being written to, and may be cut: copied
                self._may_map = False
                try:
                    for begin, stop in self.pieces():
                        self.read(begin, stop, memory, at)
                except (OSError, EOFError) as error:
                    raise self.refusal("cannot be read", str(error)) from None
            self._examine(memory[at:end])
            yield
            self.require_unchanged()  # a lease does not outlive 45 s in which this process is stopped

    def _lies_in_cache(self) -> bool:
        return cached_share(self.plain, self.num_bytes) >= CACHED_SHARE

    def _examine(self, content: memoryview) -> None:
        self.require_unchanged()
        if not self._is_checked:
            self._file.check(content)
            self._is_checked = True

    def stalled(self) -> CheckpointError:
        return self.refusal("cannot be read", f"its disk has given nothing for {STALLED_S:.0f} s")
