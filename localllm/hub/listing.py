"""The list of the models on this disk: in our cache, in other programs' folders, and those that something is packed of.

Reads no weights, and no header of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.hub.gguf_files import folder_of, gguf_bytes, is_gguf_model
from localllm.hub.installed import InstalledModel, folder_bytes, marked, type_of
from localllm.hub.names import TINY_DIRECTORY, whole_path
from localllm.hub.packed import PackedWeights, own_bytes, packed_sources
from localllm.hub.quants import GgufChoice, models_among, named
from localllm.hub.repo_cache import RepoCache, behind
from localllm.hub.settings import HubSettings
from localllm.hub.stores import PROGRAMS, store_models
from localllm.present import is_file, is_folder
from localllm.registry import BUILT_IN, FAMILIES, REPO_ID, ModelEntry, Registry, load_registry


def list_models() -> list[InstalledModel]:
    """Return the built-in model, every model in the cache that this version runs, whole or partly fetched, those that
    other programs keep, and what is packed, also of a user's folder or of a checkpoint that is gone."""
    registry, hub = load_registry(), HubSettings.from_environment()
    packed: dict[tuple[str | Path, str | None], tuple[PackedWeights, ...]] = {}
    for source in packed_sources():
        # A folder is listed with all that was ever packed of it.
        checkpoint = (source.origin, source.key if isinstance(source.origin, str) else None)
        packed[checkpoint] = packed.get(checkpoint, ()) + marked(source, hub)
    rows = [replace(row, packed=packed.get(row.origin, ())) for row in (*_checkpoints(registry, hub), *_in_stores())]
    listed = {row.origin for row in rows}
    for (origin, commit), models in packed.items():
        if (origin, commit) in listed:
            continue
        if isinstance(origin, str):
            entry = registry.by_repo(origin)
            rows.append(InstalledModel(f"{origin}@{commit}", None, 0, origin, commit, entry=entry, packed=models))
        elif is_file(origin):
            row = _of_gguf(InstalledModel(str(origin), None, gguf_bytes(origin), packed=models), origin)
            rows.append(row or InstalledModel(str(origin), None, 0, packed=models))
        elif is_file(origin / "config.json"):
            size_bytes, model_type = folder_bytes(origin), type_of(origin)
            rows.append(InstalledModel(str(origin), origin, size_bytes, model_type=model_type, packed=models))
        else:
            rows.append(InstalledModel(str(origin), None, 0, packed=models))
    return rows


def _in_stores() -> Iterator[InstalledModel]:
    for model in store_models():
        program = PROGRAMS[model.store]
        row = InstalledModel(model.name, None, model.size_bytes, store=program)
        if not is_folder(model.path):
            found = _of_gguf(row, model.path)
        else:
            model_type = type_of(model.path)
            found = replace(row, directory=model.path, model_type=model_type) if model_type in FAMILIES else None
        if found is not None:
            yield found


def _of_gguf(row: InstalledModel, path: Path) -> InstalledModel | None:
    """Return the row with the GGUF file and its folder, whose header is not read for it; None where it is gone."""
    try:
        directory = folder_of(path)
    except CheckpointError:
        return None
    return replace(row, directory=directory, gguf=path, model_type=type_of(directory))


def _checkpoints(registry: Registry, hub: HubSettings) -> Iterator[InstalledModel]:
    tiny = TINY_DIRECTORY
    if (tiny / "config.json").is_file():
        entry = registry.find(BUILT_IN)
        yield InstalledModel(BUILT_IN, tiny, folder_bytes(tiny), model_type=type_of(tiny), entry=entry)
    for folder in sorted(hub.cache_dir.glob("models--*--*")) if is_folder(hub.cache_dir) else []:
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if REPO_ID.fullmatch(repo):
            yield from _of_repository(RepoCache(hub.cache_dir, repo), registry.by_repo(repo))


def _of_repository(cache: RepoCache, entry: ModelEntry | None) -> Iterator[InstalledModel]:
    refs, commits = cache.refs(), cache.commits()
    begun = list(_begun(cache, refs))
    partial_bytes = cache.partial_bytes() - sum(row.partial_bytes for row in begun)
    whole = [commit for commit in commits if not cache.missing(commit)]
    for commit in whole:
        snapshot = cache.snapshot(commit)
        if (model_type := type_of(snapshot)) in FAMILIES:
            name, size_bytes = _name_of(commit, cache, refs, entry), folder_bytes(snapshot)
            yield InstalledModel(
                name, snapshot, size_bytes, cache.repo, commit, model_type, max(0, partial_bytes), entry
            )
            partial_bytes = 0
    gguf = [row for commit in commits for row in _gguf_rows(cache, commit, refs)]
    yield from gguf
    yield from begun
    is_begun = partial_bytes > 0 or (is_folder(cache.manifest("").parent) and not gguf and not begun)
    if not whole and is_begun and not _has_adapters(cache):
        name = entry.name if entry else cache.repo
        size_bytes = partial_bytes if gguf or begun else own_bytes(cache.blobs)
        yield InstalledModel(name, None, 0, cache.repo, partial_bytes=size_bytes, entry=entry)


def _has_adapters(cache: RepoCache) -> bool:
    from localllm.hub.adapter_files import adapters_of

    return any(adapters_of(cache))


def _gguf_rows(cache: RepoCache, commit: str, refs: Mapping[str, str]) -> Iterator[InstalledModel]:
    """Yield the whole GGUF models of a snapshot."""
    models = named(models_among(cache.gguf_files(commit)), cache.repo, behind(commit, refs))
    for name, model in models.items():
        path = whole_path(cache.snapshot(commit) / model.files[0])
        row = InstalledModel(name, None, model.size_bytes, cache.repo, commit)
        if is_gguf_model(path) and (found := _of_gguf(row, path)) is not None:
            yield found


def _begun(cache: RepoCache, refs: Mapping[str, str]) -> Iterator[InstalledModel]:
    """Yield the GGUF models that were wanted and are not whole."""
    for commit in cache.wanted_commits():
        here, wanted = cache.gguf_files(commit), cache.wanted(commit)
        models = models_among({name: size for name, (size, _) in wanted.items()})
        for name, model in named(models, cache.repo, behind(commit, refs)).items():
            if not set(model.files) <= set(here):
                yield InstalledModel(
                    name, None, 0, cache.repo, partial_bytes=_fetched_bytes(cache, model, here, wanted)
                )


def _fetched_bytes(
    cache: RepoCache, model: GgufChoice, here: Mapping[str, int], wanted: Mapping[str, tuple[int, str]]
) -> int:
    found = 0
    for file in model.files:
        with suppress(OSError):
            found += here.get(file) or cache.incomplete(wanted[file][1]).stat().st_size
    return found


def _name_of(commit: str, cache: RepoCache, refs: Mapping[str, str], entry: ModelEntry | None) -> str:
    """The shortest name that leads to this commit."""
    if entry is not None and refs.get(entry.revision, entry.revision) == commit:
        return entry.name
    if refs.get("main") == commit:
        return cache.repo
    named = next((ref for ref, target in refs.items() if target == commit), commit)
    return f"{cache.repo}@{named}"
