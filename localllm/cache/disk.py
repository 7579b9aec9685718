"""The disk tier of the prefix cache: pages of keys and values that outlive the process.

One thread of its own lists what is there, writes what it is given and makes room; readers work side by side. Pages are
bytes here: the caller knows what they mean, and whether a page of the same tokens is wanted at all. Whatever is wrong
with the disk, the worst that happens is that something is computed once more. Needs no torch.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

from localllm.cache.page_file import (
    DIGEST_BYTES,
    HEADER_BYTES,
    BadPageError,
    PageKey,
    header_of,
    is_cached,
    num_leading,
    read_first,
    read_key,
    read_page,
    write_page,
)
from localllm.cache.page_folder import (
    KEPT_FREE_BYTES,
    NotOurFolderError,
    PageFile,
    Place,
    close_to_others,
    default_limit_bytes,
    free_bytes,
    make_folder,
    name_of,
    quarantine,
    remove_stale,
    scan,
    temporary_path,
)
from localllm.cache.page_index import PageIndex
from localllm.config import format_bytes
from localllm.present import is_file

QUEUE_BYTES = 256 << 20  # of pages that wait to be written: 4000 tokens of Mistral 7B in INT8
_PAUSE_S = 60.0  # after a disk refused to be written to
# Other processes write here too: after so much of our own, what is there is listed anew, in 50 ms for 5000 pages.
_LIST_AGAIN_BYTES = 256 << 20
_SPARE_SHARE = 32  # of what is held is made free at once: to list and choose takes 60 ms among 10,000 pages
_MOST_CHILDREN = 256  # to read the header of one takes 0.03 ms, and thousands of chats may begin differently
_MOST_UNLISTED = 8192  # pages whose headers are read at once: half a million tokens, 0.25 s
_SAMPLED_PAGES = 5  # of a chain, to know whether the page cache holds it: each costs 0.03 ms, and 4 KB of the disk's
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # they say nothing of the file


class DiskTier:
    """The pages of one `root` in `directory`, beside those of other roots and of other processes.

    Safe for several threads. Never raises for what the disk does: `warn`, which must not raise either, is told of it
    once, from any thread.
    """

    def __init__(
        self,
        directory: Path,
        root: bytes,
        about: Mapping[str, str],
        limit_bytes: int | None,
        warn: Callable[[str], None],
        *,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """root: 32 bytes that stand for all that the pages' meaning depends on. about: the same for people, shown by
        `localllm cache`. limit_bytes: of all pages of all roots together; None: 8 GiB, or a tenth of what is free."""
        assert len(root) == DIGEST_BYTES
        self.num_written = self.num_quarantined = 0
        self._directory, self._root, self._about, self._warn = directory, root, dict(about), warn
        self._name = name_of(root)
        self._limit_bytes, self._queue_bytes = limit_bytes, queue_bytes
        self._changed = threading.Condition()
        self._index = PageIndex()
        self._queue: dict[bytes, tuple[PageKey, memoryview]] = {}  # by digest, in the order of writing
        self._unstamped: set[Place] = set()  # used since their files last said so
        self._listed = threading.Event()
        self._is_off = self._is_closed = self._has_warned = False
        self._paused_until = 0.0
        self._written_since_listing = 0
        self._writer = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        try:
            self._writer.start()
        except RuntimeError as error:  # no more threads: what is there can still be read
            self._begin()
            self._is_closed = True
            self._say(str(error))

    def __contains__(self, digest: bytes) -> bool:
        """Return whether the page is listed. It may be gone, or damaged, when it is read."""
        self._listed.wait()
        with self._changed:
            return self._place(digest) in self._index

    @property
    def num_pages(self) -> int:
        """Pages of this root."""
        with self._changed:
            return sum(file.root == self._name for file in self._index)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the pages of all roots."""
        with self._changed:
            return self._index.num_bytes

    @property
    def limit_bytes(self) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        return default_limit_bytes(self._directory, self.bytes_on_disk)

    def children(self, parent: bytes) -> list[PageKey]:
        """Return the pages that hang on a page, or on the root, of many those that were used last: their tokens tell
        where a prefix broke."""
        self._listed.wait()
        with self._changed:
            files = self._index.children(self._place(parent))[:_MOST_CHILDREN]
        return [key for key in self._keys_of(files) if key.parent == parent]

    def unlisted(self, names: Set[str]) -> list[PageKey]:
        """Return the pages of this root that are not among these names, of many those that were used last."""
        self._listed.wait()
        with self._changed:
            own = [file for file in self._index if file.root == self._name and file.page not in names]
            files = self._index.last_used(own)[:_MOST_UNLISTED]
        return self._keys_of(file for file in files if not file.is_snapshot)

    def _keys_of(self, files: Iterable[PageFile]) -> list[PageKey]:
        keys = []
        for file in files:
            with suppress(OSError, BadPageError):  # whoever reads the page will find out
                keys.append(read_key(self._directory / file.path, self._root))
        return keys

    def read(self, keys: Sequence[PageKey], into: Sequence[memoryview]) -> int:
        """Read a chain's pages side by side; return how many of the first ones are whole and verified.

        into: of each page's size, writable; read past the page cache where aligned to 4096. What is in those behind the
        returned number is nothing.
        """
        assert len(keys) == len(into), "each page has a place of its own"
        self._listed.wait()
        with self._changed:
            is_listed = [self._place(key.digest) in self._index for key in keys]
        views = [memoryview(view).cast("B") for view in into]
        pages = list(zip(keys[: num_leading(is_listed)], views, strict=False))
        # Past the page cache, unless that seems to hold most of the chain, judged by some of its pages.
        drawn = random.sample(keys[: len(pages)], min(len(pages), _SAMPLED_PAGES))
        past_cache = 2 * sum(is_cached(self._directory / self._file(key).path) for key in drawn) <= len(drawn)
        count = read_first(len(pages), lambda number, header: self._read(*pages[number], header, past_cache))
        self.touch(key.digest for key in keys[:count])
        return count

    def put(self, key: PageKey, payload: bytes | memoryview) -> bool:
        """Have a page written that nobody changes any more; False where it is not going to be. Never waits.

        One that is there is only touched. A page goes behind its parent: where that is neither there nor on its way,
        it is refused, as it is where the queue is full or the disk takes nothing.
        """
        payload = memoryview(payload).cast("B")
        with self._changed:
            if self.holds(key.digest):
                self.touch([key.digest])
                return True
            if not self._may_queue(key, len(payload)):
                return False
            self._queue[key.digest] = (key, payload)
            self._changed.notify_all()
        return True

    def wants(self, key: PageKey, num_bytes: int) -> bool:
        """Return whether `put` would take so many bytes, of a page that is neither there nor on its way."""
        with self._changed:
            return not self.holds(key.digest) and self._may_queue(key, num_bytes)

    def holds(self, digest: bytes) -> bool:
        """Return whether the page is listed, or on its way."""
        with self._changed:
            return digest in self._queue or self._place(digest) in self._index

    def touch(self, digests: Iterable[bytes]) -> None:
        """Mark pages as used, in this order: they stay longer than others."""
        with self._changed:
            for place in map(self._place, digests):
                if place in self._index:
                    self._index.touch(place)
                    self._unstamped.add(place)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put is written or given up; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """`flush`, and take nothing more. What is not written by then is dropped."""
        until = time.monotonic() + timeout_s
        is_flushed = self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._writer.ident is not None:
            self._writer.join(max(0.1, until - time.monotonic()))
        return is_flushed

    def _place(self, digest: bytes) -> Place:
        return self._name, name_of(digest)

    def _file(self, key: PageKey, num_bytes: int = 0) -> PageFile:
        return PageFile(self._name, name_of(key.digest), name_of(key.parent), num_bytes, time.time_ns())

    def _may_queue(self, key: PageKey, num_bytes: int) -> bool:
        if self._is_off or self._is_closed or time.monotonic() < self._paused_until:
            return False
        if num_bytes + sum(len(payload) for _, payload in self._queue.values()) > self._queue_bytes:
            return False
        return key.parent == self._root or self.holds(key.parent) or not self._listed.is_set()

    # What follows is done by the writer alone, but for `_read` and what it calls.

    def _work(self) -> None:
        try:
            self._begin()
        except Exception as error:  # whatever it is, the answer that is being written goes on
            self._pause(error)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._unstamped or self._is_closed)
                if not self._queue and not self._unstamped:
                    return
                page = next(iter(self._queue.values()), None)
                used: set[Place] = set()
                if page is None:
                    used, self._unstamped = self._unstamped, used
            try:
                if page is not None:
                    self._write(*page)
                self._stamp(used)
            except Exception as error:
                self._pause(error)
            with self._changed:
                if page is not None:
                    self._queue.pop(page[0].digest, None)
                self._changed.notify_all()

    def _begin(self) -> None:
        try:
            try:  # pages are checked for damage, not for malice: nobody else may write here
                close_to_others(self._directory)
            except NotOurFolderError as error:
                self._is_off = True
                self._say(str(error))
                return
            except OSError:  # not there yet, or nothing can be written there: the first page finds out
                pass
            remove_stale(self._directory)
            self._list()
            if self._index.orphans():
                self._list()  # once more: another process may have written a chain while it was being listed
                self._evict(self._index.orphans())
            self._evict(self._index.victims(self.bytes_on_disk - self.limit_bytes, (self._name, self._name)))
        finally:
            self._listed.set()

    def _list(self) -> None:
        files = list(scan(self._directory))
        with self._changed:
            self._index.merge(files, time.time_ns())
        self._written_since_listing = 0

    def _write(self, key: PageKey, payload: memoryview) -> None:
        """Write the page, if what is before it is there. Raises OSError."""
        file = self._file(key, HEADER_BYTES + len(payload))
        with self._changed:
            before, is_behind = self._index.get(file.behind), self._index.reaches_root(file.behind)
        if self._is_off or not is_behind:
            return
        if before is not None and not is_file(self._directory / before.path):  # somebody has cleared the cache
            self._forget(before.place)
            return
        path = make_folder(self._directory, self._name, self._about) / file.path.name
        there = None
        with suppress(OSError):
            there = path.lstat()
        if there is not None and not stat.S_ISREG(there.st_mode):
            return
        if there is None or there.st_size != file.num_bytes:  # else another process has written it
            if not self._make_room(file.num_bytes, file.behind):
                return
            write_page(temporary_path(path.parent, file.page), path, header_of(self._root, key, payload), payload)
            self.num_written += 1
            self._written_since_listing += file.num_bytes
        with self._changed:
            self._index.add(self._file(key, file.num_bytes))
        if self._written_since_listing >= min(_LIST_AGAIN_BYTES, self.limit_bytes // 8):
            self._list()

    def _make_room(self, num_bytes: int, keep: Place) -> bool:
        """Make room for so much more within the limit, with KEPT_FREE_BYTES left to others; return whether it
        worked."""
        if self._excess(num_bytes) <= 0:
            return True
        self._list()  # other processes have used and deleted pages meanwhile
        excess = self._excess(num_bytes)
        spare = self.bytes_on_disk // _SPARE_SHARE if excess > 0 else 0
        victims = self._index.victims(max(excess, spare), keep)
        if sum(file.num_bytes for file in victims) >= excess:
            self._evict(victims)
            return True
        free = free_bytes(self._directory)
        if free - num_bytes < KEPT_FREE_BYTES:
            kept_free = format_bytes(KEPT_FREE_BYTES)
            self._say(f"{format_bytes(free, 2)} are free on its disk, and {kept_free} is left to others")
        return False

    def _excess(self, num_bytes: int) -> int:
        """Bytes that must go before there is room for so many."""
        held = self.bytes_on_disk
        return held + num_bytes - min(self.limit_bytes, held + free_bytes(self._directory) - KEPT_FREE_BYTES)

    def _evict(self, files: Iterable[PageFile]) -> None:
        for file in files:
            (self._directory / file.path).unlink(missing_ok=True)
            with self._changed:
                self._index.remove(file.place)

    def _stamp(self, places: Iterable[Place]) -> None:
        """Write the time of use to the files of these pages, for later processes and others that run now."""
        now_ns = time.time_ns()
        for place in places:
            with self._changed:
                file = self._index.get(place)
                self._index.stamp(place, now_ns)
            with suppress(OSError):  # it was deleted, or nothing can be written
                if file is not None:
                    os.utime(self._directory / file.path, ns=(now_ns, now_ns), follow_symlinks=False)

    def _pause(self, error: Exception) -> None:
        self._say((isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__)
        with self._changed:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._queue.clear()
            self._changed.notify_all()

    def _say(self, why: str) -> None:
        with self._changed:
            if self._has_warned:
                return
            self._has_warned = True
        self._warn(
            f"the context is not kept on the disk: {why} ({self._directory}). Answers go on, and a later run computes "
            "it anew. `localllm cache clear` frees space; LOCALLLM_CACHE=FOLDER takes another disk"
        )

    def _read(self, key: PageKey, into: memoryview, header: memoryview, past_cache: bool) -> bool:
        with self._changed:
            file = self._index.get(self._place(key.digest))
        if file is None:
            return False
        try:
            if file.parent != name_of(key.parent):
                raise BadPageError(f"{file.path} hangs on another page")
            read_page(self._directory / file.path, self._root, key, into, header, past_cache=past_cache)
        except (OSError, MemoryError, BadPageError) as error:
            number = getattr(error, "errno", None)
            if isinstance(error, BadPageError) or number == errno.EIO:
                with self._changed:
                    self._index.remove(file.place)
                    self.num_quarantined += 1
                with suppress(OSError):
                    quarantine(self._directory, file)
            elif number is not None and number not in _PASSING:
                self._forget(file.place)
            return False
        return True

    def _forget(self, place: Place) -> None:
        """Forget a page that is gone or cannot be read, and what hangs on it; both can be put again."""
        with self._changed:
            self._index.remove_with_descendants(place)
