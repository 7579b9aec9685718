"""A file of packed weights that stays open while it is read from: it goes on as it was where it is replaced, and is
refused where it is written to."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.offload.streaming.disk_read import open_direct, open_plain


class OpenFile:
    """plain, direct: its descriptors through the page cache and past it, the latter None where there is no such way."""

    def __init__(self, path: Path, fix: str) -> None:
        """fix: the command that makes the file anew. Raises CheckpointError where it cannot be opened."""
        self._path, self._fix = path, fix
        try:
            self.plain = open_plain(path)
        except OSError as error:
            raise self.refusal("cannot be read", error.strerror or "unknown") from None
        self.direct = open_direct(path)
        try:
            self._stamp = self._stamped()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for descriptor in (self.plain, self.direct):
            if descriptor is not None:
                os.close(descriptor)

    def require_unchanged(self, why: str = "something has written to it") -> None:
        """Raise CheckpointError where the file is not as it was opened."""
        if self._stamped() != self._stamp:
            raise self.refusal("was changed while it was in use", why)

    def refusal(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}", why=why, fix=self._fix)

    def _stamped(self) -> tuple[int, int]:
        try:
            status = os.fstat(self.plain)
        except OSError as error:  # of a network's file that is gone
            raise self.refusal("cannot be read", str(error)) from None
        return status.st_size, status.st_mtime_ns
