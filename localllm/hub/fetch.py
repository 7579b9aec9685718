"""Fetching a model or an adapter: which files of a repository, in which order, and when the result counts as whole."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from localllm.errors import (
    AdapterError,
    CheckpointError,
    DownloadError,
    Fix,
    ModelNotFoundError,
    UnsupportedModelError,
    show,
)
from localllm.gguf.config import hf_config
from localllm.gguf.ollama import architecture_of
from localllm.hub import quants, repo_cache
from localllm.hub.adapter_files import NamesAdapterError, base_in_tags, without_weights
from localllm.hub.gguf_files import is_adapter_head
from localllm.hub.http import HubClient, TransferInterruptedError
from localllm.hub.locks import exclusive
from localllm.hub.quants import GgufChoice, is_gguf_name, models_among, pick, several
from localllm.hub.settings import Progress, PullProgress
from localllm.hub.transfer import FileTransfer, RemoteFile
from localllm.registry import FAMILIES, QUANTIZERS, load_registry, unknown_architecture

# Nothing but these and the shards is fetched: no pickles, no code, no second copy of the weights.
SMALL_FILES = (
    "config.json", "generation_config.json", *chain.from_iterable(repo_cache.TOKENIZERS), "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "hf_quant_config.json",
    "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", repo_cache.INDEX,
)  # fmt: skip
_MOST_TEMPLATES = 16  # beside the usual one
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".safetensors"}
_WEIGHT_SUFFIXES = {*_OTHER_WEIGHTS, ".gguf"}
_HEAD_BYTES = 4096  # of a GGUF file: its first key is, in nearly all, the architecture
_GGUF_ARCHITECTURE = re.compile(rb"general\.architecture\x08\0\0\0([\0-\x40])\0{7}(.*)", re.DOTALL)
_SHARD = re.compile(r"model-\d{1,6}-of-\d{1,6}\.safetensors")
# A blob found in the cache is hashed again up to this size; larger ones are believed by their length.
REHASHED_BYTES = 64 << 20
TEMPORARY_LIFETIME_S = 60.0


def fetch_repository(
    client: HubClient,
    cache: repo_cache.RepoCache,
    revision: str,
    progress: Progress,
    part: str = "",
    *,
    is_adapter: bool = False,
) -> tuple[str, str]:
    """Bring the files of a model, or of an adapter, into the cache. Return the commit, and the first file of those that
    are GGUF files, "" of any other. Files that are there already are not fetched again.

    part: of the repository's GGUF files those that are wanted, as `ModelReference` has it.
    is_adapter: an adapter is wanted, not a model.

    Raises DownloadError, AccessError, ModelNotFoundError, UnsupportedModelError or DoesNotFitError; NamesAdapterError
    where a model is wanted and an adapter is there, and AdapterError the other way round.
    """
    progress(PullProgress("listing", note=client.page))
    described = client.listing(revision, lambda note: progress(PullProgress("retrying", note=note)))
    try:
        with exclusive(cache.lock, lambda pid: progress(PullProgress("waiting", note=f"process {pid} is fetching it"))):
            listing = _Listing.read(described, client, part, is_adapter=is_adapter)
            return _Pull(client, cache, listing, progress).run(revision)
    except OSError as error:
        raise repo_cache.disk_error(error, cache.folder, 0) from None


def listed_bytes(client: HubClient, revision: str, part: str = "", *, is_adapter: bool = False) -> int:
    """Return the bytes of all files that `fetch_repository` would fetch. Raises what it does."""
    listing = _Listing.read(client.listing(revision, lambda _: None), client, part, is_adapter=is_adapter)
    small, weights = listing.wanted(client)
    return sum(file.size_bytes for file in (*small, *weights))


class _Pull:
    """One repository's files, one after the other."""

    def __init__(self, client: HubClient, cache: repo_cache.RepoCache, listing: _Listing, progress: Progress) -> None:
        self._client = client
        self._cache = cache
        self._progress = progress
        self._listing = listing
        self._commit = listing.commit
        self._small, self._weights = self._listing.wanted(client)
        self._snapshot = cache.snapshot(self._commit)
        self._total_bytes = sum(file.size_bytes for file in (*self._small, *self._weights))
        self._done_bytes = 0

    def run(self, revision: str) -> tuple[str, str]:
        cache, commit, files = self._cache, self._commit, (*self._small, *self._weights)
        gguf, has_architecture = self._listing.gguf, not (self._listing.gguf or self._listing.is_adapter)
        cache.manifest(commit).parent.mkdir(parents=True, exist_ok=True)  # marks the folder as one of ours
        absent = [file for file in files if not self._is_held(file)]
        partial_bytes = sum(min(file.size_bytes, _size(self._partial(file))) for file in absent)
        needed_bytes = sum(file.size_bytes for file in absent) - partial_bytes
        if needed_bytes > repo_cache.free_bytes(cache.blobs):
            raise repo_cache.no_space(cache.blobs, needed_bytes)
        if gguf is not None and absent:
            self._check_header(self._weights[0])
        if gguf is not None:
            self._want(files)
        # Config and tokenizer first: a snapshot that has its weights has everything, and an unknown architecture is
        # found out before gigabytes are spent on it.
        for file in files:
            if gguf is None and file in self._weights[:1]:
                self._check_architecture() if has_architecture else self._check_method()
            self._bring(file, is_here=file not in absent)
        if has_architecture:
            self._check_shards()
        self._link_held()
        repo_cache.sync_directory(cache.blobs)
        repo_cache.sync_directory(self._snapshot)
        if has_architecture:
            cache.write_manifest(commit, {file.name: file.size_bytes for file in files})
        cache.write_ref(revision, commit)
        self._collect()
        return commit, "" if gguf is None else gguf.files[0]

    def _bring(self, file: RemoteFile, *, is_here: bool) -> None:
        """Have a file in the snapshot."""
        cache = self._cache
        if not is_here:
            url, report = self._client.file_url(self._commit, file.name), partial(self._report, file)
            FileTransfer(self._client, file, url, report).run(self._partial(file), cache.blobs / file.digest)
        self._done_bytes += file.size_bytes
        cache.link(file.digest, self._snapshot / file.name)

    def _want(self, files: Sequence[RemoteFile]) -> None:
        """Keep which GGUF files are wanted, beside those that were before."""
        new = {file.name: (file.size_bytes, file.digest) for file in files}
        self._cache.write_wanted(self._commit, {**self._cache.wanted(self._commit), **new})

    def _link_held(self) -> None:
        """Have in the snapshot also those GGUF models whose files an earlier commit had, and this one has unchanged."""
        for model in self._listing.gguf_models():
            files = [self._listing.listed_file(name) for name in model.files]
            if (held := [file for file in files if file and self._is_held(file)]) and len(held) == len(files):
                self._want(held)
                for file in held:
                    self._cache.link(file.digest, self._snapshot / file.name)

    def _is_held(self, file: RemoteFile) -> bool:
        blob = self._cache.blobs / file.digest
        return file.is_at(blob) if file.size_bytes <= REHASHED_BYTES else _size(blob) == file.size_bytes

    def _partial(self, file: RemoteFile) -> Path:
        return self._cache.incomplete(file.digest)

    def _report(self, file: RemoteFile, phase: Any, count: int, note: str) -> None:
        done_bytes = self._done_bytes + count
        self._progress(PullProgress(phase, file.name, count, file.size_bytes, done_bytes, self._total_bytes, note))

    def _check_header(self, file: RemoteFile) -> None:
        """Refuse a GGUF model of an architecture that does not run here, or an adapter in a model's place, before it is
        fetched, where its first bytes say so: all else is found out from the whole header."""
        head, url = b"", self._client.file_url(self._commit, file.name)
        with (
            suppress(TransferInterruptedError),
            self._client.open(url, {"Range": f"bytes=0-{_HEAD_BYTES - 1}"}) as response,
        ):
            for chunk in response.iter_bytes():
                head += chunk
                if len(head) >= _HEAD_BYTES:
                    break
        if is_adapter_head(head) and not self._listing.is_adapter:
            raise self._listing.no_model(self._client)
        if self._listing.is_adapter:
            if not is_adapter_head(head) and len(head) >= min(_HEAD_BYTES, file.size_bytes):
                raise self._listing.no_adapter()
            return
        found = _GGUF_ARCHITECTURE.search(head)
        if found is not None and len(found[2]) >= (size := int.from_bytes(found[1], "little")):
            metadata = {"general.architecture": architecture_of(found[2][:size].decode("ascii", "replace"))}
            with suppress(CheckpointError):  # of one that is known: the rest is absent here
                hf_config(metadata, {"token_embd.weight": (1, 1)}, source=f"{self._cache.repo}/{file.name}")

    def _check_architecture(self) -> None:
        config = repo_cache.read_json(self._snapshot / "config.json")
        model_type = config.get("model_type")
        if isinstance(model_type, str) and model_type not in FAMILIES:
            error = unknown_architecture(self._cache.repo, config, FAMILIES)
            error.why += "; no weights were fetched"
            raise error
        section = config.get("quantization_config") or config.get("compression_config")
        method = section.get("quant_method") if isinstance(section, dict) else None
        if isinstance(method, str) and method not in QUANTIZERS:
            raise UnsupportedModelError(
                f"{self._cache.repo} is quantized by {method[:40]!r}, which is not read",
                why=f"weights of {', '.join(QUANTIZERS)} and GGUF files are; no weights were fetched",
                fix="choose the original repository, or one with GGUF, AWQ or GPTQ in its name",
            )

    def _check_method(self) -> None:
        """Refuse an adapter of another kind than LoRA."""
        method = repo_cache.read_json(self._snapshot / repo_cache.ADAPTER_CONFIG).get("peft_type", "LORA")
        if method != "LORA":
            why = f"its peft_type is {show(method)}; no weights were fetched"
            raise AdapterError(f"{self._cache.repo} is no LoRA", why=why, fix="choose another adapter")

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
        wanted = [self._cache.wanted(commit).values() for commit in self._cache.wanted_commits()]
        kept = {self._cache.incomplete(digest) for files in wanted for _, digest in files}
        with suppress(OSError):
            for path in self._cache.blobs.glob("*" + repo_cache.INCOMPLETE):
                if path not in kept:
                    path.unlink(missing_ok=True)
            for path in self._cache.manifest("").parent.glob("*.tmp"):
                # Young ones may belong to a process that a lock did not hold back.
                if time.time() - path.lstat().st_mtime > TEMPORARY_LIFETIME_S:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Listing:
    """The files of a repository, as the hub lists them by their names.

    gguf: what is wanted of its GGUF files; None: what it has as safetensors files.
    is_adapter: an adapter is wanted, not a model.
    base: the model that its adapter changes, as the hub tags it; "" where it has no such tag.
    """

    repo: str
    commit: str
    items: Mapping[str, Mapping[str, object]]
    gguf: GgufChoice | None = None
    is_adapter: bool = False
    base: str = ""

    @classmethod
    def read(
        cls, described: Mapping[str, object], client: HubClient, part: str, *, is_adapter: bool = False
    ) -> _Listing:
        """part, is_adapter: as `fetch_repository` has them. Raises DownloadError for a listing that cannot be
        understood, ModelNotFoundError where the repository has no such GGUF model, or several, NamesAdapterError and
        AdapterError where it has not what is wanted."""
        repo, commit, siblings = client.repo, described.get("sha"), described.get("siblings")
        if not isinstance(commit, str) or not repo_cache.COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise DownloadError(
                f"the hub's description of {repo} is not understood",
                why="it has no commit, or no list of files",
                fix=f"look at {client.page}, then: {client.resume_command}",
            )
        named = [item for item in siblings if isinstance(item, dict) and isinstance(item.get("rfilename"), str)]
        items, tags = {item["rfilename"]: item for item in named}, described.get("tags")
        listing = cls(repo, commit, items, None, is_adapter, base_in_tags(tags if isinstance(tags, list) else ()))
        kinds = {Path(name).suffix for name in items}
        if part or (".gguf" in kinds and not kinds & _OTHER_WEIGHTS):
            return replace(listing, gguf=listing.one_gguf(part))
        if is_adapter and repo_cache.ADAPTER_CONFIG not in items:
            raise listing.no_adapter()
        has_model = "config.json" in items and items.keys() & {repo_cache.SINGLE, repo_cache.INDEX}
        if not is_adapter and repo_cache.ADAPTER_CONFIG in items and not has_model:
            raise listing.no_model(client)
        return listing

    def no_adapter(self) -> AdapterError:
        """Return the error of a repository with a model where an adapter is wanted."""
        absent = f"it has no {repo_cache.ADAPTER_CONFIG}"
        why = f"{self.gguf.files[0]} is not one by its header" if self.gguf is not None else absent
        return AdapterError(f"{self.repo} has no adapter", why=why, fix=Fix.command("run", self.repo))

    def no_model(self, client: HubClient) -> NamesAdapterError:
        """Return the error of a repository with an adapter where a model is wanted."""
        error = NamesAdapterError(client.name, self.base, load_registry())
        error.fix = [client.resume_command, *error.fixes]
        return error

    def gguf_models(self) -> list[GgufChoice]:
        """Return all that the repository offers as GGUF files."""
        names = [name for name in self.items if repo_cache.REPO_FILE.fullmatch(name) and is_gguf_name(name)]
        sizes = {name: _listed_size(self.items[name]) for name in names}
        return models_among({name: size if isinstance(size, int) else 0 for name, size in sizes.items()})

    def one_gguf(self, part: str) -> GgufChoice:
        """Return the model that is meant. Raises ModelNotFoundError with the names of all where it is not one."""
        models = self.gguf_models()
        found = pick(models, part)
        if len(found) == 1:
            return found[0]
        if found or models:
            error = several(self.repo, quants.named(found or models, self.repo), partial(Fix.command, "pull"))
            if not found:
                error.what = f"{self.repo} has no GGUF model {part[:80]!r}"
                error.why = f"it has {len(models)}: {error.why}"
            raise error
        why = f"it holds {', '.join(sorted({Path(name).suffix for name in self.items} - {''})[:8]) or 'no files'}"
        raise ModelNotFoundError(f"{self.repo} has no GGUF files", why=why, fix=Fix.command("pull", self.repo))

    def wanted(self, client: HubClient) -> tuple[list[RemoteFile], list[RemoteFile]]:
        """Return small files, and files of weights. Raises UnsupportedModelError where they cannot be run, AdapterError
        where those of an adapter are a pickle or absent."""
        if self.gguf is not None:
            small, weights = list[str](), list(self.gguf.files)
        elif not self.is_adapter:
            small, weights = _wanted(list(self.items), self.repo)
        elif repo_cache.ADAPTER_WEIGHTS in self.items:
            small, weights = [repo_cache.ADAPTER_CONFIG], [repo_cache.ADAPTER_WEIGHTS]
        else:
            raise without_weights(self.repo, is_pickle=repo_cache.ADAPTER_PICKLE in self.items)
        files = {name: _remote_file(client, self.commit, name, self.items[name]) for name in (*small, *weights)}
        return [files[name] for name in small], [files[name] for name in weights]

    def listed_file(self, name: str) -> RemoteFile | None:
        """Return a file by what the listing says of it alone."""
        size, digest = _listed_size(self.items[name]), _listed_digest(self.items[name])
        return RemoteFile(name, size, digest) if isinstance(size, int) and _is_digest(digest) else None


