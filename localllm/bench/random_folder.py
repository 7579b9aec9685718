"""The folder of a model with random weights, which is removed when the model is no longer used.

It lies beside the packed models, on the disk that they are streamed from. The next measurement removes what a killed
process left behind. Imports no torch: the thread that holds it must be reached by signals.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localllm.hub.locks import LOCK, exclusive
from localllm.hub.packed import RANDOM_NAME, packed_of_folder, packed_root

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_MOST_TRIES = 100


@contextmanager
def random_folder() -> Iterator[Path]:
    """An empty folder for such a model. Another thread may still write there at the end of the block."""
    folder = packed_root().parent / f"random-{secrets.token_hex(4)}"
    with exclusive(folder, lambda _process: None):  # a folder without a lock is one whose owner was killed
        try:
            packed_of_folder(folder).mkdir(parents=True, exist_ok=True)
            yield folder
        finally:
            _empty(folder)


def remove_abandoned() -> None:
    """Remove the folders of killed processes, and neither those of living ones nor anything else."""

    def leave(_process: str) -> None:
        raise _InUseError

    cache = packed_root().parent
    names = {path.name for place in (cache, packed_of_folder(cache)) for path in place.glob("random-*")}
    for folder in (cache / name for name in names):
        with suppress(OSError, _InUseError):
            if _is_random_model(folder):
                with exclusive(folder, leave):
                    _empty(folder)


class _InUseError(Exception):
    """Another process has the folder."""


def _is_random_model(folder: Path) -> bool:
    """Return whether the folder has such a name and nothing foreign in it; also where only its packed form is left."""
    if not RANDOM_NAME.fullmatch(folder.name) or folder.is_symlink():
        return False
    return not folder.exists() or {path.name for path in folder.iterdir()} <= {CONFIG, TOKENIZER, LOCK}


def _empty(folder: Path) -> None:
    """Delete its packed form and its content but the lock, with which the folder goes."""
    packed = packed_of_folder(folder)
    for _ in range(_MOST_TRIES):  # another thread may begin a file meanwhile, until its folder is gone
        shutil.rmtree(packed, ignore_errors=True)
        if not packed.exists():
            break
    for name in (CONFIG, TOKENIZER):
        (folder / name).unlink(missing_ok=True)
