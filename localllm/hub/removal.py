"""Deleting a model of the download cache, and what was packed of any."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from localllm.errors import CheckpointError, Fix, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub.gguf_files import folder_of
from localllm.hub.installed import folder_bytes, packed_of
from localllm.hub.locks import exclusive
from localllm.hub.names import OLLAMA, ModelReference, understand, whole_path
from localllm.hub.packed import PackedWeights, own_bytes, remove_packed
from localllm.hub.quants import models_among, named, pick, several
from localllm.hub.repo_cache import RepoCache
from localllm.hub.settings import HubSettings
from localllm.hub.stores import PROGRAMS
from localllm.present import is_file, is_folder, is_link
from localllm.registry import BUILT_IN, Registry, load_registry


@dataclass(frozen=True)
class Removal:
    """The bytes of a model's checkpoint that are to be deleted, and of what is packed of it. delete: deletes them, and
    returns the bytes that became free; raises LocalLLMError where another process is at work on them."""

    checkpoint_bytes: int
    packed_bytes: int
    delete: Callable[[], int]


def removal(name: str, *, packed_only: bool = False) -> Removal:
    """Return what would be deleted of a model: its files, unfinished and packed ones too.

    packed_only: the packed ones alone, which any other model may have as well. `org/repo@revision` means that snapshot
    and the files that no other snapshot shares, `org/repo:QUANT` those GGUF files. Links are deleted, never followed.
    An adapter has its short name too. Raises UsageError for the files of the built-in model, of the user and of other
    programs, ModelNotFoundError where nothing is.
    """
    registry, hub = load_registry(), HubSettings.from_environment()
    name = _of_adapter(name, registry)
    packed = packed_of(name, registry, hub)
    if packed_only and not packed:
        raise ModelNotFoundError(f"nothing of {name} is packed", why="it takes no such space", fix=Fix.command("list"))
    reference = None
    with suppress(ModelNotFoundError):  # of a folder that was there when it was packed
        reference = understand(name, registry)
    only_packed = Removal(0, sum(model.size_bytes for model in packed), partial(remove_packed, packed))
    if packed_only or reference is None:
        return only_packed
    if reference.repo is None:
        raise _refusal(name, reference, is_packed=bool(packed))
    cache = RepoCache(hub.cache_dir, reference.repo)
    found = (_gguf_files if reference.part else _snapshots)(cache, reference)
    if found is None and packed:
        return only_packed
    if found is None:
        why = f"{cache.folder} does not hold it"
        raise ModelNotFoundError(f"{name} is not on this disk", why=why, fix=Fix.command("list"))
    checkpoint_bytes, delete = found
    return replace(only_packed, checkpoint_bytes=checkpoint_bytes, delete=partial(_delete, name, cache, packed, delete))


def _of_adapter(name: str, registry: Registry) -> str:
    """Return the whole name of an adapter for its short one; any other name as it is."""
    try:
        understand(name, registry)
    except ModelNotFoundError:
        from localllm.hub.adapters import list_adapters

        return next((each.hub_name for each in list_adapters() if each.name == name.casefold()), name)
    return name


def _refusal(name: str, reference: ModelReference, *, is_packed: bool) -> UsageError:
    """Return the error of a model whose files are not ours to delete."""
    what = f"{reference.place}, {'a file' if reference.gguf else 'a folder'} of yours,"
    if reference.name == BUILT_IN:
        what = "the built-in model"
    elif reference.store:
        what = f"{name}, which {PROGRAMS[reference.store]} keeps,"
    why, fix = "only models in the download cache are", "localllm list"
    if is_packed:
        why, fix = f"{why}, and what was packed of it", f"localllm rm {shlex.quote(name)} --packed"
    elif reference.store == OLLAMA:
        fix = f"ollama rm {shlex.quote(reference.word)}"
    return UsageError(f"{what} is not removed", why=why, fix=fix)


def _snapshots(cache: RepoCache, reference: ModelReference) -> tuple[int, Callable[[], object]] | None:
    """Return the bytes of a repository, or of the one snapshot that is named, and what deletes it; None where it is not
    here."""
    is_one = "@" in reference.name
    commit = cache.commit_of(reference.revision) if is_one else None
    if not is_link(cache.folder) and (not is_folder(cache.folder) or (is_one and commit is None)):
        return None
    num_bytes = own_bytes(cache.folder)
    if commit is not None:
        num_bytes = folder_bytes(cache.snapshot(commit)) + sum(cache.gguf_files(commit).values())
    return num_bytes, partial(_delete_checkpoint, cache, commit)


def _gguf_files(cache: RepoCache, reference: ModelReference) -> tuple[int, Callable[[], object]] | None:
    """Return the bytes of one GGUF model, whole or not, and what deletes it; None where nothing of it is here."""
    commit = cache.commit_of(reference.revision)
    for each in [commit] if commit else cache.wanted_commits():
        here, wanted = cache.gguf_files(each), cache.wanted(each)
        models = models_among({**{file: size for file, (size, _) in wanted.items()}, **here})
        kept = pick(models, reference.part)
        if len(kept) > 1:
            raise several(reference.name, named(kept, cache.repo), partial(Fix.command, "rm"))
        if kept:
            files = kept[0].files
            starts = [cache.incomplete(wanted[file][1]) for file in files if file in wanted]
            num_bytes = sum(here.get(file, 0) for file in files) + sum(map(_size, starts))
            return num_bytes, partial(_delete_gguf, cache, each, files, starts)
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if is_file(path) else 0


def _delete(name: str, cache: RepoCache, packed: Sequence[PackedWeights], delete: Callable[[], object]) -> int:
    """As `Removal.delete`. delete: removes the checkpoint's files."""

    def refuse(process: str) -> None:
        raise LocalLLMError(
            f"{name} is being fetched", why=f"process {process} holds it", fix="wait for it, or stop it"
        )

    with exclusive(cache.lock, refuse):
        freed_bytes = remove_packed(packed)
        before = own_bytes(cache.folder)
        try:
            delete()
        except OSError as error:
            fix = f"ls -lR {shlex.quote(str(cache.folder))}"
            raise LocalLLMError(f"{name} could not be deleted", why=str(error), fix=fix) from None
        return freed_bytes + before - own_bytes(cache.folder)


