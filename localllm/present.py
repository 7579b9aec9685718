"""Files and folders as they are there for this process: what is absent, or lies behind a file or a folder that it may
not enter, is not. `Path.exists` and its like raise in the last case."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from localllm.errors import FETCH_ANEW, CheckpointError


def is_there(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112


def is_link(path: Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114


def nearest(path: Path) -> Path:
    """The path, or of those above it the first that is there. Where that is a folder, what is made at the path will be
    on its disk; where it is none, nothing can be made there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if is_there(each))


def open_plain_file(path: Path) -> int:
    """Open a file for reading and return its descriptor; a pipe or a device is refused before it can block. Raises
    CheckpointError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        is_absent = isinstance(error, FileNotFoundError)  # any other may be whole, and is not to be deleted
        fix = FETCH_ANEW if is_absent else f"ls -l {shlex.quote(str(path))}"
        raise CheckpointError(f"{path} cannot be read", why=reason or "unknown", fix=fix) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        why = "pipes, devices and folders are not read"
        raise CheckpointError(f"{path} is not a plain file", why=why, fix=FETCH_ANEW)
    return fd
