"""The models on this disk, and what was packed of them: found by name, listed, described, deleted.

Reads config.json as plain JSON for a few numbers to show; what they mean to the engine is not known here.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from localllm.errors import CheckpointError, Fix, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub.locks import exclusive
from localllm.hub.names import MODEL_FILES, TINY_DIRECTORY, ModelFiles, pull_command, understand, without_config
from localllm.hub.packed import PackedSource, PackedWeights, fingerprint, own_bytes, packed_sources, remove_packed
from localllm.hub.repo_cache import INDEX, RepoCache, read_json
from localllm.hub.settings import HubSettings
from localllm.present import is_file, is_folder, is_link
from localllm.registry import BUILT_IN, FAMILIES, REPO_ID, ModelEntry, Registry, load_registry

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


_NUMBERS = {
    "layers": "num_hidden_layers", "hidden_size": "hidden_size", "attention_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size", "context": "max_position_embeddings",
}  # fmt: skip


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
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name) if place.is_dir() else []:
                # Not what a training writes beside a model, again and again.
                if entry.name in _READ or entry.name.endswith((".safetensors", ".jinja")):
                    with suppress(FileNotFoundError):  # a link that leads nowhere, or a file that has just gone
                        state = entry.stat()
                        # Of what a time was set back to, the time of that tells.
                        times = f"{state.st_mtime_ns} {state.st_ctime_ns}"
                        found.append(f"{entry.path} {state.st_ino} {state.st_size} {times}")
    except OSError as error:
        fix = f"ls -l {shlex.quote(str(directory))}"
        raise ModelNotFoundError(f"the model in {directory} cannot be read", why=str(error), fix=fix) from None
    if len(found) == 1:
        raise ModelNotFoundError(f"the model in {directory} is gone", why="its files are not there any more")
    return hashlib.blake2b("\n".join(found).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def locate(
    name: str, *, registry: Registry | None = None, offline: bool = False, needs_config: bool = True
) -> ModelFiles:
    """Return the folder of `tiny`, a directory, a registry name or `org/repo[@revision]`. Touches no network.

    needs_config: whether a user's folder must hold config.json; a tokenizer alone needs none. Raises ModelNotFoundError
    for an unknown name, and with the command that fetches it for a model that is not, or only partly, on this disk.
    """
    registry, hub = registry or load_registry(), HubSettings.from_environment(offline=offline)
    reference = understand(name, registry)
    directory = reference.directory
    if directory is not None:
        if (directory / "config.json").is_file() or (not needs_config and reference.name != BUILT_IN):
            return ModelFiles(directory, reference.name, entry=reference.entry)
        if reference.name == BUILT_IN:
            what, why = "the built-in model is not installed", f"{directory} has no config.json"
            raise ModelNotFoundError(what, why=why, fix="python -m pip install --force-reinstall --no-deps localllm")
        fix = "name the folder that holds config.json and *.safetensors"
        raise ModelNotFoundError(f"{directory} is not a model", why=without_config(directory), fix=fix)
    assert reference.repo is not None
    cache = RepoCache(hub.cache_dir, reference.repo)
    commit = cache.commit_of(reference.revision)
    absent = cache.missing(commit) if commit is not None else []
    if commit is not None and not absent:
        return ModelFiles(cache.snapshot(commit), reference.name, reference.repo, commit, reference.entry)
    if absent:
        why = f"{absent[0]} and {len(absent) - 1} more are absent" if len(absent) > 1 else f"{absent[0]} is absent"
    elif is_folder(cache.folder):
        num_bytes = cache.partial_bytes()
        why = f"{num_bytes} bytes of unfinished files are kept" if num_bytes else "it is not whole"
    else:
        why = f"{cache.folder} is absent"
    if reference.folder_without_config is not None:
        why += f"; the folder {name!r} has no config.json"
    if hub.offline:
        why += "; offline, nothing is fetched"
    if reference.entry is None and (nearest := [near for near in registry.nearest(name) if near != reference.name]):
        why += f"; did you mean {' or '.join(nearest)}?"
    raise ModelNotFoundError(f"{name} is not on this disk", why=why, fix=pull_command(name))


def list_models() -> list[InstalledModel]:
    """Return the built-in model, every model in the cache that this version runs, whole or partly fetched, and what is
    packed, also of a user's folder or of a checkpoint that is gone."""
    registry, hub = load_registry(), HubSettings.from_environment()
    packed: dict[tuple[str | Path, str | None], tuple[PackedWeights, ...]] = {}
    for source in packed_sources():
        # A folder is listed with all that was ever packed of it.
        checkpoint = (source.origin, source.key if isinstance(source.origin, str) else None)
        packed[checkpoint] = packed.get(checkpoint, ()) + _marked(source, hub)
    rows = [
        replace(row, packed=packed.pop((row.repo or TINY_DIRECTORY.resolve(), row.revision), ()))
        for row in _checkpoints(registry, hub)
    ]
    for (origin, commit), models in packed.items():
        if isinstance(origin, str):
            entry = registry.by_repo(origin)
            rows.append(InstalledModel(f"{origin}@{commit}", None, 0, origin, commit, entry=entry, packed=models))
        elif is_file(origin / "config.json"):
            size_bytes, model_type = folder_bytes(origin), _type(origin)
            rows.append(InstalledModel(str(origin), origin, size_bytes, model_type=model_type, packed=models))
        else:
            rows.append(InstalledModel(str(origin), None, 0, packed=models))
    return rows


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
    tiny = TINY_DIRECTORY
    if (tiny / "config.json").is_file():
        entry = registry.find(BUILT_IN)
        yield InstalledModel(BUILT_IN, tiny, folder_bytes(tiny), model_type=_type(tiny), entry=entry)
    for folder in sorted(hub.cache_dir.glob("models--*--*")) if is_folder(hub.cache_dir) else []:
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if REPO_ID.fullmatch(repo):
            yield from _of_repository(RepoCache(hub.cache_dir, repo), registry.by_repo(repo))


