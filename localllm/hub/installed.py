"""The models on this disk, and what was packed of them: found by name, listed, described.

Reads config.json as plain JSON for a few numbers to show; what they mean to the engine is not known here.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from localllm.errors import CheckpointError, ModelNotFoundError
from localllm.hub.names import (
    MODEL_FILES,
    TINY_DIRECTORY,
    ModelFiles,
    ModelReference,
    pull_command,
    understand,
    without_config,
)
from localllm.hub.packed import PackedSource, PackedWeights, fingerprint, own_bytes, packed_sources
from localllm.hub.repo_cache import INDEX, RepoCache, read_json
from localllm.hub.settings import HubSettings
from localllm.present import is_file, is_folder
from localllm.registry import BUILT_IN, REPO_ID, RUNNABLE_MODEL_TYPES, ModelEntry, Registry, load_registry

# Of a model's folder, beside weights and templates.
_READ = frozenset({
    *MODEL_FILES, "generation_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", INDEX,
})  # fmt: skip


@dataclass(frozen=True)
class InstalledModel:
    """A row of `localllm list`. `directory` is None while only a part is here, or nothing but packed weights."""

    name: str
    directory: Path | None
    size_bytes: int
    repo: str | None = None
    revision: str | None = None
    model_type: str | None = None
    partial_bytes: int = 0  # of files that were not finished
    entry: ModelEntry | None = None
    packed: tuple[PackedWeights, ...] = ()

    def is_called(self, name: str) -> bool:
        """Return whether this is a name of the model, in letters of whatever size."""
        entry = (self.entry.name, *self.entry.aliases) if self.entry else ()
        return name.casefold() in {each.casefold() for each in (self.name, self.repo or self.name, *entry)}

    @property
    def state(self) -> Literal["installed", "partial", "folder", "orphan"]:
        """ "folder": one of the user's, that something is packed of. "orphan": packed weights without a checkpoint."""
        if self.directory is None:
            return "orphan" if self.packed else "partial"
        return "installed" if self.repo or self.name == BUILT_IN else "folder"


@dataclass(frozen=True)
class ModelDescription:
    """The answer of `localllm show`. Every number of the architecture is as config.json has it, or None."""

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
    packed: tuple[PackedWeights, ...] = ()


def current(files: ModelFiles) -> ModelFiles:
    """The same model as it is on this disk now: another snapshot where a later commit of its revision was pulled."""
    if files.repo is None:
        return files
    cache = RepoCache(files.directory.parents[2], files.repo)
    by_entry = files.entry is not None and files.name == files.entry.name
    revision = files.entry.revision if by_entry and files.entry else files.name.partition("@")[2] or "main"
    commit = cache.commit_of(revision)
    if commit in (None, files.revision) or cache.missing(commit):
        return files
    return replace(files, directory=cache.snapshot(commit), revision=commit)


