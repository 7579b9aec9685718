"""Deletes models: what was fetched into the download cache, and what was packed of a model from anywhere."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress

from localllm.errors import Fix, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub.installed import folder_bytes, packed_of
from localllm.hub.locks import exclusive
from localllm.hub.names import ModelReference, understand
from localllm.hub.packed import PackedWeights, own_bytes, remove_packed
from localllm.hub.repo_cache import RepoCache
from localllm.hub.settings import HubSettings
from localllm.present import is_folder, is_link
from localllm.registry import BUILT_IN, Registry, load_registry


def remove(
    name: str,
    *,
    packed_only: bool = False,
    confirm: Callable[[int, int], None] = lambda _checkpoint_bytes, _packed_bytes: None,
    registry: Registry | None = None,
    hub: HubSettings | None = None,
) -> int:
    """Delete a model's files, unfinished and packed ones too, and return the bytes that became free.

    packed_only: the packed ones alone, which the built-in model and a user's folder may have as well.
    confirm(bytes of the checkpoint, packed bytes) is called before anything is deleted, and may raise.
    `org/repo@revision` deletes that snapshot and the files that no other snapshot shares. Links are deleted, never
    followed. Raises UsageError for the files of the built-in model and of a user's folder, ModelNotFoundError where
    nothing is, LocalLLMError where another process is at work on them.
    """
    registry, hub = registry or load_registry(), hub or HubSettings.from_environment()
    packed = packed_of(name, registry, hub)
    if packed_only and not packed:
        raise ModelNotFoundError(f"nothing of {name} is packed", why="it takes no such space", fix=Fix.command("list"))
    packed_bytes = sum(model.size_bytes for model in packed)
    if packed_only or _is_gone(name, registry):
        confirm(0, packed_bytes)
        return remove_packed(packed)
    reference = understand(name, registry)
    if reference.repo is None:
        raise _not_in_the_cache(name, reference, packed)
    cache = RepoCache(hub.cache_dir, reference.repo)
    commit = cache.commit_of(reference.revision) if "@" in name else None
    is_here = is_folder(cache.folder) and (commit is not None or "@" not in name)
    if packed and not is_here:
        confirm(0, packed_bytes)
        return remove_packed(packed)
    if not is_here and not is_link(cache.folder):
        why = f"{cache.folder} does not hold it"
        raise ModelNotFoundError(f"{name} is not on this disk", why=why, fix=Fix.command("list"))
    confirm(_checkpoint_bytes(cache, commit), packed_bytes)

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


def _is_gone(name: str, registry: Registry) -> bool:
    """Return whether the name means nothing any more: a folder's that was there when it was packed."""
    try:
        understand(name, registry)
    except ModelNotFoundError:
        return True
    return False


def _not_in_the_cache(name: str, reference: ModelReference, packed: Sequence[PackedWeights]) -> UsageError:
    what = "the built-in model" if reference.name == BUILT_IN else f"{reference.directory}, a folder of yours,"
    why, fix = "only models in the download cache are", "localllm list"
    if packed:
        why, fix = f"{why}, and what was packed of it", f"localllm rm {shlex.quote(name)} --packed"
    return UsageError(f"{what} is not removed", why=why, fix=fix)


def _checkpoint_bytes(cache: RepoCache, commit: str | None) -> int:
    """Return the bytes of one snapshot, or without a commit of the whole repository: every revision, whole or not."""
    if commit is None:
        return own_bytes(cache.folder)
    snapshot = cache.snapshot(commit)
    return folder_bytes(snapshot) if snapshot.is_dir() else 0


def _delete_checkpoint(cache: RepoCache, commit: str | None) -> int:
    """Delete one snapshot, or without a commit the whole repository; return the bytes freed."""
    if cache.folder.is_symlink():
        cache.folder.unlink()
        return 0
    before = own_bytes(cache.folder)
    _delete_snapshot(cache, commit) if commit else _delete_repository(cache)
    return before - own_bytes(cache.folder)


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
