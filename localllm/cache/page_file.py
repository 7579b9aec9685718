"""One page of a KV cache as a file: a header that says what it is of, and its bytes.

A page's header follows from the page: reading compares it with the one that would be written, so that one comparison
finds a flipped bit anywhere, a page of other tokens and one of another model. Knows no folder, and not what the bytes
mean.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import xxhash

from localllm.cache.page_folder import PAGE_TOKENS
from localllm.offload.streaming.disk_read import PAGE_BYTES, open_plain, read_into

DIGEST_BYTES = 32
HEADER_BYTES = PAGE_BYTES  # so that the bytes behind it can be read past the page cache
LAYOUT_VERSION = 1  # of this file's format
_MAGIC = b"LLMKVPG\n"
# magic, version, tokens, bytes of the payload, root, parent, digest, token ids, checksum of the payload; zeros follow,
# and the checksum of all that.
_CLAIMS = struct.Struct(f"<8sIIQ32s32s32s{PAGE_TOKENS}I16s")
_CHECKSUM_BYTES = 16
_PAST_CACHE = getattr(os, "O_DIRECT", 0)
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM_BYTES
# Pages are small: while some are opened and verified, the disk must have others to read. With 2 busy cores 0.7 MB at a
# time came at 1.8 GB/s to 4 readers and at 2.1 to 8.
READERS = 8


class BadPageError(Exception):
    """The file does not hold the page that it should: it is damaged, cut, of another model, or of another owner."""


@dataclass(frozen=True)
class PageKey:
    """The tokens of a page and the page before it: `digest` follows from `parent` (or the root) and `token_ids`."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.digest) == len(self.parent) == DIGEST_BYTES, "digests are blake2b-256"
        assert len(self.token_ids) == PAGE_TOKENS, "only full pages are kept"
        assert 0 <= min(self.token_ids) and max(self.token_ids) < 1 << 32, "a token id has 32 bits"


def header_of(root: bytes, key: PageKey, payload: memoryview) -> bytes:
    """Return the HEADER_BYTES that stand before `payload`: the same for the same page, whichever process writes it."""
    checksum = xxhash.xxh3_128_digest(payload)
    claims = _CLAIMS.pack(
        _MAGIC, LAYOUT_VERSION, PAGE_TOKENS, len(payload), root, key.parent, key.digest, *key.token_ids, checksum
    )
    return _sealed(claims)


def _sealed(claims: bytes) -> bytes:
    checked = claims.ljust(_CHECKED_BYTES, b"\0")
    return checked + xxhash.xxh3_128_digest(checked)


