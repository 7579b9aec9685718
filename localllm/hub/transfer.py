"""One file from the hub into the cache: ranged, resumed, verified.

Bytes are hashed as they come, kept when the transfer breaks, and renamed only when they match the checksum that the
listing promised for the whole file; what a server says about ranges and lengths only decides how much of an answer is
worth reading.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import DownloadError
from localllm.hub.http import Attempts, HubClient, TransferInterruptedError
from localllm.hub.locks import is_at
from localllm.hub.repo_cache import disk_error

if TYPE_CHECKING:
    from hashlib import _Hash

    import httpx2

READ_BYTES = 4 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


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

    def is_at(self, path: Path) -> bool:
        """Return whether the file at `path` has the promised size and checksum."""
        with suppress(OSError), path.open("rb") as file:
            has_size = os.fstat(file.fileno()).st_size == self.size_bytes
            return has_size and hashlib.file_digest(file, self.new_hash).hexdigest() == self.digest
        return False


class PartialFile:
    """The start of `remote` at `path`; what an earlier run left there counts once it is read back. Knows no HTTP."""

    def __init__(self, path: Path, remote: RemoteFile) -> None:
        self.path = path
        self.remote = remote
        self.position = 0
        self._hash = remote.new_hash()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise disk_error(error, path, remote.size_bytes) from None

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def missing_bytes(self) -> int:
        return self.remote.size_bytes - self.position

    @property
    def matches(self) -> bool:
        return not self.missing_bytes and self._hash.hexdigest() == self.remote.digest

    def read_back(self, verifying: Callable[[int], None]) -> None:
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


@dataclass(frozen=True)
class FileTransfer:
    """Fetches a file from `url`, with progress to `report(phase, bytes of this file, note)`."""

    client: HubClient
    remote: RemoteFile
    url: str
    report: Callable[[str, int, str], None]

    def run(self, partial_path: Path, destination: Path) -> None:
        """Leave the verified file at `destination`; what it had when it broke off stays at `partial_path`.

        Raises DownloadError or AccessError, and DoesNotFitError when the disk is full.
        """
        # A second time from nothing: the bytes that an earlier run left may be the wrong ones.
        for _ in range(2):
            with closing(PartialFile(partial_path, self.remote)) as partial:
                partial.read_back(lambda count: self.report("verifying", count, ""))
                self._fill(partial)
                if partial.matches:
                    partial.publish(destination)
                    return
                partial.discard(destination)
        raise DownloadError(
            f"{self.remote.name} is not what the hub promised",
            why=f"its {self.remote.size_bytes} bytes have another checksum than {self.remote.digest}, twice",
            fix=self.client.resume_command,
        )

    def _fill(self, partial: PartialFile) -> None:
        policy = self.client.hub.retry
        attempts = Attempts(policy, policy.attempts, lambda note: self.report("retrying", partial.position, note))
        with_range = True
        while partial.missing_bytes:
            before = partial.position
            try:
                self._receive(partial, before if with_range else 0)
                interruption = TransferInterruptedError("the connection ended early")
            except TransferInterruptedError as error:
                interruption = error
            with_range = with_range and not interruption.refused_range
            progressed = partial.position - before >= policy.progress_bytes
            if partial.missing_bytes and (given_up := attempts.failed(interruption, progressed=progressed)):
                raise DownloadError(
                    f"{self.remote.name} could not be fetched",
                    why=f"{given_up}; {partial.position} of {self.remote.size_bytes} bytes are kept",
                    fix=self.client.resume_command,
                )

    def _receive(self, partial: PartialFile, start: int) -> None:
        with self.client.open(self.url, {"Range": f"bytes={start}-"} if start else {}) as response:
            unread = partial.position - self._first_byte(response, start)  # bytes that we hold already
            # No chunk size: bytes gathered to fill one would be lost with the connection.
            for chunk in response.iter_bytes():
                fresh = chunk[unread:]
                unread -= len(chunk) - len(fresh)
                if fresh:
                    partial.append(fresh)
                    self.report("downloading", partial.position, "")
                if not partial.missing_bytes:
                    return

    def _first_byte(self, response: httpx2.Response, start: int) -> int:
        """Return which byte of the file the body starts with. Raises TransferInterruptedError for what cannot be it."""
        size, headers = self.remote.size_bytes, response.headers
        # Some servers compress although asked not to; a range of that is of no use.
        is_plain = headers.get("content-encoding", "identity").lower() == "identity"
        if response.status_code == 416:
            raise TransferInterruptedError("the server refuses to go on from where we were", refused_range=True)
        if response.status_code == 206:
            found = is_plain and _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
            if not found or int(found[1]) != start or found[3] not in ("*", str(size)):
                raise TransferInterruptedError("the server sent another range than asked for", refused_range=True)
            return start
        length = headers.get("content-length", "")
        if is_plain and length.isdigit() and int(length) != size:
            raise TransferInterruptedError(f"the server announces {int(length)} bytes, the hub promised {size}")
        return 0