def _delete_gguf(cache: RepoCache, commit: str, files: Sequence[str], starts: Sequence[Path]) -> None:
    """Delete the files of a GGUF model, those that other snapshots share excepted. starts: of unfinished ones."""
    snapshot = cache.snapshot(commit)
    paths = [snapshot / file for file in files]
    with suppress(CheckpointError):  # of what is not whole nothing was made
        shutil.rmtree(folder_of(whole_path(paths[0])), ignore_errors=True)
    targets = {path.resolve() for path in paths}
    for path in paths:
        path.unlink(missing_ok=True)
        for folder in list(path.relative_to(snapshot).parents)[:-1]:
            with suppress(OSError):  # it holds others
                (snapshot / folder).rmdir()
    for start in starts:
        start.unlink(missing_ok=True)
    cache.write_wanted(commit, {name: file for name, file in cache.wanted(commit).items() if name not in files})
    links = [link for other in cache.commits() for link in cache.snapshot(other).rglob("*") if not is_folder(link)]
    shared = {link.resolve() for link in links}
    for blob in list(cache.blobs.iterdir()) if cache.blobs.is_dir() else []:
        if blob.resolve() in targets - shared:
            blob.unlink()
    if not links and not cache.partial_bytes():
        _delete_checkpoint(cache, None)


def _delete_checkpoint(cache: RepoCache, commit: str | None) -> None:
    """Delete one snapshot, or without a commit the whole repository."""
    if cache.folder.is_symlink():
        cache.folder.unlink()
        return
    if commit is not None:
        _delete_snapshot(cache, commit)
        return
    # What makes a snapshot count as whole goes first, so that a removal cut short leaves nothing that looks like one.
    for path in (cache.folder / part for part in (".localllm", "refs", "snapshots", "blobs")):
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(cache.folder)


def _delete_snapshot(cache: RepoCache, commit: str) -> None:
    cache.manifest(commit).unlink(missing_ok=True)
    cache.write_wanted(commit, {})
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
