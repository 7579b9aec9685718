"""The folder of the pages that outlive a process: what its files are called, what is there, how room is made.

    kv/ROOT/PAGE.PARENT.page     ROOT, PAGE, PARENT: the first 32 hexadecimal digits of a digest; a chain begins where
                                 PARENT is ROOT
    kv/ROOT/about.json           what the pages are of, for people
    kv/quarantine/               the last files that were not what their names say

A page's name holds its parent's, so that a listing alone says which pages hang on which: no header is read for it, and
no index can be out of date. A snapshot of recurrent states is one more page, whose name follows from its parent's.
Links are never followed, and nothing else that lies here is deleted. Imports neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from localllm.config import user_directories
from localllm.present import is_folder, is_link, nearest

PAGE_TOKENS = 64
MOST_BYTES = 8 << 30  # where nobody asked for more: 130 thousand tokens of Mistral 7B in INT8
KEPT_FREE_BYTES = 1 << 30  # of the disk: as it fills with other things, the pages give way
_SHARE_OF_FREE = 10
_QUARANTINE = "quarantine"
_MOST_QUARANTINED = 8  # files of up to 10 MB, to be looked at by whoever wonders
_ABOUT = "about.json"
_ABOUT_LIMIT_BYTES = 1 << 16
_NAME_BYTES = 16
_ROOT = re.compile("[0-9a-f]{32}")
_PAGE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.page")
_TEMPORARY = re.compile(r"\.[0-9a-z]+\.(\d{1,10})-[0-9a-f]{16}\.tmp")
_QUARANTINED = re.compile(f"{_ROOT.pattern}\\.{_PAGE.pattern}")
# Writing a page takes a second at most. A process id may be another's by now, or one of another container's.
_TEMPORARY_LIFETIME_S = 3600.0


Place = tuple[str, str]  # the names of a root and a page


class NotOurFolderError(Exception):
    """Others may write into the folder of pages: they are checked for damage, not for malice."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page by its names. used_ns: when it was last read or written, by the clock as it was then."""

    root: str
    page: str
    parent: str
    num_bytes: int
    used_ns: int

    @property
    def place(self) -> Place:
        return self.root, self.page

    @property
    def behind(self) -> Place:
        """The place of the page before it, or of the root."""
        return self.root, self.parent

    @property
    def is_snapshot(self) -> bool:
        return self.page == name_of(snapshot_digest(bytes.fromhex(self.parent)))

    @property
    def path(self) -> Path:
        """Below the folder of all pages."""
        return Path(self.root, f"{self.page}.{self.parent}.page")


@dataclass(frozen=True)
class KeptPages:
    """The pages of one model in one format. about: what they are of, as who wrote them has put it; may be empty."""

    root: str
    about: Mapping[str, str]
    num_pages: int
    num_snapshots: int
    num_bytes: int
    used_ns: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS


def kv_root() -> Path:
    """Return the folder of all pages; it need not exist."""
    return user_directories().cache / "kv"


def name_of(digest: bytes) -> str:
    return digest[:_NAME_BYTES].hex()


def snapshot_digest(page: bytes) -> bytes:
    """Return what the snapshot behind a page of this digest is called; the part of it that is in names is enough."""
    return hashlib.blake2b(page[:_NAME_BYTES], digest_size=32, person=b"localllm-state").digest()


