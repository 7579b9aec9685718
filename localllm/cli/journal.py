"""The finished answers of a job, in a file that outlives the process: a kill costs only what was being computed.

A line is a checksum and a JSON object: the first one says what the job decided for itself, each other one is a finished
answer. A line that was cut, or torn by a loss of power, ends what is believed; it is written anew. Knows no engine, and
of an answer only its index.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from localllm.config import user_directories
from localllm.errors import LocalLLMError
from localllm.hub.locks import exclusive

SYNC_S = 1.0  # what a loss of power may cost
LIFETIME_S = 30 * 86400.0  # of a job that nobody goes on with
_FILE = "answers"
_CHECKSUM = 9  # eight digits and a blank


@contextmanager
def open_journal(key: str, num_prompts: int, seed: int, *, fresh: bool = False) -> Iterator[Journal]:
    """The journal of the job `key`, held alone; what an earlier run answered is in it.

    seed: what the job draws with if it begins now. fresh: an earlier run counts as nothing. Raises LocalLLMError where
    another process is at this job, or the disk refuses.
    """
    root = user_directories().cache / "jobs"
    directory = root / key
    with ExitStack() as held:
        with _disk(directory):
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)  # answers are their owner's alone
            _forget_old_jobs(root, but=directory)
            held.enter_context(exclusive(directory, _refuse))
            directory.chmod(0o700)
            journal = Journal(directory / _FILE, num_prompts, seed, fresh=fresh)
        held.callback(journal.close)
        yield journal


class Journal:
    """The answers of one job by their index; `open_journal` makes it. Raises LocalLLMError where the disk refuses."""

    def __init__(self, path: Path, num_prompts: int, seed: int, *, fresh: bool) -> None:
        self.seed = seed
        self._path = path
        self._num_prompts = num_prompts
        self._lines: dict[int, tuple[int, int]] = {}  # the byte at which an answer begins, and its size
        self._end = 0
        self._unsynced_since: float | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags | (os.O_TRUNC if fresh else 0), 0o600)
        try:
            self._read_back()
            if self._end == 0:
                self._write({"seed": seed, "prompts": num_prompts})
        except BaseException:
            os.close(self._descriptor)
            raise

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, index: int) -> bool:
        return index in self._lines

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The answer as it was appended."""
        start, size = self._lines[index]
        with _disk(self._path):
            answer: dict[str, Any] = json.loads(os.pread(self._descriptor, size, start)[_CHECKSUM:])
        return answer

    def append(self, answer: Mapping[str, Any]) -> None:
        """Keeps a finished answer; `answer["index"]` says which one it is. A kill cannot take it back."""
        start = self._end
        with _disk(self._path):
            self._write(answer)
        self._lines[answer["index"]] = start, self._end - start

    def sync(self) -> None:
        """Waits until the disk has everything that was appended `SYNC_S` ago and longer; call it again and again."""
        if self._unsynced_since is not None and time.monotonic() - self._unsynced_since >= SYNC_S:
            with _disk(self._path):
                os.fsync(self._descriptor)
            self._unsynced_since = None

    def remove(self) -> None:
        """The job is done: nobody will go on with it."""
        self._path.unlink(missing_ok=True)
        self._unsynced_since = None

    def close(self) -> None:
        """Close the file, and delete it where it has no answer yet."""
        with suppress(OSError):
            if not self._lines:
                self.remove()
            elif self._unsynced_since is not None:
                os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _read_back(self) -> None:
        """Take in the lines of an earlier run, up to the first that is not as it was written, or not this job's."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                text = line[_CHECKSUM:-1]
                if not line.endswith(b"\n") or line[:_CHECKSUM] != b"%08x " % zlib.crc32(text):
                    break
                record = json.loads(text)
                index = record.get("index")
                if self._end == 0 and record.get("prompts") == self._num_prompts:
                    self.seed = record["seed"]
                elif self._end and index in range(self._num_prompts) and index not in self:
                    self._lines[index] = self._end, len(line)
                else:
                    break
                self._end += len(line)
        os.ftruncate(self._descriptor, self._end)

    def _write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record).encode("ascii")
        left = memoryview(b"%08x %b\n" % (zlib.crc32(text), text))
        while left:
            written = os.pwrite(self._descriptor, left, self._end)
            self._end += written
            left = left[written:]
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()


def _forget_old_jobs(root: Path, but: Path) -> None:
    """Deletes what was begun and not gone on with for a month: answers are not to lie about for ever."""
    oldest = time.time() - LIFETIME_S
    for directory in root.iterdir():
        with suppress(OSError, _InUseError):
            if directory != but and (directory / _FILE).stat().st_mtime < oldest:
                with exclusive(directory, _refuse):
                    shutil.rmtree(directory)


class _InUseError(LocalLLMError):
    """Another process is at the same job."""


def _refuse(process: str) -> None:
    fix = f"wait for it, or stop it: kill {process}" if process.isdigit() else "wait for it, or stop it"
    raise _InUseError("this very job is being run already", why=f"process {process} is at it", fix=fix)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalLLMError(
            "the journal of this job cannot be kept",
            why=f"{error.strerror or error} ({path}); what it holds already is not lost",
            fix=f"df -h {shlex.quote(str(user_directories().cache))}, or another folder: LOCALLLM_CACHE=FOLDER",
        ) from error
