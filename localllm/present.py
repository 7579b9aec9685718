"""Tests whether something is there for this process: what is absent, or lies behind a file or a folder that it may
not enter, is not. `Path.exists` and its like raise in the last case."""

from __future__ import annotations

import os
from pathlib import Path


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