def default_limit_bytes(directory: Path, held_bytes: int) -> int:
    """Return a tenth of what would be free without the pages, 8 GiB at most."""
    return min(MOST_BYTES, (free_bytes(directory) + held_bytes) // _SHARE_OF_FREE)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk that `directory` is, or will be, on; 0 where they cannot be known."""
    existing = nearest(directory)
    with suppress(OSError):
        return shutil.disk_usage(existing).free if is_folder(existing) else 0
    return 0


def scan(directory: Path) -> Iterator[PageFile]:
    """Yield every page of every root, in no order. Those that cannot be examined are skipped."""
    for root in root_folders(directory):
        for entry in _entries(directory / root):
            with suppress(OSError):  # evicted by another process meanwhile
                if (found := _PAGE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield PageFile(root, found[1], found[2], status.st_size, status.st_mtime_ns)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        yield from entries


def make_folder(directory: Path, root: str, about: Mapping[str, str]) -> Path:
    """Make the folder of a root's pages, closed to others, and return it. Raises OSError, also where a link stands in
    its place, and NotOurFolderError."""
    folder = directory / root
    if not is_folder(folder):
        directory.parent.mkdir(parents=True, exist_ok=True)
        for path in (directory, folder):
            path.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link, which is not followed")
    close_to_others(directory)
    if read_about(folder) == about:
        return folder
    temporary = temporary_path(folder, "about")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(dict(about), file)
        temporary.replace(folder / _ABOUT)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return folder


def close_to_others(directory: Path) -> None:
    """Close the folder of all pages to other users. Raises OSError, and NotOurFolderError where others may write there
    all the same: it is another user's, or its file system knows no permissions."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise NotOurFolderError(f"it belongs to user {status.st_uid}, this is user {os.geteuid()}")
    if status.st_mode & 0o077:
        with suppress(OSError):
            directory.chmod(0o700)
        if directory.stat().st_mode & 0o022:
            raise NotOurFolderError("other users may write there, and its file system does not let that be changed")


def temporary_path(folder: Path, name: str) -> Path:
    """Return a name that no other file has, and that `remove_stale` knows. name: letters and digits."""
    return folder / f".{name}.{os.getpid()}-{secrets.token_hex(8)}.tmp"


def read_about(folder: Path) -> dict[str, str]:
    """Return what the pages of a root's folder are of; empty where that is not known."""
    try:
        descriptor = os.open(folder / _ABOUT, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = json.loads(file.read(_ABOUT_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(about, dict):
        return {}
    return {key: value for key, value in about.items() if isinstance(value, str)}


def remove_stale(directory: Path) -> None:
    """Delete the temporary files of processes that ended while they wrote."""
    for root in root_folders(directory):
        _remove_temporaries(directory / root, _is_stale)


def _remove_temporaries(folder: Path, unwanted: Callable[[os.DirEntry[str]], bool]) -> None:
    for entry in _entries(folder):
        with suppress(OSError):
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and unwanted(entry):
                Path(entry.path).unlink()


def _is_stale(entry: os.DirEntry[str]) -> bool:
    age_s = abs(time.time() - entry.stat(follow_symlinks=False).st_mtime)
    found = _TEMPORARY.fullmatch(entry.name)
    return age_s > _TEMPORARY_LIFETIME_S or (found is not None and not psutil.pid_exists(int(found[1])))


def quarantine(directory: Path, file: PageFile) -> None:
    """Move a file that is not what its name says into quarantine, where the last few are kept. Raises OSError where it
    cannot be moved."""
    path, folder = directory / file.path, directory / _QUARANTINE
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link, which is not followed")
    path.rename(folder / f"{file.root}.{path.name}")
    kept = sorted(_quarantined(directory), key=lambda entry: entry.stat(follow_symlinks=False).st_ctime_ns)
    for entry in kept[:-_MOST_QUARANTINED]:
        Path(entry.path).unlink(missing_ok=True)


def _quarantined(directory: Path) -> list[os.DirEntry[str]]:
    folder = directory / _QUARANTINE
    if is_link(folder):
        return []
    return [e for e in _entries(folder) if _QUARANTINED.fullmatch(e.name) and e.is_file(follow_symlinks=False)]


def quarantined_sizes(directory: Path) -> list[int]:
    """Return the bytes of each file that is kept in quarantine."""
    sizes = []
    for entry in _quarantined(directory):
        with suppress(OSError):  # gone meanwhile
            sizes.append(entry.stat(follow_symlinks=False).st_size)
    return sizes


def kept_pages(directory: Path) -> list[KeptPages]:
    """Return the pages that there are, by root, the last used first."""
    by_root: dict[str, list[PageFile]] = {}
    for file in scan(directory):
        by_root.setdefault(file.root, []).append(file)
    kept = []
    for root, files in by_root.items():
        num_bytes, used_ns = sum(file.num_bytes for file in files), max(file.used_ns for file in files)
        num_snapshots = sum(file.is_snapshot for file in files)
        num_pages = len(files) - num_snapshots
        kept.append(KeptPages(root, read_about(directory / root), num_pages, num_snapshots, num_bytes, used_ns))
    return sorted(kept, key=lambda pages: -pages.used_ns)


def remove_pages(directory: Path, roots: Iterable[str]) -> int:
    """Delete the pages of these roots, and folders that are empty then; return the bytes that became free.

    A process that uses them meanwhile finds them missing, and computes anew. Raises OSError.
    """
    chosen, freed = set(roots), 0
    for file in scan(directory):
        if file.root in chosen:
            (directory / file.path).unlink(missing_ok=True)
            freed += file.num_bytes
    for root in chosen:
        folder = directory / root
        if not folder.is_symlink():
            _remove_temporaries(folder, lambda _: True)
            (folder / _ABOUT).unlink(missing_ok=True)
            _remove_if_empty(folder)
    _remove_if_empty(directory)
    return freed


def remove_quarantined(directory: Path) -> int:
    """Delete the files in quarantine; return the bytes that became free. Raises OSError."""
    freed = 0
    for entry in _quarantined(directory):
        freed += entry.stat(follow_symlinks=False).st_size
        Path(entry.path).unlink(missing_ok=True)
    _remove_if_empty(directory / _QUARANTINE)
    _remove_if_empty(directory)
    return freed


def root_folders(directory: Path) -> list[str]:
    """Return the names of all roots, those without a page too. Links are none."""
    names = []
    for entry in _entries(directory):
        with suppress(OSError):
            if _ROOT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
    return names


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless it holds anything or is a link."""
    with suppress(OSError):
        folder.rmdir()
