"""One repository's folder in huggingface_hub's cache: blobs, snapshots, refs, and what makes a snapshot whole.

    models--ORG--REPO/
        blobs/DIGEST                         verified files; DIGEST.localllm.incomplete: the start of one
        snapshots/COMMIT/FILE                links into blobs
        refs/REVISION                        the commit that a branch or tag stood for
        .localllm/COMMIT.json                the files of a finished pull, written last
    .localllm/COMMIT.gguf.json           the GGUF files that were ever wanted, written before they are fetched

A snapshot that another tool fetched has no such list; it is whole when its config, its tokenizer and every shard that
its index names are there. A GGUF model is whole when all of its files are, an adapter when both of its files are there,
whoever fetched them. Knows no network.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from localllm.config import format_bytes
from localllm.errors import CheckpointError, DoesNotFitError, DownloadError
from localllm.present import is_file, is_folder, is_link, nearest

COMMIT = re.compile(r"[0-9a-f]{7,64}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
FILE_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w.-]{0,199}", re.ASCII)
REPO_FILE = re.compile(rf"(?:{FILE_NAME.pattern}/){{0,3}}{FILE_NAME.pattern}", re.ASCII)
EXTRA_TEMPLATE = re.compile(r"additional_chat_templates/(?!.*\.\.)[A-Za-z0-9][\w.-]{0,99}\.jinja", re.ASCII)
INCOMPLETE = ".localllm.incomplete"
_WANTED = ".gguf.json"
_GGUF_DEPTH = 4  # folders of a repository in which models lie
_MOST_FILES = 10_000  # of a snapshot
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
# Each of these sets is a tokenizer: of most models, of older ones, of RWKV, of Moonshot's.
WORLD, RANKED = "rwkv_vocab_v20230424.txt", "tiktoken.model"
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), (WORLD,), (RANKED,))
JSON_LIMIT_BYTES = 8 << 20  # the largest index of a real model has about 2 MiB


class RepoCache:
    """Paths and states below one `models--org--repo` folder. Creates nothing until asked to."""

    def __init__(self, cache_dir: Path, repo: str) -> None:
        self.cache_dir = cache_dir
        self.repo = repo
        self.folder = cache_dir / ("models--" + repo.replace("/", "--"))
        self.blobs = self.folder / "blobs"
        self.lock = cache_dir / ".locks" / self.folder.name / "localllm"  # the folder to hold while this one is changed

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def manifest(self, commit: str) -> Path:
        return self.folder / ".localllm" / f"{commit}.json"

    def commits(self) -> list[str]:
        """Commits with a snapshot folder, whole or not."""
        return [name for name in _names(self.folder / "snapshots") if COMMIT.fullmatch(name)]

    def refs(self) -> dict[str, str]:
        """Branch and tag names with the commit that each stood for."""
        root = self.folder / "refs"
        paths = [path for path in sorted(root.rglob("*")) if not path.name.startswith(".")] if is_folder(root) else []
        found = {path.relative_to(root).as_posix(): _read_ref(path) for path in paths}
        return {name: commit for name, commit in found.items() if commit}

    def commit_of(self, revision: str) -> str | None:
        """The commit that `revision` stands for on this disk."""
        if COMMIT.fullmatch(revision) and is_folder(self.snapshot(revision)):
            return revision
        return _read_ref(self.folder / "refs" / revision)

    def missing(self, commit: str) -> list[str]:
        """Names of the files that the snapshot still lacks; empty when it is whole."""
        snapshot = self.snapshot(commit)
        with suppress(CheckpointError):
            sizes = read_json(self.manifest(commit)).get("files") if is_file(self.manifest(commit)) else None
            if isinstance(sizes, dict) and all(
                (FILE_NAME.fullmatch(name) or EXTRA_TEMPLATE.fullmatch(name)) and isinstance(size, int)
                for name, size in sizes.items()
            ):
                return [name for name, size in sizes.items() if self._size(snapshot / name) != size]
        absent = [] if self.holds(snapshot / "config.json") else ["config.json"]
        if not any(all(self.holds(snapshot / name) for name in names) for names in TOKENIZERS):
            absent.append("tokenizer.json")
        try:
            return absent + [name for name in self.shards(snapshot) if not self.holds(snapshot / name)]
        except CheckpointError:
            return [*absent, INDEX]

    def holds(self, path: Path) -> bool:
        return self._size(path) is not None

    def _size(self, path: Path) -> int | None:
        """Bytes of a plain file that stays inside the cache; None for everything else."""
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        # A repository's folder may itself be a link to another disk: what lies in it then belongs to the cache.
        inside = any(target.is_relative_to(root.resolve()) for root in (self.cache_dir, self.folder))
        return target.stat().st_size if inside and target.is_file() else None

    def shards(self, snapshot: Path) -> list[str]:
        """Names of the files that hold the weights, by its own index. Raises CheckpointError for a broken one."""
        return shard_names(snapshot / INDEX) if self.holds(snapshot / INDEX) else [SINGLE]

    def has_adapter(self, commit: str) -> bool:
        """Return whether a snapshot has the files of an adapter, as PEFT writes them."""
        return all(self.holds(self.snapshot(commit) / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))

    def gguf_files(self, commit: str) -> dict[str, int]:
        """Return the bytes of the GGUF files of a snapshot by their names in the repository. A file of ours that has
        another size than the hub promised is left out."""
        snapshot, wanted = self.snapshot(commit), self.wanted(commit)
        found = {}
        for path in islice(below(snapshot, _GGUF_DEPTH), _MOST_FILES):
            name = path.relative_to(snapshot).as_posix()
            size = self._size(path) if path.suffix.casefold() == ".gguf" and REPO_FILE.fullmatch(name) else None
            if size and wanted.get(name, (size,))[0] == size:
                found[name] = size
        return found

    def wanted(self, commit: str) -> dict[str, tuple[int, str]]:
        """Return the bytes and the digest of each GGUF file that was ever wanted of a commit."""
        found = {}
        with suppress(CheckpointError):
            files = read_json(self._wanted_list(commit)).get("files")
            for name, value in files.items() if isinstance(files, dict) else ():
                match value:
                    case [int(size), str(digest)] if REPO_FILE.fullmatch(name) and DIGEST.fullmatch(digest):
                        found[name] = (size, digest)
        return found

    def write_wanted(self, commit: str, files: Mapping[str, tuple[int, str]]) -> None:
        """Keep the GGUF files that are wanted of a commit, before they are fetched; none: forget the list."""
        if not files:
            self._wanted_list(commit).unlink(missing_ok=True)
            return
        content = json.dumps({"schema_version": 1, "repo": self.repo, "commit": commit, "files": dict(files)}, indent=1)
        self._write_atomically(self._wanted_list(commit), content + "\n")

    def wanted_commits(self) -> list[str]:
        """Return the commits of which GGUF files were wanted."""
        names = [name.removesuffix(_WANTED) for name in _names(self.manifest("").parent) if name.endswith(_WANTED)]
        return [name for name in names if COMMIT.fullmatch(name)]

    def _wanted_list(self, commit: str) -> Path:
        return self.manifest("").parent / f"{commit}{_WANTED}"

    def incomplete(self, digest: str) -> Path:
        """Return the path of the start of a file."""
        return self.blobs / (digest + INCOMPLETE)

    def partial_bytes(self) -> int:
        """Bytes of files that were not finished, ours and other tools'."""
        found = 0
        for name in _names(self.blobs):
            with suppress(OSError):
                found += (self.blobs / name).lstat().st_size if name.endswith(".incomplete") else 0
        return found

    def write_manifest(self, commit: str, sizes: Mapping[str, int]) -> None:
        """Declare the snapshot whole. To be called when every file is in its place."""
        content = json.dumps({"schema_version": 1, "repo": self.repo, "commit": commit, "files": dict(sizes)}, indent=1)
        self._write_atomically(self.manifest(commit), content + "\n")

    def write_ref(self, revision: str, commit: str) -> None:
        if revision != commit:
            self._write_atomically(self.folder / "refs" / revision, commit)

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        """Yield a name that no other process uses, outside of what other tools look at; what is there at the end takes
        the place of `path`."""
        temporary = self.folder / ".localllm" / f"{os.getpid()}.{time.monotonic_ns()}.tmp"
        for folder in (temporary.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _write_atomically(self, path: Path, text: str) -> None:
        """`path` holds all of `text` or what it held before, also after a power cut."""
        with self._replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)

    def link(self, digest: str, path: Path) -> None:
        """`path` becomes a relative link to a blob, or a copy of it where the file system has no links."""
        target = os.path.relpath(self.blobs / digest, path.parent)
        if path.is_symlink() and str(path.readlink()) == target:
            return
        with self._replacing(path) as temporary:
            try:
                temporary.symlink_to(target)
            except OSError:
                shutil.copyfile(self.blobs / digest, temporary)


