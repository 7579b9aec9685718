"""Fetching a model: which files of a repository, in which order, and when the result counts as whole."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError, DownloadError, Fix, UnsupportedModelError
from localllm.hub import repo_cache
from localllm.hub.http import HubClient, TransferInterruptedError
from localllm.hub.locks import exclusive
from localllm.hub.settings import Progress, PullProgress
from localllm.hub.transfer import FileTransfer, RemoteFile
from localllm.registry import FAMILIES

# Nothing but these and the shards is fetched: no pickles, no code, no second copy of the weights.
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", repo_cache.INDEX,
)  # fmt: skip
_MOST_TEMPLATES = 16  # beside the usual one
_WEIGHT_SUFFIXES = {".bin", ".pt", ".pth", ".gguf", ".ckpt", ".safetensors"}
_SHARD = re.compile(r"model-\d{1,6}-of-\d{1,6}\.safetensors")
# A blob found in the cache is hashed again up to this size; larger ones are believed by their length.
REHASHED_BYTES = 64 << 20
TEMPORARY_LIFETIME_S = 60.0


def fetch_repository(client: HubClient, cache: repo_cache.RepoCache, revision: str, progress: Progress) -> str:
    """Bring the model's files into the cache and return the commit. Files that are there already are not fetched again.

    Raises DownloadError, AccessError, ModelNotFoundError, UnsupportedModelError or DoesNotFitError.
    """
    progress(PullProgress("listing", note=client.page))
    described = client.listing(revision, lambda note: progress(PullProgress("retrying", note=note)))
    try:
        with exclusive(cache.lock, lambda pid: progress(PullProgress("waiting", note=f"process {pid} is fetching it"))):
            return _Pull(client, cache, described, progress).run(revision)
    except OSError as error:
        raise repo_cache.disk_error(error, cache.folder, 0) from None


class _Pull:
    """One repository's files, one after the other."""

    def __init__(
        self, client: HubClient, cache: repo_cache.RepoCache, described: Mapping[str, object], progress: Progress
    ) -> None:
        """described: the repository, as the hub does."""
        self._client = client
        self._cache = cache
        self._progress = progress
        self._commit, self._small, self._weights = _read_listing(described, client, cache.repo)
        self._snapshot = cache.snapshot(self._commit)
        self._total_bytes = sum(file.size_bytes for file in (*self._small, *self._weights))
        self._done_bytes = 0

    def run(self, revision: str) -> str:
        cache, commit, files = self._cache, self._commit, (*self._small, *self._weights)
        cache.manifest(commit).parent.mkdir(parents=True, exist_ok=True)  # marks the folder as one of ours
        absent = [file for file in files if not self._is_held(file)]
        partial_bytes = sum(min(file.size_bytes, _size(self._partial(file))) for file in absent)
        needed_bytes = sum(file.size_bytes for file in absent) - partial_bytes
        if needed_bytes > repo_cache.free_bytes(cache.blobs):
            raise repo_cache.no_space(cache.blobs, needed_bytes)
        # Config and tokenizer first: a snapshot that has its weights has everything, and an unknown architecture is
        # found out before gigabytes are spent on it.
        for file in files:
            if file in self._weights[:1]:
                self._check_architecture()
            if file in absent:
                url, report = self._client.file_url(commit, file.name), partial(self._report, file)
                FileTransfer(self._client, file, url, report).run(self._partial(file), cache.blobs / file.digest)
            self._done_bytes += file.size_bytes
            cache.link(file.digest, self._snapshot / file.name)
        self._check_shards()
        repo_cache.sync_directory(cache.blobs)
        repo_cache.sync_directory(self._snapshot)
        cache.write_manifest(commit, {file.name: file.size_bytes for file in files})
        cache.write_ref(revision, commit)
        self._collect()
        return commit

    def _is_held(self, file: RemoteFile) -> bool:
        blob = self._cache.blobs / file.digest
        return file.is_at(blob) if file.size_bytes <= REHASHED_BYTES else _size(blob) == file.size_bytes

    def _partial(self, file: RemoteFile) -> Path:
        return self._cache.blobs / (file.digest + repo_cache.INCOMPLETE)

    def _report(self, file: RemoteFile, phase: Any, count: int, note: str) -> None:
        done_bytes = self._done_bytes + count
        self._progress(PullProgress(phase, file.name, count, file.size_bytes, done_bytes, self._total_bytes, note))

    def _check_architecture(self) -> None:
        config = repo_cache.read_json(self._snapshot / "config.json")
        model_type = config.get("model_type")
        if isinstance(model_type, str) and model_type not in FAMILIES:
            raise UnsupportedModelError(
                f"{self._cache.repo} is a {model_type[:40]!r} model, which this version cannot run",
                why=f"it runs {', '.join(sorted(FAMILIES))}; no weights were fetched",
                fix=Fix.command("list", "--all"),
            )
        if config.get("quantization_config") or config.get("compression_config"):
            raise UnsupportedModelError(
                f"{self._cache.repo} is already quantized",
                why="bf16, fp16, fp32 and fp64 weights are read; no weights were fetched",
                fix="choose the original repository, without GPTQ, AWQ, FP8, MXFP4 or bnb in its name",
            )

    def _check_shards(self) -> None:
        cache, snapshot = self._cache, self._snapshot
        absent = [name for name in cache.shards(snapshot) if not cache.holds(snapshot / name)]
        if absent:
            raise CheckpointError(
                f"{cache.repo} lacks {absent[0]}",
                why=f"its index names it, with {len(absent)} absent in all; the hub does not list it",
                fix="choose another model: localllm list",
            )

    def _collect(self) -> None:
        """Remove what earlier pulls left: no other process is at work while we hold the lock."""
        with suppress(OSError):
            for path in self._cache.blobs.glob("*" + repo_cache.INCOMPLETE):
                path.unlink(missing_ok=True)
            for path in self._cache.manifest("").parent.glob("*.tmp"):
                # Young ones may belong to a process that a lock did not hold back.
                if time.time() - path.lstat().st_mtime > TEMPORARY_LIFETIME_S:
                    path.unlink(missing_ok=True)