def _of_repository(cache: RepoCache, entry: ModelEntry | None) -> Iterator[InstalledModel]:
    refs, partial_bytes = cache.refs(), cache.partial_bytes()
    whole = [commit for commit in cache.commits() if not cache.missing(commit)]
    for commit in whole:
        snapshot = cache.snapshot(commit)
        if (model_type := _type(snapshot)) in FAMILIES:
            name, size_bytes = _name_of(commit, cache, refs, entry), folder_bytes(snapshot)
            yield InstalledModel(name, snapshot, size_bytes, cache.repo, commit, model_type, partial_bytes, entry)
            partial_bytes = 0
    if not whole and (partial_bytes or is_folder(cache.manifest("").parent)):
        name = entry.name if entry else cache.repo
        yield InstalledModel(name, None, 0, cache.repo, partial_bytes=own_bytes(cache.blobs), entry=entry)


def _name_of(commit: str, cache: RepoCache, refs: dict[str, str], entry: ModelEntry | None) -> str:
    """The shortest name that leads to this commit."""
    if entry is not None and refs.get(entry.revision, entry.revision) == commit:
        return entry.name
    if refs.get("main") == commit:
        return cache.repo
    named = next((ref for ref, target in refs.items() if target == commit), commit)
    return f"{cache.repo}@{named}"