def behind(commit: str, refs: Mapping[str, str]) -> str:
    """Return what a name of the hub's needs to lead to this commit: "" or "@v1". refs: of its repository."""
    if refs.get("main", commit) == commit:
        return ""
    return f"@{next((ref for ref, target in refs.items() if target == commit), commit)}"


def shard_names(index: Path) -> list[str]:
    """The files that a safetensors index names. Raises CheckpointError for names that lead elsewhere."""
    weight_map = read_json(index).get("weight_map")
    names = sorted(set(weight_map.values()), key=str) if isinstance(weight_map, dict) else []
    for name in names:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {str(name)[:80]!r}", why="a shard is a .safetensors file beside its index"
            )
    if not names:
        raise CheckpointError(f"{index} names no shards", why="weight_map is absent or empty")
    return names


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a small file of the cache. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            data = file.read(JSON_LIMIT_BYTES + 1)
        if len(data) > JSON_LIMIT_BYTES:
            raise CheckpointError(f"{path} is too large", why=f"more than {JSON_LIMIT_BYTES} bytes")
        value = json.loads(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON", why=str(error)[:200]) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", why=f"it holds a {type(value).__name__}")
    return value


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_ref(path: Path) -> str | None:
    with suppress(OSError), path.open("rb") as file:
        commit = file.read(100).decode("ascii", "replace").strip()
        return commit if COMMIT.fullmatch(commit) else None
    return None


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_FILES))
    except OSError:
        return []


def below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield all that lies in a folder and, so many levels deep, in its folders; links are followed, but not upwards.
    What cannot be read holds nothing."""
    for name in _names(folder):
        yield (path := folder / name)
        if depth > 1 and is_folder(path) and not (is_link(path) and folder.resolve().is_relative_to(path.resolve())):
            yield from below(path, depth - 1)


def disk_error(error: OSError, path: Path, needed_bytes: int) -> DownloadError | DoesNotFitError:
    """Return the error that a failed write is to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space(path.parent, needed_bytes)
    return DownloadError(f"{path} cannot be written", why=str(error), fix=f"ls -ld {path.parent}")


def no_space(folder: Path, needed_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"the download does not fit on the disk of {folder}",
        why=f"{format_bytes(needed_bytes, 2)} more are needed, {format_bytes(free_bytes(folder), 2)} are free",
        fix="free space there, or set HF_HUB_CACHE=/a/larger/disk; what was fetched is kept",
    )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that `folder` is, or will be, on."""
    return shutil.disk_usage(nearest(folder)).free