def contents(directory: Path) -> str:
    """Return a hash of all that a model is read from: place, names, sizes and times, not what the files hold.

    Raises ModelNotFoundError where it is gone.
    """
    folder = directory.resolve()
    found = [str(folder)]
    try:
        for place in (folder, folder / "additional_chat_templates"):
            entries = sorted(os.scandir(place), key=lambda entry: entry.name) if place.is_dir() else []
            for entry in filter(_is_read, entries):
                with suppress(FileNotFoundError):  # a link that leads nowhere, or one that has gone since it was listed
                    state = entry.stat()
                    # Of what a time was set back to, the time of that tells.
                    found.append(f"{entry.path} {state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}")
    except OSError as error:
        fix = f"ls -l {shlex.quote(str(directory))}"
        raise ModelNotFoundError(f"the model in {directory} cannot be read", why=str(error), fix=fix) from None
    if len(found) == 1:
        raise ModelNotFoundError(f"the model in {directory} is gone", why="its files are not there any more")
    return hashlib.blake2b("\n".join(found).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _is_read(entry: os.DirEntry[str]) -> bool:
    """Not what a training writes beside a model, again and again."""
    return entry.name in _READ or entry.name.endswith((".safetensors", ".jinja"))


def locate(
    name: str,
    *,
    registry: Registry | None = None,
    hub: HubSettings | None = None,
    offline: bool = False,
    needs_config: bool = True,
) -> ModelFiles:
    """Return the folder of `tiny`, a directory, a registry name or `org/repo[@revision]`. Touches no network.

    needs_config: whether a user's folder must hold config.json; a tokenizer alone needs none. Raises ModelNotFoundError
    for an unknown name, and with the command that fetches it for a model that is not, or only partly, on this disk.
    """
    registry, hub = registry or load_registry(), hub or HubSettings.from_environment(offline=offline)
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
    elif is_folder(cache.folder):
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


def list_models(*, registry: Registry | None = None, hub: HubSettings | None = None) -> list[InstalledModel]:
    """Return the built-in model, every model in the cache that this version runs, whole or partly fetched, and what is
    packed, also of a user's folder or of a checkpoint that is gone."""
    registry, hub = registry or load_registry(), hub or HubSettings.from_environment()
    packed = _packed_by_checkpoint(hub)
    rows = [
        replace(row, packed=packed.pop((row.repo or TINY_DIRECTORY.resolve(), row.revision), ()))
        for row in _checkpoints(registry, hub)
    ]
    for (origin, commit), models in packed.items():
        if isinstance(origin, str):
            entry = registry.by_repo(origin)
            rows.append(InstalledModel(f"{origin}@{commit}", None, 0, origin, commit, entry=entry, packed=models))
        elif is_file(origin / "config.json"):
            model_type = _text(_config(origin), "model_type")
            size_bytes = folder_bytes(origin)
            rows.append(InstalledModel(str(origin), origin, size_bytes, model_type=model_type, packed=models))
        else:
            rows.append(InstalledModel(str(origin), None, 0, packed=models))
    return rows


def _packed_by_checkpoint(hub: HubSettings) -> dict[tuple[str | Path, str | None], tuple[PackedWeights, ...]]:
    """Return packed models by (repository, commit) or (folder, None): a folder is listed with all that was ever packed
    of it."""
    found: dict[tuple[str | Path, str | None], tuple[PackedWeights, ...]] = {}
    for source in packed_sources():
        checkpoint = (source.origin, source.key if isinstance(source.origin, str) else None)
        found[checkpoint] = found.get(checkpoint, ()) + _marked(source, hub)
    return found


def _marked(source: PackedSource, hub: HubSettings) -> tuple[PackedWeights, ...]:
    """The source's packed models, as orphans where their checkpoint is gone or is not what it was."""
    if isinstance(source.origin, str):
        cache = RepoCache(hub.cache_dir, source.origin)
        is_current = is_folder(cache.snapshot(source.key)) and not cache.missing(source.key)
    else:
        try:
            is_current = fingerprint(source.origin) == source.key
        except CheckpointError:
            is_current = False
    return source.models if is_current else tuple(replace(model, state="orphan") for model in source.models)


def _checkpoints(registry: Registry, hub: HubSettings) -> Iterator[InstalledModel]:
    if (TINY_DIRECTORY / "config.json").is_file():
        model_type = _text(_config(TINY_DIRECTORY), "model_type")
        entry = registry.find(BUILT_IN)
        yield InstalledModel(BUILT_IN, TINY_DIRECTORY, folder_bytes(TINY_DIRECTORY), None, None, model_type, 0, entry)
    for folder in sorted(hub.cache_dir.glob("models--*--*")) if is_folder(hub.cache_dir) else []:
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
            size = folder_bytes(snapshot)
            yield InstalledModel(name, snapshot, size, cache.repo, commit, model_type, partial_bytes, entry)
            partial_bytes = 0
    if not whole and (partial_bytes or is_folder(cache.manifest("").parent)):
        name = entry.name if entry else cache.repo
        yield InstalledModel(name, None, 0, cache.repo, None, None, own_bytes(cache.blobs), entry)


def _name_of(commit: str, cache: RepoCache, refs: dict[str, str], entry: ModelEntry | None) -> str:
    """The shortest name that leads to this commit."""
    if entry is not None and refs.get(entry.revision, entry.revision) == commit:
        return entry.name
    if refs.get("main") == commit:
        return cache.repo
    named = next((ref for ref, target in refs.items() if target == commit), commit)
    return f"{cache.repo}@{named}"


def describe(name: str, *, registry: Registry | None = None, hub: HubSettings | None = None) -> ModelDescription:
    """Describe a model, on this disk or not. Raises ModelNotFoundError where the name means nothing."""
    registry, hub = registry or load_registry(), hub or HubSettings.from_environment()
    reference = understand(name, registry)
    partial_bytes = RepoCache(hub.cache_dir, reference.repo).partial_bytes() if reference.repo else 0
    packed = packed_of(name, registry, hub)
    try:
        files = locate(name, registry=registry, hub=hub)
    except ModelNotFoundError:
        if reference.entry is None and not partial_bytes and not packed:
            raise
        entry, repo, revision = reference.entry, reference.repo, reference.revision
        context = entry.context if entry else None
        return ModelDescription(
            reference.name, None, entry, repo, revision, 0, partial_bytes, context=context, packed=packed
        )
    config = _config(files.directory)
    nested = config.get("text_config")
    numbers = {**config, **nested} if isinstance(nested, dict) else config
    return ModelDescription(
        name=files.name,
        files=files,
        entry=files.entry,
        repo=files.repo,
        revision=files.revision or reference.revision,
        size_bytes=folder_bytes(files.directory),
        partial_bytes=partial_bytes,
        model_type=_text(config, "model_type"),
        layers=_whole(numbers, "num_hidden_layers"),
        hidden_size=_whole(numbers, "hidden_size"),
        attention_heads=_whole(numbers, "num_attention_heads"),
        kv_heads=_whole(numbers, "num_key_value_heads"),
        vocabulary=_whole(numbers, "vocab_size"),
        context=_whole(numbers, "max_position_embeddings"),
        dtype=_text(numbers, "dtype") or _text(numbers, "torch_dtype"),
        packed=packed,
    )


def packed_of(name: str, registry: Registry, hub: HubSettings) -> tuple[PackedWeights, ...]:
    """Return what was packed of the model that `name` stands for, also where its checkpoint is gone.

    Of a repository without a revision: of every one. Raises ModelNotFoundError where the name means nothing.
    """
    commit = None
    try:
        reference = understand(name, registry)
    except ModelNotFoundError:
        origin: str | Path = Path(os.path.abspath(os.path.expanduser(name)))  # noqa: PTH100, PTH111 (touches no disk)
        if not any(source.origin == origin for source in packed_sources()):
            raise
    else:
        origin = reference.repo or (reference.directory or Path()).resolve()
        if reference.repo and "@" in name:
            commit = RepoCache(hub.cache_dir, reference.repo).commit_of(reference.revision) or reference.revision
    sources = (source for source in packed_sources() if source.origin == origin and commit in (None, source.key))
    return tuple(model for source in sources for model in _marked(source, hub))


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


def folder_bytes(folder: Path) -> int:
    """Bytes of the files that a folder leads to."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