def describe(name: str) -> ModelDescription:
    """Describe a model, on this disk or not. Raises ModelNotFoundError where the name means nothing."""
    registry, hub = load_registry(), HubSettings.from_environment()
    reference = understand(name, registry)
    partial_bytes = RepoCache(hub.cache_dir, reference.repo).partial_bytes() if reference.repo else 0
    packed = packed_of(name, registry, hub)
    files = None
    try:
        files = locate(name, registry=registry)
    except ModelNotFoundError:
        if reference.entry is None and not partial_bytes and not packed:
            raise
    found = files or reference
    config = _config(files.directory) if files else {}
    nested = config.get("text_config")
    numbers: dict[str, object] = {**config, **nested} if isinstance(nested, dict) else config
    if files is None and reference.entry is not None:
        numbers = {"max_position_embeddings": reference.entry.context}
    dtype = numbers.get("dtype") or numbers.get("torch_dtype")
    return ModelDescription(
        name=found.name,
        files=files,
        entry=found.entry,
        repo=found.repo,
        revision=found.revision or reference.revision,
        size_bytes=folder_bytes(files.directory) if files else 0,
        partial_bytes=partial_bytes,
        model_type=_type(files.directory) if files else None,
        dtype=dtype if isinstance(dtype, str) else None,
        packed=packed,
        **{field: value for field, key in _NUMBERS.items() if type(value := numbers.get(key)) is int},
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


def _type(directory: Path) -> str | None:
    model_type = _config(directory).get("model_type")
    return model_type if isinstance(model_type, str) else None


def folder_bytes(folder: Path) -> int:
    """Bytes of the files that a folder leads to; none where it is not there."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


@dataclass(frozen=True)
class Removal:
    """The bytes of a model's checkpoint that are to be deleted, and of what is packed of it. delete: deletes them, and
    returns the bytes that became free; raises LocalLLMError where another process is at work on them."""

    checkpoint_bytes: int
    packed_bytes: int
    delete: Callable[[], int]


def removal(name: str, *, packed_only: bool = False) -> Removal:
    """Return what would be deleted of a model: its files, unfinished and packed ones too.

    packed_only: the packed ones alone, which the built-in model and a user's folder may have as well.
    `org/repo@revision` means that snapshot and the files that no other snapshot shares. Links are deleted, never
    followed. Raises UsageError for the files of the built-in model and of a user's folder, ModelNotFoundError where
    nothing is.
    """
    registry, hub = load_registry(), HubSettings.from_environment()
    packed = packed_of(name, registry, hub)
    if packed_only and not packed:
        raise ModelNotFoundError(f"nothing of {name} is packed", why="it takes no such space", fix=Fix.command("list"))
    cache, commit = None, None
    with suppress(ModelNotFoundError):  # of a folder that was there when it was packed
        reference = understand(name, registry)
        if reference.repo is not None:
            cache = RepoCache(hub.cache_dir, reference.repo)
            commit = cache.commit_of(reference.revision) if "@" in name else None
        elif not packed_only:
            what = "the built-in model" if reference.name == BUILT_IN else f"{reference.directory}, a folder of yours,"
            why, fix = "only models in the download cache are", "localllm list"
            if packed:
                why, fix = f"{why}, and what was packed of it", f"localllm rm {shlex.quote(name)} --packed"
            raise UsageError(f"{what} is not removed", why=why, fix=fix)
    packed_bytes = sum(model.size_bytes for model in packed)
    is_here = cache is not None and is_folder(cache.folder) and (commit is not None or "@" not in name)
    if cache is None or packed_only or (packed and not is_here):
        return Removal(0, packed_bytes, partial(remove_packed, packed))
    if not is_here and not is_link(cache.folder):
        why = f"{cache.folder} does not hold it"
        raise ModelNotFoundError(f"{name} is not on this disk", why=why, fix=Fix.command("list"))
    checkpoint_bytes = folder_bytes(cache.snapshot(commit)) if commit else own_bytes(cache.folder)
    return Removal(checkpoint_bytes, packed_bytes, partial(_delete, name, cache, commit, packed))


def _delete(name: str, cache: RepoCache, commit: str | None, packed: Sequence[PackedWeights]) -> int:
    """As `Removal.delete`. commit: of the one snapshot; None: of the whole repository."""

    def refuse(process: str) -> None:
        raise LocalLLMError(
            f"{name} is being fetched", why=f"process {process} holds it", fix="wait for it, or stop it"
        )

    with exclusive(cache.lock, refuse):
        freed_bytes = remove_packed(packed)
        try:
            return freed_bytes + _delete_checkpoint(cache, commit)
        except OSError as error:
            fix = f"ls -lR {shlex.quote(str(cache.folder))}"
            raise LocalLLMError(f"{name} could not be deleted", why=str(error), fix=fix) from None


def _delete_checkpoint(cache: RepoCache, commit: str | None) -> int:
    """Delete one snapshot, or without a commit the whole repository; return the bytes freed."""
    if cache.folder.is_symlink():
        cache.folder.unlink()
        return 0
    before = own_bytes(cache.folder)
    if commit is not None:
        _delete_snapshot(cache, commit)
        return before - own_bytes(cache.folder)
    # What makes a snapshot count as whole goes first, so that a removal cut short leaves nothing that looks like one.
    for path in (cache.folder / part for part in (".localllm", "refs", "snapshots", "blobs")):
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(cache.folder)
    return before


def _delete_snapshot(cache: RepoCache, commit: str) -> None:
    cache.manifest(commit).unlink(missing_ok=True)
    for ref in [ref for ref, target in cache.refs().items() if target == commit]:
        (cache.folder / "refs" / ref).unlink(missing_ok=True)
    snapshot = cache.snapshot(commit)
    snapshot.unlink() if snapshot.is_symlink() else shutil.rmtree(snapshot)
    shared = {link.resolve() for other in cache.commits() for link in cache.snapshot(other).rglob("*")}
    for blob in cache.blobs.iterdir() if cache.blobs.is_dir() else []:
        # Compared by the path of the blob itself and by where it leads: a blob may be a link into a shared store.
        if blob.resolve() not in shared and cache.blobs.resolve() / blob.name not in shared:
            with suppress(IsADirectoryError, PermissionError):
                blob.unlink()
