"""A file on its way: bytes are hashed as they come, kept when the transfer breaks, and renamed only when they match.

Knows nothing of HTTP.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from localllm import present
from localllm.config import format_bytes
from localllm.errors import DoesNotFitError, DownloadError
from localllm.hub.locks import is_at

if TYPE_CHECKING:
    from hashlib import _Hash

READ_BYTES = 4 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub promises it. `digest` is a sha256, or for files in git itself the sha1 of the git blob."""

    name: str
    size_bytes: int
    digest: str

    def new_hash(self) -> _Hash:
        if len(self.digest) == 64:
            return hashlib.sha256()
        # Git's own checksum, not a secret's: what the hub publishes for small files.
        return hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)


class PartialFile:
    """The start of `remote` at `path`. Opening it hashes what an earlier run left there."""

    def __init__(self, path: Path, remote: RemoteFile, verifying: Callable[[int], None]) -> None:
        self.path = path
        self.remote = remote
        self.position = 0
        self._hash = remote.new_hash()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise disk_error(error, path, remote.size_bytes) from None
        try:
            self._read_back(verifying)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def missing_bytes(self) -> int:
        return self.remote.size_bytes - self.position

    @property
    def matches(self) -> bool:
        return not self.missing_bytes and self._hash.hexdigest() == self.remote.digest

    def _read_back(self, verifying: Callable[[int], None]) -> None:
        if os.fstat(self._descriptor).st_size > self.remote.size_bytes:
            os.ftruncate(self._descriptor, 0)
        while block := os.read(self._descriptor, READ_BYTES):
            self._hash.update(block)
            self.position += len(block)
            verifying(self.position)

    def append(self, chunk: bytes) -> None:
        """Write and hash `chunk`; what would pass the promised size is dropped."""
        view = memoryview(chunk)[: self.missing_bytes]
        while view:
            try:
                written = os.write(self._descriptor, view)
            except OSError as error:
                raise disk_error(error, self.path, self.missing_bytes) from None
            self._hash.update(view[:written])
            self.position += written
            view = view[written:]

    def publish(self, destination: Path) -> None:
        """Give verified bytes their final name, so that they are there whole or not at all."""
        try:
            os.fsync(self._descriptor)
            # Where locks do not work another process may have renamed our file already: to the same verified bytes.
            if not is_at(self.path, self._descriptor):
                raise FileNotFoundError(errno.ENOENT, "another process took the file", str(self.path))
            self.path.replace(destination)
        except OSError as error:
            if not (destination.is_file() and destination.stat().st_size == self.remote.size_bytes):
                raise disk_error(error, self.path, 0) from None

    def discard(self, destination: Path) -> None:
        """Drop bytes that turned out wrong, so that the next attempt starts from nothing."""
        # The destination too: without working locks another process may have published the file that we wrote into.
        for path in (self.path, destination):
            if is_at(path, self._descriptor):
                path.unlink(missing_ok=True)


def file_matches(path: Path, remote: RemoteFile) -> bool:
    """Return whether the file at `path` has the promised size and checksum."""
    with suppress(OSError), path.open("rb") as file:
        has_size = os.fstat(file.fileno()).st_size == remote.size_bytes
        return has_size and hashlib.file_digest(file, remote.new_hash).hexdigest() == remote.digest
    return False


def disk_error(error: OSError, path: Path, needed_bytes: int) -> DownloadError | DoesNotFitError:
    """Return the error that a failed write is to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space(path.parent, needed_bytes)
    return DownloadError(f"{path} cannot be written", why=str(error), fix=f"ls -ld {path.parent}")


def no_space(folder: Path, needed_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"the download does not fit on the disk of {folder}",
        why=f"{format_bytes(needed_bytes, 2)} more are needed, {format_bytes(free_bytes(folder), 2)} are free",
        fix="free space there, or set HF_HUB_CACHE=/a/larger/disk; what was fetched is kept",
    )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that `folder` is, or will be, on."""
    return shutil.disk_usage(present.nearest(folder)).free