def _wanted(names: Sequence[str], repo: str) -> tuple[list[str], list[str]]:
    """Return the names of the small files that are wanted, and of those that hold the weights."""
    sharded = sorted(name for name in names if _SHARD.fullmatch(name)) if repo_cache.INDEX in names else []
    weights = sharded or [name for name in names if name == repo_cache.SINGLE]
    if not weights or "config.json" not in names:
        kinds = sorted({Path(name).suffix for name in names} & _WEIGHT_SUFFIXES)
        lacks = "config.json" if weights else "model.safetensors"
        raise UnsupportedModelError(
            f"{repo} has no {lacks}",
            why=f"it holds {', '.join(kinds) or 'no weights'}; safetensors with a config.json and GGUF files are read",
            fix=[Fix.command("pull", f"{repo}:QUANT")] if ".gguf" in kinds else "choose another: `localllm list --all`",
        )
    if not any(set(tokenizer) <= set(names) for tokenizer in repo_cache.TOKENIZERS):
        wanted = ", ".join(" with ".join(tokenizer) for tokenizer in repo_cache.TOKENIZERS)
        raise UnsupportedModelError(
            f"{repo} has no tokenizer that can be read",
            why=f"none of these is there: {wanted}; tokenizer.model alone is not read",
            fix="choose a repository that has tokenizer.json: localllm list --all",
        )
    small = [name for name in SMALL_FILES if name in names and (name != repo_cache.INDEX or sharded)]
    return small + sorted(filter(repo_cache.EXTRA_TEMPLATE.fullmatch, names))[:_MOST_TEMPLATES], weights


