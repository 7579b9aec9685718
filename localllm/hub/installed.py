"""The models on this disk: found by name, listed, described, removed.

Reads config.json as plain JSON for a few numbers to show; what they mean to the engine is not known here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import CheckpointError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub.names import TINY_DIRECTORY, ModelReference, pull_command, understand, without_config
from localllm.hub.repo_cache import RepoCache, read_json
from localllm.hub.settings import HubSettings
from localllm.registry import BUILT_IN, REPO_ID, RUNNABLE_MODEL_TYPES, ModelEntry, Registry


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder. `repo` and `revision` (a commit) are None for the built-in model and for a user's folder."""

    directory: Path
    name: str
    repo: str | None = None
    revision: str | None = None
    entry: ModelEntry | None = None


@dataclass(frozen=True)
class InstalledModel:
    """A row of `localllm list`. `directory` is None while only a part is here."""

    name: str
    directory: Path | None
    size_bytes: int
    repo: str | None = None
    revision: str | None = None
    model_type: str | None = None
    partial_bytes: int = 0  # of files that were not finished
    entry: ModelEntry | None = None


@dataclass(frozen=True)
class ModelDescription:
    """What `localllm show` says. Every number of the architecture is as config.json has it, or None."""

    name: str
    files: ModelFiles | None  # None: not on this disk
    entry: ModelEntry | None
    repo: str | None
    revision: str
    size_bytes: int
    partial_bytes: int
    model_type: str | None = None
    layers: int | None = None
    hidden_size: int | None = None
    attention_heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    dtype: str | None = None


def find(name: str, registry: Registry, hub: HubSettings, *, needs_config: bool) -> ModelFiles:
    """The whole model that `name` stands for. Raises ModelNotFoundError, with the command that fetches it."""
    reference = understand(name, registry)
    if reference.directory is not None:
        return _folder(reference, needs_config=needs_config)
    assert reference.repo is not None
    cache = RepoCache(hub.cache_dir, reference.repo)
    commit = cache.commit_of(reference.revision)
    if commit is not None and not (absent := cache.missing(commit)):
        return ModelFiles(cache.snapshot(commit), reference.name, reference.repo, commit, reference.entry)
    why = f"{cache.folder} is absent"
    if commit is not None and absent:
        why = f"{absent[0]} and {len(absent) - 1} more are absent" if len(absent) > 1 else f"{absent[0]} is absent"
    elif cache.folder.is_dir():
        why = (
            f"{cache.partial_bytes()} bytes of unfinished files are kept"
            if cache.partial_bytes()
            else "it is not whole"
        )
    if reference.folder_without_config is not None:
        why += f"; the folder {name!r} has no config.json"
    if hub.offline:
        why += "; offline, nothing is fetched"
    nearest = [near for near in registry.nearest(name) if near != reference.name] if reference.entry is None else []
    if nearest:
        why += f"; did you mean {' or '.join(nearest)}?"
    raise ModelNotFoundError(f"{name} is not on this disk", why=why, fix=pull_command(name))


def _folder(reference: ModelReference, *, needs_config: bool) -> ModelFiles:
    directory = reference.directory
    assert directory is not None
    if (directory / "config.json").is_file() or (not needs_config and reference.name != BUILT_IN):
        return ModelFiles(directory, reference.name, entry=reference.entry)
    if reference.name == BUILT_IN:
        fix = "python -m pip install --force-reinstall --no-deps localllm"
        raise ModelNotFoundError("the built-in model is not installed", why=f"{directory} has no config.json", fix=fix)
    raise ModelNotFoundError(
        f"{directory} is not a model",
        why=without_config(directory),
        fix="name the folder that holds config.json and *.safetensors",
    )


def installed(registry: Registry, hub: HubSettings) -> Iterator[InstalledModel]:
    """The built-in model, then every runnable model in the cache, and what was only partly fetched."""
    if (TINY_DIRECTORY / "config.json").is_file():
        model_type = _text(_config(TINY_DIRECTORY), "model_type")
        entry = registry.find(BUILT_IN)
        yield InstalledModel(BUILT_IN, TINY_DIRECTORY, _folder_bytes(TINY_DIRECTORY), None, None, model_type, 0, entry)
    for folder in sorted(hub.cache_dir.glob("models--*--*")) if hub.cache_dir.is_dir() else []:
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if REPO_ID.fullmatch(repo):
            yield from _of_repository(RepoCache(hub.cache_dir, repo), registry.by_repo(repo))


def _of_repository(cache: RepoCache, entry: ModelEntry | None) -> Iterator[InstalledModel]:
    refs = cache.refs()
    partial_bytes = cache.partial_bytes()
    whole = [commit for commit in cache.commits() if not cache.missing(commit)]
    for commit in whole:
        snapshot = cache.snapshot(commit)
        model_type = _text(_config(snapshot), "model_type")
        if model_type in RUNNABLE_MODEL_TYPES:
            name = _name_of(commit, cache, refs, entry)
            size = _folder_bytes(snapshot)
            yield InstalledModel(name, snapshot, size, cache.repo, commit, model_type, partial_bytes, entry)
            partial_bytes = 0
    if not whole and (partial_bytes or cache.manifest("").parent.is_dir()):
        name = entry.name if entry else cache.repo
        yield InstalledModel(name, None, 0, cache.repo, None, None, _own_bytes(cache.blobs), entry)


