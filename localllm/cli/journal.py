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
from array import array
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
_ABSENT = -1


def jobs_root() -> Path:
    """The folder of all jobs that were begun; it need not exist."""
    return user_directories().cache / "jobs"


@contextmanager
def open_journal(key: str, num_prompts: int, seed: int, *, fresh: bool = False) -> Iterator[Journal]:
    """The journal of the job `key`, held alone; what an earlier run answered is in it.

    seed: what the job draws with if it begins now. fresh: an earlier run counts as nothing. Raises LocalLLMError where
    another process is at this job, or the disk refuses.
    """
    directory = jobs_root() / key
    with ExitStack() as held:
        with _disk(directory):
            jobs_root().parent.mkdir(parents=True, exist_ok=True)
            jobs_root().mkdir(mode=0o700, exist_ok=True)  # answers are their owner's alone
            _forget_old_jobs(but=directory)
            held.enter_context(exclusive(directory, _refuse))
            directory.chmod(0o700)
            journal = Journal(directory / _FILE, num_prompts, seed, fresh=fresh)
        held.callback(journal.close)
        yield journal


class Journal:
    """The answers of one job by their index; `open_journal` makes it. Raises LocalLLMError where the disk refuses."""

    def __init__(self, path: Path, num_prompts: int, seed: int, *, fresh: bool) -> None:
        self.path = path
        self.seed = seed
        self._starts = array("q", [_ABSENT]) * num_prompts
        self._sizes = array("q", [0]) * num_prompts
        self._count = 0
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
        return self._count

    def __contains__(self, index: int) -> bool:
        return self._starts[index] != _ABSENT

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The answer as it was appended."""
        with _disk(self.path):
            line = os.pread(self._descriptor, self._sizes[index], self._starts[index])
        answer: dict[str, Any] = json.loads(line[_CHECKSUM:])
        return answer

    def append(self, answer: Mapping[str, Any]) -> None:
        """Keeps a finished answer; `answer["index"]` says which one it is. A kill cannot take it back."""
        with _disk(self.path):
            self._place(answer["index"], *self._write(answer))

    def sync(self) -> None:
        """Waits until the disk has everything that was appended `SYNC_S` ago and longer; call it again and again."""
        if self._unsynced_since is not None and time.monotonic() - self._unsynced_since >= SYNC_S:
            with _disk(self.path):
                os.fsync(self._descriptor)
            self._unsynced_since = None

    def remove(self) -> None:
        """The job is done: nobody will go on with it."""
        self.path.unlink(missing_ok=True)
        self._unsynced_since = None

    def close(self) -> None:
        """Close the file, and delete it where it has no answer yet."""
        with suppress(OSError):
            if self._count == 0:
                self.remove()
            elif self._unsynced_since is not None:
                os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _read_back(self) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None or not self._take(record, len(line)):
                    break
                self._end += len(line)
        os.ftruncate(self._descriptor, self._end)

    def _take(self, record: Mapping[str, Any], size: int) -> bool:
        """Take in a line of an earlier run; return False where it is not this job's."""
        num_prompts = len(self._starts)
        if self._end == 0:
            if record.get("prompts") != num_prompts:
                return False
            self.seed = record["seed"]
            return True
        index = record.get("index")
        if not isinstance(index, int) or not 0 <= index < num_prompts or index in self:
            return False
        self._place(index, self._end, size)
        return True

    def _place(self, index: int, start: int, size: int) -> None:
        self._starts[index], self._sizes[index] = start, size
        self._count += 1

    def _write(self, record: Mapping[str, Any]) -> tuple[int, int]:
        text = json.dumps(record).encode("ascii")
        line = b"%08x %b\n" % (zlib.crc32(text), text)
        start, view = self._end, memoryview(line)
        while view:
            written = os.pwrite(self._descriptor, view, self._end)
            self._end += written
            view = view[written:]
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()
        return start, len(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for one that is not as it was written."""
    text = line[_CHECKSUM:-1]
    if not line.endswith(b"\n") or line[:_CHECKSUM] != b"%08x " % zlib.crc32(text):
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None


def _forget_old_jobs(but: Path) -> None:
    """Deletes what was begun and not gone on with for a month: answers are not to lie about for ever."""
    oldest = time.time() - LIFETIME_S
    for directory in jobs_root().iterdir():
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
