"""An open file of weights, read by `preadv`: nothing is mapped, as a mapped file that someone truncates kills the
process. Knows no format."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from localllm.errors import FETCH_ANEW, CheckpointError
from localllm.present import open_plain_file

READ_BYTES = 32 << 20  # between two reads Ctrl-C is seen; larger reads are no faster


class WeightFile:
    """size_bytes: when it was opened."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where it cannot be opened or is no plain file."""
        self.path = path
        self.descriptor = open_plain_file(path)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        self.size_bytes = status.st_size
        self._identity = _identity(status)

    def close(self) -> None:
        self._close()

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read as many bytes as the buffer has, from `offset` on. Raises CheckpointError.

        Python lets go of its lock in `preadv`, so that other threads compute while this one reads.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.descriptor, [buffer[done : done + READ_BYTES]], offset + done)
            except OSError as error:
                why = f"reading at byte {offset + done} failed: {error.strerror}"
                raise CheckpointError(f"{self.path} cannot be read", why=why, fix=FETCH_ANEW) from None
            if count == 0:
                size = os.fstat(self.descriptor).st_size
                why = f"{offset + len(buffer)} bytes are needed, it now has {size}"
                raise CheckpointError(f"{self.path} is cut short", why=why, fix=FETCH_ANEW)
            done += count

    def chunks(self, begin: int, end: int, chunk_bytes: int = READ_BYTES) -> Iterator[bytes]:
        """Yield the bytes from `begin` to `end`, in order. Raises CheckpointError."""
        for at in range(begin, end, chunk_bytes):
            buffer = bytearray(min(chunk_bytes, end - at))
            self.fill(memoryview(buffer), at)
            yield bytes(buffer)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check after a read that the file is still the one whose header was checked."""
        try:
            now = _identity(self.path.stat())
        except OSError as error:
            why = f"it went away while it was read: {error.strerror}"
            raise CheckpointError(f"{self.path} cannot be read", why=why, fix=FETCH_ANEW) from None
        if now != self._identity:
            why = f"inode, bytes, mtime were {self._identity}, now {now}"
            raise CheckpointError(f"{self.path} changed while it was read", why=why, fix="load the model again")


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