def write_page(temporary: Path, path: Path, header: bytes, payload: memoryview) -> None:
    """Write header and payload to `path`, both whole or not at all; `temporary` is in the same folder. Raises OSError.

    Nothing is synced: what a loss of power leaves half-written fails its checksum, and is computed again.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600)
    views = [memoryview(header), payload]
    try:
        try:
            while views:
                written = os.writev(descriptor, views)
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if views:
                    views[0] = views[0][written:]
        finally:
            os.close(descriptor)  # which is where a network's disk says that it is full
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_page(path: Path, root: bytes, key: PageKey, into: memoryview, header: memoryview, *, past_cache: bool) -> None:
    """Fill `into` with the page at `path`, and verify it. After an error, the content of `into` means nothing.

    header: HEADER_BYTES to work in. past_cache: read from the disk even what the page cache holds, where the file
    system can and both buffers are aligned to a page. Raises OSError, and BadPageError where the file is not this very
    page.
    """
    # Few calls: between two of them eight readers wait for one another; 14 a page cost a quarter of the disk's rate.
    num_bytes = HEADER_BYTES + len(into)
    descriptor = _open_own(path, num_bytes, _PAST_CACHE if past_cache else 0)
    try:
        done = _read_direct(descriptor, header, into) if past_cache else os.preadv(descriptor, [header, into], 0)
        if done < num_bytes:
            _read_rest(descriptor, header, into, done)
    except EOFError as error:  # cut since its length was asked for
        raise BadPageError(str(error)) from None
    finally:
        os.close(descriptor)
    if header != header_of(root, key, into):
        raise BadPageError(f"{path} is not the page that its name says")


def read_key(path: Path, root: bytes) -> PageKey:
    """Return the page that the file at `path` says it is; the bytes behind the header are not looked at.

    Raises OSError, and BadPageError where the header is damaged, or one of another model or version.
    """
    descriptor = _open_own(path)
    try:
        with suppress(AttributeError, OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        header = os.pread(descriptor, HEADER_BYTES, 0)
    finally:
        os.close(descriptor)
    if len(header) < HEADER_BYTES or header != _sealed(header[: _CLAIMS.size]):
        raise BadPageError(f"the header of {path} is damaged")
    magic, version, num_tokens, _, found_root, parent, digest, *token_ids, _ = _CLAIMS.unpack_from(header)
    if (magic, version, num_tokens, found_root) != (_MAGIC, LAYOUT_VERSION, PAGE_TOKENS, root):
        raise BadPageError(f"{path} is a page of another model or version")
    return PageKey(digest, parent, tuple(token_ids))


def is_cached(path: Path) -> bool:
    """Return whether the page cache seems to hold the page at `path`, judged by one random byte.

    Where it does not, the system may read the block around that byte: drawn, it is another one the next time.
    """
    with suppress(AttributeError, OSError, BadPageError):
        descriptor = _open_own(path)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # that block alone
            at = secrets.randbelow(max(1, os.fstat(descriptor).st_size))
            return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) == 1
        finally:
            os.close(descriptor)
    return False


def _open_own(path: Path, num_bytes: int | None = None, flags: int = 0) -> int:
    """Open a file that no other user may have written: a checksum finds damage, not malice.

    num_bytes: that it must have. flags: given up where the file system has no such thing.
    """
    try:
        descriptor = open_plain(path, os.O_NOFOLLOW | flags)
    except OSError as error:
        if not flags or error.errno != errno.EINVAL:
            raise
        descriptor = open_plain(path, os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    why = ""
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        why = "could have been written by another user"
    elif num_bytes is not None and status.st_size != num_bytes:
        why = f"has {status.st_size} bytes instead of {num_bytes}"
    if why:
        os.close(descriptor)
        raise BadPageError(f"{path} {why}")
    return descriptor


def _read_direct(descriptor: int, header: memoryview, into: memoryview) -> int:
    """Read past the page cache; return how many bytes came: whole blocks, or none where a buffer is not aligned."""
    whole: Sequence[memoryview] = [header, into[: len(into) // PAGE_BYTES * PAGE_BYTES]]
    try:
        return os.preadv(descriptor, whole, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def _read_rest(descriptor: int, header: memoryview, into: memoryview, done: int) -> None:
    """Read what is missing behind byte `done` through the page cache. Raises OSError and EOFError."""
    with suppress(ImportError, AttributeError):
        import fcntl

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_PAST_CACHE)
    if done < HEADER_BYTES:
        done = os.preadv(descriptor, [header, into], 0)
        if done < HEADER_BYTES:
            raise EOFError(f"it ends at byte {done}")
    read_into(descriptor, None, done, into[done - HEADER_BYTES :])


def read_first(num_pages: int, read: Callable[[int, memoryview], bool]) -> int:
    """Read pages side by side; return how many of the first ones came, up to one that did not.

    Those behind it are read all the same: found damaged one by one, each would cost a prompt that is computed again.

    read(number, buffer): whether the page is whole. buffer: PAGE_BYTES, aligned to them, the thread's own. It must not
    raise.
    """
    is_read = [False] * num_pages
    turns = iter(range(num_pages))
    readers = [
        threading.Thread(target=_read_in_turn, args=(turns, read, is_read), name="kv-read", daemon=True)
        for _ in range(1, min(num_pages, READERS))
    ]
    started = []
    try:
        with suppress(RuntimeError):  # no more threads: fewer read, or this one alone
            for reader in readers:
                reader.start()
                started.append(reader)
        _read_in_turn(turns, read, is_read)
    finally:
        for _ in turns:  # after an error, the readers find none left
            pass
        for reader in started:  # they write into the caller's memory
            reader.join()
    return num_leading(is_read)


def num_leading(flags: list[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)


def _read_in_turn(turns: Iterator[int], read: Callable[[int, memoryview], bool], is_read: list[bool]) -> None:
    try:
        buffer = memoryview(mmap(-1, PAGE_BYTES))
    except (OSError, MemoryError):  # what this thread does not read, the others do
        return
    for turn in turns:
        is_read[turn] = read(turn, buffer)
