"""A group of processes whose memory, with the page cache that they fill, has a limit: a control group of Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers_protocol import UnavailableError

_ROOT = Path("/sys/fs/cgroup")
# The folder of groups and the file that takes a group's limit, by versions of the interface.
_VERSIONS = ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max"))


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A group that is empty, and has to be so in the end. Raises UnavailableError where this user may make none."""
    group = _new_group(limit_bytes)
    try:
        yield group
    finally:
        group.rmdir()


def _new_group(limit_bytes: int) -> Path:
    for folder, limit in _VERSIONS:
        group = folder / f"localllm-benchmark-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                with (group / limit).open("r+") as file:  # a folder of no groups has no such file
                    file.write(str(limit_bytes))
            except OSError:
                group.rmdir()
            else:
                return group
    raise UnavailableError("no group with a limit of memory can be made", "run it as root, on Linux")


def join(group: Path, pid: int) -> None:
    """Put a process into the group; what it had before does not count."""
    (group / "cgroup.procs").write_text(str(pid))


def bytes_from_disk(pid: int) -> int:
    """Return what a process has made the disk read so far, also by touching mapped pages."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