def _read_listing(
    described: Mapping[str, object], client: HubClient, repo: str
) -> tuple[str, list[RemoteFile], list[RemoteFile]]:
    """Return (commit, small files, files of weights)."""
    commit, siblings = described.get("sha"), described.get("siblings")
    if not isinstance(commit, str) or not repo_cache.COMMIT.fullmatch(commit) or not isinstance(siblings, list):
        raise DownloadError(
            f"the hub's description of {repo} is not understood",
            why="it has no commit, or no list of files",
            fix=f"look at {client.page}, then: {client.resume_command}",
        )
    items = {item["rfilename"]: item for item in siblings if isinstance(item, dict) and "rfilename" in item}
    small, weights = _wanted([name for name in items if isinstance(name, str)], repo)
    files = {name: _remote_file(client, commit, name, items[name]) for name in (*small, *weights)}
    return commit, [files[name] for name in small], [files[name] for name in weights]


def _wanted(names: Sequence[str], repo: str) -> tuple[list[str], list[str]]:
    """Return the names of the small files that are wanted, and of those that hold the weights."""
    sharded = sorted(name for name in names if _SHARD.fullmatch(name)) if repo_cache.INDEX in names else []
    weights = sharded or [name for name in names if name == repo_cache.SINGLE]
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
    small = [name for name in SMALL_FILES if name in names and (name != repo_cache.INDEX or sharded)]
    return small + sorted(filter(repo_cache.EXTRA_TEMPLATE.fullmatch, names))[:_MOST_TEMPLATES], weights


def _remote_file(client: HubClient, commit: str, name: str, item: Mapping[str, object]) -> RemoteFile:
    """Take size and checksum from the listing, or from the file's own headers where the listing has none."""
    lfs = item.get("lfs")
    size, digest = (
        (lfs.get("size"), lfs.get("sha256")) if isinstance(lfs, dict) else (item.get("size"), item.get("blobId"))
    )
    if size is None or digest is None:
        try:
            headers = client.file_headers(commit, name)
        except TransferInterruptedError as error:
            raise DownloadError(f"{name} could not be fetched", why=error.reason, fix=client.resume_command) from None
        length = headers.get("x-linked-size") or headers.get("content-length") or ""
        size = int(length) if length.isdigit() else None
        digest = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
    is_digest = isinstance(digest, str) and repo_cache.DIGEST.fullmatch(digest)
    if not is_digest or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise DownloadError(
            f"the hub gives no checksum for {name}",
            why="without one the file cannot be verified",
            fix=f"look at {client.page}, then: {client.resume_command}",
        )
    return RemoteFile(name, size, str(digest))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
