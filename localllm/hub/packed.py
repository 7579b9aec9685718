"""Folders of packed models: which belongs to which checkpoint and weight format, and how it is freed.

    packed/hub/ORG/REPO/@COMMIT/WEIGHTS/        made from a model of the download cache
    packed/folders/PATH/@FINGERPRINT/WEIGHTS/   made from a folder, the built-in model's or the user's, or a GGUF file

The path says all there is to know about what a packed model was made from, so that nothing needs to be written beside
it. A fingerprint is what the folder's config and weights looked like: bytes made from what has changed are not found
again. What a packed model's files hold is not known here, but for the one that is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm.config import user_directories
from localllm.errors import CheckpointError, LocalLLMError, UsageError
from localllm.gguf.folder import fingerprint as gguf_fingerprint
from localllm.hub.locks import LOCK, exclusive, unread
from localllm.hub.names import ModelFiles
from localllm.hub.repo_cache import COMMIT, INDEX
from localllm.present import is_file, is_folder, is_link
from localllm.registry import REPO_ID

PACKED_INDEX = "index.json"  # written last: a folder that has it is whole
WEIGHTS_NAME = re.compile(r"[a-z0-9]{1,16}(?:-[a-z0-9]{1,16}){0,4}")
_COMMIT = re.compile(f"@({COMMIT.pattern})")
_FINGERPRINT = re.compile(r"@([0-9a-f]{32})")


@dataclass(frozen=True)
class PackedWeights:
    """One packed model, or the beginning of one. "orphan": the checkpoint that it was made from is gone or changed."""

    weights: str  # the recipe's name: "int4-g64"
    directory: Path
    size_bytes: int
    state: Literal["whole", "unfinished", "orphan"]


@dataclass(frozen=True)
class PackedSource:
    """A checkpoint as it was when it was packed."""

    origin: str | Path  # the hub's repository, or the folder
    key: str  # the commit, or the fingerprint
    models: tuple[PackedWeights, ...]


def packed_root() -> Path:
    """The folder of all packed models; it need not exist."""
    return user_directories().cache / "packed"


def packed_directory(files: ModelFiles, recipe_name: str) -> Path:
    """Return the folder of the model's weights in this format, which need not be there.

    Raises UsageError for a name that is none, CheckpointError where the folder cannot be examined.
    """
    if not WEIGHTS_NAME.fullmatch(recipe_name):
        raise UsageError(f"{recipe_name[:80]!r} is not a weight format", why="a name is letters and digits: int4-g64")
    return _place(files) / recipe_name


def packed_of_folder(folder: Path) -> Path:
    """Return the folder of all that was packed of a user's folder or GGUF file, as it is and as it was; it need not be
    there."""
    folder = folder if is_file(folder) else folder.resolve()
    return packed_root() / "folders" / folder.relative_to(folder.anchor)


def source_id(files: ModelFiles) -> str:
    """The checkpoint as it is now, in one line: "ORG/REPO@COMMIT", "/a/folder@FINGERPRINT"."""
    place = _place(files)
    origin = files.place if files.repo is None or files.gguf is not None else files.repo
    return f"{origin}{place.name}"


def packed_recipes(files: ModelFiles) -> list[str]:
    """The formats in which the whole model is packed."""
    return [model.weights for model in _models_in(_place(files)) if model.state == "whole"]


def is_whole(directory: Path) -> bool:
    """Return whether the packed model in a folder was finished; False too where it may not be looked at."""
    return is_file(directory / PACKED_INDEX)


def packed_sources() -> Iterator[PackedSource]:
    """Everything that rests under the root, by the checkpoint it was made from. Links are not followed."""
    root = packed_root()
    for kind, pattern in (("hub", _COMMIT), ("folders", _FINGERPRINT)):
        for parent, names, _ in os.walk(root / kind):
            names.sort()
            for name in [name for name in names if pattern.fullmatch(name)]:
                names.remove(name)
                relative = Path(parent).relative_to(root / kind)
                origin = relative.as_posix() if kind == "hub" else Path(os.sep) / relative
                is_checkpoint = not isinstance(origin, str) or REPO_ID.fullmatch(origin) is not None
                if is_checkpoint and (models := _models_in(Path(parent, name))):
                    yield PackedSource(origin, name.removeprefix("@"), models)


def fingerprint(folder: Path) -> str:
    """Hash the folder's config, and the names, sizes and times of its weights, to 32 hexadecimal digits. Of a GGUF
    model, the sizes and times of its files.

    Raises CheckpointError where they cannot be examined.
    """
    if is_file(folder):
        return gguf_fingerprint(folder)
    try:
        config = hashlib.blake2b((folder / "config.json").read_bytes()).hexdigest()
        weights = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == INDEX)
        states = [(path.name, path.stat()) for path in weights]
    except OSError as error:
        fix = f"ls -l {shlex.quote(str(folder))}"
        raise CheckpointError(f"{folder} cannot be read", why=str(error), fix=fix) from None
    # The time of the last change of any kind too: archives and copies set the other one to what they like.
    seen = [config, *((name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states)]
    return hashlib.blake2b(json.dumps(seen).encode(), digest_size=16).hexdigest()


def remove_packed(models: Iterable[PackedWeights]) -> int:
    """Delete packed models and return the bytes that became free. A link is deleted, never followed.

    Raises LocalLLMError where another process makes or reads one of them, or the disk refuses. Nothing is deleted
    unless all can be.
    """
    models, root = tuple(models), packed_root()
    how = f"ls -lR {shlex.quote(str(root))}"
    try:
        with ExitStack() as held:
            for model in models:
                parent = model.directory.parent
                # The root may be a link to a larger disk; nothing below it is followed.
                if parent.resolve() != root.resolve() / parent.relative_to(root):
                    why = "a link leads out of the folder of packed weights"
                    raise LocalLLMError(f"{model.directory} is not deleted", why=why, fix=how)
                if not model.directory.is_symlink():
                    _hold(model, held)
            for model in models:
                _empty(model.directory)
        for model in models:
            # Folders that hold nothing any more; one in which another process has begun to pack since then stays.
            for relative in (path := model.directory.relative_to(root), *list(path.parents)[:-1]):
                with suppress(OSError):
                    (root / relative).rmdir()
    except OSError as error:
        raise LocalLLMError("packed weights could not be deleted", why=str(error), fix=how) from None
    return sum(model.size_bytes for model in models)


def _place(files: ModelFiles) -> Path:
    root = packed_root()
    if files.repo is None or files.gguf is not None:
        return packed_of_folder(files.place) / f"@{fingerprint(files.place)}"
    if not REPO_ID.fullmatch(files.repo) or not COMMIT.fullmatch(files.revision or ""):
        raise UsageError(f"{files.repo[:80]!r} at {str(files.revision)[:80]!r} is not a model of the hub")
    return root / "hub" / files.repo / f"@{files.revision}"


def _models_in(place: Path) -> tuple[PackedWeights, ...]:
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return ()
    models = []
    for entry in entries:
        with suppress(OSError):  # a link that leads to itself
            if WEIGHTS_NAME.fullmatch(entry.name) and entry.is_dir():
                directory = Path(entry.path)
                state: Literal["whole", "unfinished"] = "whole" if is_whole(directory) else "unfinished"
                models.append(PackedWeights(entry.name, directory, own_bytes(directory), state))
    return tuple(models)


def own_bytes(folder: Path) -> int:
    """Return the bytes of plain files that would be freed with a folder: links count nothing."""
    if is_link(folder) or not is_folder(folder):
        return 0
    freed = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process is at work here, or it may not be looked at
            if not path.is_symlink() and path.is_file() and (state := path.lstat()).st_nlink == 1:
                freed += state.st_size
    return freed


def _hold(model: PackedWeights, held: ExitStack) -> None:
    """Keep other processes from writing and reading the packed model until `held` is closed. Raises LocalLLMError where
    one does so already."""

    def refuse(why: str) -> None:
        raise LocalLLMError(f"{model.directory} is not deleted", why=why, fix="wait for it, or stop it")

    held.enter_context(exclusive(model.directory, lambda process: refuse(f"process {process} is packing it")))
    if not held.enter_context(unread(model.directory / PACKED_INDEX)):
        refuse("another process is reading it")


def _empty(directory: Path) -> None:
    """Delete all but the lock file, which goes when the lock does."""
    if directory.is_symlink():
        directory.unlink()
        return
    # What makes it count as whole goes first, so that a removal cut short leaves nothing that looks like a model.
    for path in sorted(directory.iterdir(), key=lambda path: path.name != PACKED_INDEX):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