def _remote_file(client: HubClient, commit: str, name: str, item: Mapping[str, object]) -> RemoteFile:
    """Take size and checksum from the listing, or from the file's own headers where the listing has none."""
    size, digest = _listed_size(item), _listed_digest(item)
    if size is None or digest is None:
        try:
            headers = client.file_headers(commit, name)
        except TransferInterruptedError as error:
            raise DownloadError(f"{name} could not be fetched", why=error.reason, fix=client.resume_command) from None
        length = headers.get("x-linked-size") or headers.get("content-length") or ""
        size = int(length) if length.isdigit() else None
        digest = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
    if not _is_digest(digest) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise DownloadError(
            f"the hub gives no checksum for {name}",
            why="without one the file cannot be verified",
            fix=f"look at {client.page}, then: {client.resume_command}",
        )
    return RemoteFile(name, size, digest)


def _listed_size(item: Mapping[str, object]) -> object:
    lfs = item.get("lfs")
    return lfs.get("size") if isinstance(lfs, dict) else item.get("size")


def _listed_digest(item: Mapping[str, object]) -> object:
    lfs = item.get("lfs")
    return lfs.get("sha256") if isinstance(lfs, dict) else item.get("blobId")


def _is_digest(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and repo_cache.DIGEST.fullmatch(value) is not None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
