"""Fetching a model: which files of a repository, in which order, and when the result counts as whole."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm.errors import CheckpointError, DownloadError, Fix, UnsupportedModelError
from localllm.hub.http import HubClient, TransferInterruptedError
from localllm.hub.locks import exclusive
from localllm.hub.partial_file import RemoteFile, disk_error, file_matches, free_bytes, no_space
from localllm.hub.progress import Progress, PullProgress
from localllm.hub.repo_cache import (
    COMMIT,
    DIGEST,
    EXTRA_TEMPLATE,
    INCOMPLETE,
    INDEX,
    SINGLE,
    RepoCache,
    read_json,
    sync_directory,
)
from localllm.hub.transfer import FileTransfer
from localllm.registry import RUNNABLE_MODEL_TYPES

# Nothing but these and the shards is fetched: no pickles, no code, no second copy of the weights.
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", INDEX,
)  # fmt: skip
_MOST_TEMPLATES = 16  # beside the usual one
_WEIGHT_SUFFIXES = {".bin", ".pt", ".pth", ".gguf", ".ckpt", ".safetensors"}
_SHARD = re.compile(r"model-\d{1,6}-of-\d{1,6}\.safetensors")
# A blob found in the cache is hashed again up to this size; larger ones are believed by their length.
REHASHED_BYTES = 64 << 20
TEMPORARY_LIFETIME_S = 60.0


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit that a model needs."""

    commit: str
    small: tuple[RemoteFile, ...]
    weights: tuple[RemoteFile, ...]


def fetch_repository(client: HubClient, cache: RepoCache, revision: str, progress: Progress) -> str:
    """Bring the model's files into the cache and return the commit. Files that are there already are not fetched again.

    Raises DownloadError, AccessError, ModelNotFoundError, UnsupportedModelError or DoesNotFitError.
    """
    progress(PullProgress("listing", note=client.page))
    described = client.listing(revision, lambda note: progress(PullProgress("retrying", note=note)))
    try:
        with exclusive(cache.lock, lambda pid: progress(PullProgress("waiting", note=f"process {pid} is fetching it"))):
            listing = _read_listing(described, client, cache.repo)
            _Pull(client, cache, listing, progress).run(revision)
    except OSError as error:
        raise disk_error(error, cache.folder, 0) from None
    return listing.commit


class _Pull:
    """One repository's files, one after the other."""

    def __init__(self, client: HubClient, cache: RepoCache, listing: Listing, progress: Progress) -> None:
        self._client = client
        self._cache = cache
        self._listing = listing
        self._progress = progress
        self._files = (*listing.small, *listing.weights)
        self._total_bytes = sum(file.size_bytes for file in self._files)
        self._done_bytes = 0

    def run(self, revision: str) -> None:
        cache, commit = self._cache, self._listing.commit
        cache.manifest(commit).parent.mkdir(parents=True, exist_ok=True)  # marks the folder as one of ours
        held = {file for file in self._files if self._is_held(file)}
        self._check_space([file for file in self._files if file not in held])
        # Config and tokenizer first: a snapshot that has its weights has everything, and an unknown architecture is
        # found out before gigabytes are spent on it.
        for file in self._listing.small:
            self._obtain(file, held=file in held)
        self._check_architecture()
        for file in self._listing.weights:
            self._obtain(file, held=file in held)
        self._check_shards()
        sync_directory(cache.blobs)
        sync_directory(cache.snapshot(commit))
        cache.write_manifest(commit, {file.name: file.size_bytes for file in self._files})
        cache.write_ref(revision, commit)
        self._collect()

    def _is_held(self, file: RemoteFile) -> bool:
        blob = self._cache.blobs / file.digest
        if file.size_bytes <= REHASHED_BYTES:
            return file_matches(blob, file)
        return blob.is_file() and blob.stat().st_size == file.size_bytes

    def _check_space(self, absent: Sequence[RemoteFile]) -> None:
        needed_bytes = sum(max(0, file.size_bytes - _size(self._partial(file))) for file in absent)
        if needed_bytes > free_bytes(self._cache.blobs):
            raise no_space(self._cache.blobs, needed_bytes)

    def _obtain(self, file: RemoteFile, *, held: bool) -> None:
        blob = self._cache.blobs / file.digest
        if not held:
            FileTransfer(self._client, file, self._listing.commit, self._reporter(file)).run(self._partial(file), blob)
        self._done_bytes += file.size_bytes
        self._cache.link(file.digest, self._cache.snapshot(self._listing.commit) / file.name)

    def _partial(self, file: RemoteFile) -> Path:
        return self._cache.blobs / (file.digest + INCOMPLETE)

    def _reporter(self, file: RemoteFile) -> Callable[[str, int, str], None]:
        def report(phase: Literal["verifying", "downloading", "retrying"], count: int, note: str) -> None:
            done_bytes = self._done_bytes + count
            self._progress(PullProgress(phase, file.name, count, file.size_bytes, done_bytes, self._total_bytes, note))

        return report  # type: ignore[return-value]

    def _check_architecture(self) -> None:
        config = read_json(self._cache.snapshot(self._listing.commit) / "config.json")
        model_type = config.get("model_type")
        if isinstance(model_type, str) and model_type not in RUNNABLE_MODEL_TYPES:
            raise UnsupportedModelError(
                f"{self._cache.repo} is a {model_type[:40]!r} model, which this version cannot run",
                why=f"it runs {', '.join(sorted(RUNNABLE_MODEL_TYPES))}; no weights were fetched",
                fix=Fix.command("list", "--all"),
            )
        if config.get("quantization_config") or config.get("compression_config"):
            raise UnsupportedModelError(
                f"{self._cache.repo} is already quantized",
                why="bf16, fp16, fp32 and fp64 weights are read; no weights were fetched",
                fix="choose the original repository, without GPTQ, AWQ, FP8, MXFP4 or bnb in its name",
            )

    def _check_shards(self) -> None:
        snapshot = self._cache.snapshot(self._listing.commit)
        absent = [name for name in self._cache.shards(snapshot) if not self._cache.holds(snapshot / name)]
        if absent:
            raise CheckpointError(
                f"{self._cache.repo} lacks {absent[0]}",
                why=f"its index names it, with {len(absent)} absent in all; the hub does not list it",
                fix="choose another model: localllm list",
            )

    def _collect(self) -> None:
        """Remove what earlier pulls left: nobody else is at work while we hold the lock."""
        with suppress(OSError):
            for path in self._cache.blobs.glob("*" + INCOMPLETE):
                path.unlink(missing_ok=True)
            for path in self._cache.manifest("").parent.glob("*.tmp"):
                # Young ones may belong to a process that a lock did not hold back.
                if time.time() - path.lstat().st_mtime > TEMPORARY_LIFETIME_S:
                    path.unlink(missing_ok=True)


