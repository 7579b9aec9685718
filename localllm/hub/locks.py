"""One process at a time writes in a folder, and none deletes what another reads: by locks that die with their holder.

Where a file system only pretends to lock, nothing is held back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
_PAUSE_S = 0.2
_MOST_TRIES = 100


@contextmanager
def exclusive(directory: Path, waiting: Callable[[str], None]) -> Iterator[bool]:
    """Make and hold `directory`; yield whether another process held it before. An empty folder does not stay.

    `waiting` is called with that process's id, again and again until it is gone. Raises OSError, and what `waiting`
    raises.
    """
    path, waited = directory / LOCK, False
    while True:
        _make(directory)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # its holder has deleted it
            continue
        try:
            # A holder takes its lock file away with it: a lock on one that has lost its name is worth nothing.
            if _lock(descriptor, alone=True) and is_at(path, descriptor):
                break
            waiting(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        waited = True
        time.sleep(_PAUSE_S)
    try:
        with suppress(OSError):  # a full disk, on which this may be about to free space
            os.pwrite(descriptor, f"{os.getpid()}\n".encode().ljust(32), 0)
        yield waited
    finally:
        if is_at(path, descriptor):
            path.unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):
            directory.rmdir()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep others from deleting the file, beside other readers. Raises OSError where it is not there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, alone=False)  # waits for a deletion, which takes moments
        yield
    finally:
        os.close(descriptor)


@contextmanager
def unread(path: Path) -> Iterator[bool]:
    """Yield whether no process is `reading` the file; then none can begin to. True where it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _lock(descriptor, alone=True)
    finally:
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file still has the name `path`."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _make(directory: Path) -> None:
    """Others delete empty folders as they leave, between the looks that pathlib takes at one: it is tried again."""
    for _ in range(_MOST_TRIES - 1):
        with suppress(FileExistsError, FileNotFoundError):
            directory.mkdir(parents=True, exist_ok=True)
            return
    directory.mkdir(parents=True, exist_ok=True)


def _lock(descriptor: int, *, alone: bool) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a system, or a file system, without locks
        return True
    return True