def _name_of(commit: str, cache: RepoCache, refs: dict[str, str], entry: ModelEntry | None) -> str:
    """The shortest name that leads to this commit."""
    if entry is not None and refs.get(entry.revision, entry.revision) == commit:
        return entry.name
    if refs.get("main") == commit:
        return cache.repo
    named = next((ref for ref, target in refs.items() if target == commit), commit)
    return f"{cache.repo}@{named}"


def describe(name: str, registry: Registry, hub: HubSettings) -> ModelDescription:
    """What is known about `name`, on this disk or not. Raises ModelNotFoundError where the name means nothing."""
    reference = understand(name, registry)
    partial_bytes = RepoCache(hub.cache_dir, reference.repo).partial_bytes() if reference.repo else 0
    try:
        files = find(name, registry, hub, needs_config=True)
    except ModelNotFoundError:
        if reference.entry is None and not partial_bytes:
            raise
        entry, repo, revision = reference.entry, reference.repo, reference.revision
        context = entry.context if entry else None
        return ModelDescription(reference.name, None, entry, repo, revision, 0, partial_bytes, context=context)
    config = _config(files.directory)
    nested = config.get("text_config")
    numbers = {**config, **nested} if isinstance(nested, dict) else config
    return ModelDescription(
        name=files.name,
        files=files,
        entry=files.entry,
        repo=files.repo,
        revision=files.revision or reference.revision,
        size_bytes=_folder_bytes(files.directory),
        partial_bytes=partial_bytes,
        model_type=_text(config, "model_type"),
        layers=_whole(numbers, "num_hidden_layers"),
        hidden_size=_whole(numbers, "hidden_size"),
        attention_heads=_whole(numbers, "num_attention_heads"),
        kv_heads=_whole(numbers, "num_key_value_heads"),
        vocabulary=_whole(numbers, "vocab_size"),
        context=_whole(numbers, "max_position_embeddings"),
        dtype=_text(numbers, "dtype") or _text(numbers, "torch_dtype"),
    )


def remove(name: str, registry: Registry, hub: HubSettings) -> int:
    """Deletes a model's files from the cache, unfinished ones too, and returns the bytes that became free.

    `org/repo@revision` deletes that snapshot and the files that no other snapshot shares. Links are deleted, never
    followed. Raises UsageError for the built-in model and for a user's folder, ModelNotFoundError where nothing is.
    """
    reference = understand(name, registry)
    if reference.repo is None:
        what = "the built-in model" if reference.name == BUILT_IN else f"{reference.directory}, a folder of yours,"
        raise UsageError(f"{what} is not removed", why="only models in the download cache are", fix="localllm list")
    cache = RepoCache(hub.cache_dir, reference.repo)
    if cache.folder.is_symlink():
        cache.folder.unlink()
        return 0
    commit = cache.commit_of(reference.revision) if "@" in name else None
    if not cache.folder.is_dir() or ("@" in name and commit is None):
        raise ModelNotFoundError(
            f"{name} is not on this disk", why=f"{cache.folder} does not hold it", fix="localllm list"
        )
    with cache.exclusive() as alone:
        if not alone:
            raise LocalLLMError(
                f"{name} is being fetched", why="another process holds it", fix="wait for it, or stop it"
            )
        before = _own_bytes(cache.folder)
        _delete_snapshot(cache, commit) if commit else _delete_repository(cache)
        return before - _own_bytes(cache.folder)


def _delete_repository(cache: RepoCache) -> None:
    # What makes a snapshot count as whole goes first, so that a removal cut short leaves nothing that looks like one.
    for part in (".localllm", "refs", "snapshots", "blobs"):
        path = cache.folder / part
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(cache.folder)


def _delete_snapshot(cache: RepoCache, commit: str) -> None:
    cache.manifest(commit).unlink(missing_ok=True)
    for ref, target in cache.refs().items():
        if target == commit:
            (cache.folder / "refs" / ref).unlink(missing_ok=True)
    snapshot = cache.snapshot(commit)
    snapshot.unlink() if snapshot.is_symlink() else shutil.rmtree(snapshot)
    shared = {link.resolve() for other in cache.commits() for link in cache.snapshot(other).rglob("*")}
    for blob in cache.blobs.iterdir() if cache.blobs.is_dir() else []:
        # Compared by the path of the blob itself and by where it leads: a blob may be a link into a shared store.
        if blob.resolve() not in shared and cache.blobs.resolve() / blob.name not in shared:
            with suppress(IsADirectoryError, PermissionError):
                blob.unlink()


def _config(directory: Path) -> dict[str, object]:
    try:
        return read_json(directory / "config.json")
    except CheckpointError:
        return {}


def _text(config: dict[str, object], key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) else None


def _whole(config: dict[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files that a folder leads to."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _own_bytes(folder: Path) -> int:
    """Bytes of the plain files in a folder that would be freed with it: links count nothing."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    states = [path.lstat() for path in folder.rglob("*") if not path.is_symlink() and path.is_file()]
    return sum(state.st_size for state in states if state.st_nlink == 1)