def _read_listing(described: dict[str, object], client: HubClient, repo: str) -> Listing:
    commit, siblings = described.get("sha"), described.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or not isinstance(siblings, list):
        raise DownloadError(
            f"the hub's description of {repo} is not understood",
            why="it has no commit, or no list of files",
            fix=f"look at {client.page}, then: {client.resume_command}",
        )
    files = {item["rfilename"]: item for item in siblings if isinstance(item, dict) and "rfilename" in item}
    small, weights = (
        tuple(_remote_file(client, commit, name, files[name]) for name in names)
        for names in _wanted([name for name in files if isinstance(name, str)], repo)
    )
    return Listing(commit, small, weights)


def _wanted(names: Sequence[str], repo: str) -> tuple[list[str], list[str]]:
    """Return the names of the small files that are wanted, and of those that hold the weights."""
    sharded = sorted(name for name in names if _SHARD.fullmatch(name)) if INDEX in names else []
    weights = sharded or [name for name in names if name == SINGLE]
    if not weights or "config.json" not in names:
        kinds = sorted({Path(name).suffix for name in names} & _WEIGHT_SUFFIXES)
        lacks = "config.json" if weights else "model.safetensors"
        raise UnsupportedModelError(
            f"{repo} has no {lacks}",
            why=f"it holds {', '.join(kinds) or 'no weights'}; only safetensors beside a config.json are read",
            fix="choose a repository in the Transformers format; `localllm list` names some",
        )
    if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= set(names):
        raise UnsupportedModelError(
            f"{repo} has no tokenizer that can be read",
            why="neither tokenizer.json nor vocab.json with merges.txt is there; tokenizer.model alone is not read",
            fix="choose a repository that has tokenizer.json: localllm list --all",
        )
    small = [name for name in SMALL_FILES if name in names and (name != INDEX or sharded)]
    return small + sorted(filter(EXTRA_TEMPLATE.fullmatch, names))[:_MOST_TEMPLATES], weights


def _remote_file(client: HubClient, commit: str, name: str, item: Mapping[str, object]) -> RemoteFile:
    """Take size and checksum from the listing, or from the file's own headers where the listing has none."""
    lfs = item.get("lfs")
    found = (lfs.get("size"), lfs.get("sha256")) if isinstance(lfs, dict) else (item.get("size"), item.get("blobId"))
    size, digest = _from_headers(client, commit, name) if None in found else found
    is_digest = isinstance(digest, str) and DIGEST.fullmatch(digest)
    if not is_digest or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise DownloadError(
            f"the hub gives no checksum for {name}",
            why="without one the file cannot be verified",
            fix=f"look at {client.page}, then: {client.resume_command}",
        )
    return RemoteFile(name, size, str(digest))


def _from_headers(client: HubClient, commit: str, name: str) -> tuple[int | None, str]:
    try:
        found = client.file_headers(commit, name)
    except TransferInterruptedError as error:
        raise DownloadError(f"{name} could not be fetched", why=error.reason, fix=client.resume_command) from None
    length = found.get("x-linked-size") or found.get("content-length") or ""
    etag = found.get("x-linked-etag") or found.get("etag") or ""
    return (int(length) if length.isdigit() else None), etag.removeprefix("W/").strip('"')


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
