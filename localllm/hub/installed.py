"""The models on this disk, and what was packed of them: found by name, described.

Reads config.json as plain JSON for a few numbers to show; what they mean to the engine is not known here.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from localllm.config import format_bytes
from localllm.errors import CheckpointError, Fix, LocalLLMError, ModelNotFoundError
from localllm.gguf.header import split_files
from localllm.hub.gguf_files import gguf_bytes, gguf_folder, gguf_models, gguf_sources, gguf_types, is_gguf_adapter
from localllm.hub.names import (
    MODEL_FILES,
    OLLAMA,
    ModelFiles,
    ModelReference,
    pull_command,
    refusal,
    short_name,
    understand,
    whole_path,
    without_config,
)
from localllm.hub.packed import PackedSource, PackedWeights, fingerprint, packed_sources
from localllm.hub.quants import GgufChoice, ambiguous, models_among, named, pick, several
from localllm.hub.repo_cache import ADAPTER_CONFIG, COMMIT, INDEX, TOKENIZERS, RepoCache, read_json
from localllm.hub.settings import HubSettings
from localllm.hub.stores import StoreModel, find_in_store, names_in_stores
from localllm.present import is_file, is_folder
from localllm.registry import BUILT_IN, ModelEntry, Registry, load_registry

_NEAR = 0.85  # of letters in common: "maker/modell" has 0.96 of maker/model
# Of a model's folder, beside weights and templates.
_READ = frozenset({
    *MODEL_FILES, *chain.from_iterable(TOKENIZERS), "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "hf_quant_config.json", INDEX,
})  # fmt: skip


@dataclass(frozen=True)
class InstalledModel:
    """A row of `localllm list`. `directory` is None while only a part is here, or nothing but packed weights.

    gguf: the model's file; its directory is made when the model is first wanted. store: the program that keeps it.
    """

    name: str
    directory: Path | None
    size_bytes: int
    repo: str | None = None
    revision: str | None = None
    model_type: str | None = None
    partial_bytes: int = 0  # of files that were not finished
    entry: ModelEntry | None = None
    packed: tuple[PackedWeights, ...] = ()
    gguf: Path | None = None
    store: str = ""

    def is_called(self, name: str) -> bool:
        """Return whether this is a name of the model, in letters of whatever size."""
        entry = (self.entry.name, *self.entry.aliases) if self.entry else ()
        repo = (self.repo,) if self.repo and self.gguf is None else ()  # of GGUF models there may be several
        return short_name(name).casefold() in {each.casefold() for each in (self.name, *repo, *entry)}

    @property
    def files(self) -> ModelFiles | None:
        """Return the model's files where all are here; nothing is made or read for it."""
        if self.directory is None:
            return None
        return ModelFiles(self.directory, self.name, self.repo, self.revision, self.entry, self.gguf)

    @property
    def origin(self) -> tuple[str | Path, str | None]:
        """Return what is packed of it by: the file or folder, or the repository and its commit."""
        if self.gguf is not None or self.directory is None or self.repo is None:
            return self.gguf or (self.directory.resolve() if self.directory else Path(self.name)), None
        return self.repo, self.revision

    @property
    def state(self) -> Literal["installed", "partial", "folder", "file", "orphan"]:
        """ "folder", "file": one of the user's, that something is packed of. "orphan": packed weights without a
        checkpoint."""
        if self.directory is None:
            return "orphan" if self.packed else "partial"
        if self.repo or self.store or self.name == BUILT_IN:
            return "installed"
        return "file" if self.gguf else "folder"


@dataclass(frozen=True)
class ModelDescription:
    """The answer of `localllm show`. Every number of the architecture is as config.json has it, or None.

    left_out: parts of the checkpoint that are not read, as only its text model runs: "vision".
    """

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
    left_out: tuple[str, ...] = ()


_NUMBERS = {
    "layers": "num_hidden_layers", "hidden_size": "hidden_size", "attention_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size", "context": "max_position_embeddings",
}  # fmt: skip


def current(files: ModelFiles) -> ModelFiles:
    """The same model as it is on this disk now: another snapshot where a later commit of its revision was pulled."""
    if files.gguf is not None:
        if files.repo is not None or files.name.startswith(f"{OLLAMA}:"):  # whose name may lead to another file now
            with suppress(ModelNotFoundError):
                return locate(files.name)
        return replace(files, directory=gguf_folder(files.gguf))
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
        found += [_state(str(source), source.stat()) for source in gguf_sources(folder)]
        for place in (folder, folder / "additional_chat_templates"):
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name) if place.is_dir() else []:
                # Not what a training writes beside a model, again and again.
                if entry.name in _READ or entry.name.endswith((".safetensors", ".jinja")):
                    with suppress(FileNotFoundError):  # a link that leads nowhere, or a file that has just gone
                        found.append(_state(entry.path, entry.stat()))
    except OSError as error:
        fix = f"ls -l {shlex.quote(str(directory))}"
        raise ModelNotFoundError(f"the model in {directory} cannot be read", why=str(error), fix=fix) from None
    if len(found) == 1:
        raise ModelNotFoundError(f"the model in {directory} is gone", why="its files are not there any more")
    return hashlib.blake2b("\n".join(found).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _state(path: str, state: os.stat_result) -> str:
    # Of what a time was set back to, the time of that tells.
    return f"{path} {state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def locate(
    name: str, *, registry: Registry | None = None, offline: bool = False, needs_config: bool = True
) -> ModelFiles:
    """Return the files of a model by any of its names: see `names.understand`. Touches no network.

    needs_config: whether a user's folder must hold config.json; a tokenizer alone needs none. Raises ModelNotFoundError
    for an unknown name, for one that may mean several models, for an adapter's, and with the command that fetches it
    for a model that is not, or only partly, on this disk.
    """
    registry, hub = registry or load_registry(), HubSettings.from_environment(offline=offline)
    try:
        reference = understand(name, registry)
        if reference.repo is not None:
            return _of_hub(name, reference, reference.repo, registry, hub)
    except ModelNotFoundError as error:
        others = [] if refusal(name) else names_in_stores(name)
        if others:
            error.why += f"; {' and '.join(others)} {'is' if len(others) == 1 else 'are'} here"
            error.fix = *(Fix.model(name, other) for other in others), *error.fixes
        raise
    if reference.gguf is not None:
        return _of_file(reference.gguf, name, registry)
    if reference.store:
        return _of_store(find_in_store(reference.store, reference.word))
    assert reference.directory is not None
    return _of_directory(reference, reference.directory, registry, needs_config=needs_config)


def _of_hub(name: str, reference: ModelReference, repo: str, registry: Registry, hub: HubSettings) -> ModelFiles:
    cache = RepoCache(hub.cache_dir, repo)
    commit = cache.commit_of(reference.revision)
    absent = cache.missing(commit) if commit is not None else []
    if commit is not None and not absent and not reference.part:
        return ModelFiles(cache.snapshot(commit), reference.name, repo, commit, reference.entry)
    if commit is not None and (models := gguf_of(cache, commit, reference)):
        if len(models) > 1:
            raise several(name, models, partial(Fix.model, name))
        [(own_name, model)] = models.items()
        if is_gguf_adapter(path := cache.snapshot(commit) / model.files[0]):
            raise _adapter_named(name, path, registry)
        return files_of(cache, commit, own_name, model)
    if commit is not None and cache.has_adapter(commit):
        raise _adapter_named(name, cache.snapshot(commit), registry)
    raise _not_here(name, reference, cache, registry, hub)


def gguf_of(cache: RepoCache, commit: str, reference: ModelReference) -> dict[str, GgufChoice]:
    """Return the whole GGUF models of a snapshot that a name may mean, by their names."""
    behind = "" if reference.revision == "main" else f"@{reference.revision}"
    models = named(models_among(cache.gguf_files(commit)), cache.repo, behind)
    kept = pick(models.values(), reference.part)
    return {name: model for name, model in models.items() if model in kept}


def files_of(cache: RepoCache, commit: str, name: str, model: GgufChoice) -> ModelFiles:
    """Return a GGUF model of our cache. Raises what `gguf_folder` does."""
    path = whole_path(cache.snapshot(commit) / model.files[0])
    return _read(ModelFiles(path, name, cache.repo, commit, gguf=path))


def _adapter_named(name: str, path: Path, registry: Registry) -> ModelNotFoundError:
    """Return the error of a name that is an adapter's. path: of its folder, or its GGUF file."""
    from localllm.hub.adapter_files import NamesAdapterError, base_of

    return NamesAdapterError(name, base_of(path), registry)


def _of_file(path: Path, name: str, registry: Registry) -> ModelFiles:
    """name: as it was typed."""
    if is_gguf_adapter(path):
        raise _adapter_named(name, path, registry)
    first = split_files(path)[0]
    return _read(ModelFiles(first, str(first), gguf=first))


def _read(files: ModelFiles) -> ModelFiles:
    """Return a GGUF model with the folder of what its header says. Raises what `gguf_folder` does, with what helps
    where the file is damaged."""
    assert files.gguf is not None
    try:
        return replace(files, directory=gguf_folder(files.gguf))
    except LocalLLMError as error:
        own = [files.copied_anew if fix.kind == "refetch" else fix for fix in error.fixes]
        error.fix = [fix.with_model(files.name) for fix in error.fixes] if files.repo else own
        raise


def _of_store(model: StoreModel) -> ModelFiles:
    if is_folder(model.path):
        return ModelFiles(model.path, model.name)
    return _read(ModelFiles(model.path, model.name, gguf=model.path))


def _of_directory(reference: ModelReference, directory: Path, registry: Registry, *, needs_config: bool) -> ModelFiles:
    is_of_gguf = not any(directory.glob("*.safetensors")) and any(directory.glob("*.gguf"))
    if (is_file(directory / "config.json") and not is_of_gguf) or (not needs_config and reference.name != BUILT_IN):
        return ModelFiles(directory, reference.name, entry=reference.entry)
    if reference.name == BUILT_IN:
        what, why = "the built-in model is not installed", f"{directory} has no config.json"
        raise ModelNotFoundError(what, why=why, fix="python -m pip install --force-reinstall --no-deps localllm")
    try:
        models = [whole_path(path) for path in gguf_models(directory)]
    except OSError as error:
        fix = f"ls -ld {shlex.quote(str(directory))}"
        raise ModelNotFoundError(f"{directory} cannot be read", why=error.strerror or "unknown", fix=fix) from None
    if len(models) > 1:
        sizes = ", ".join(f"{path.name} {format_bytes(gguf_bytes(path))}" for path in models)
        instead = partial(Fix.model, reference.name)
        raise ambiguous(f"{directory} has {len(models)} GGUF models", sizes, list(map(str, models)), instead)
    if models:
        return _of_file(models[0], reference.name, registry)
    if is_file(directory / ADAPTER_CONFIG):
        raise _adapter_named(reference.name, directory, registry)
    fix = "name the folder that holds config.json and *.safetensors, or a GGUF file"
    raise ModelNotFoundError(f"{directory} is not a model", why=without_config(directory), fix=fix)


def _not_here(
    name: str, reference: ModelReference, cache: RepoCache, registry: Registry, hub: HubSettings
) -> ModelNotFoundError:
    commit = cache.commit_of(reference.revision)
    here = [] if commit is None else list(named(models_among(cache.gguf_files(commit)), cache.repo))
    absent = cache.missing(commit) if commit is not None else []
    if reference.part and here:
        why = f"of it are here {', '.join(here[:8])}"
    elif absent and not reference.part:
        why = f"{absent[0]} and {len(absent) - 1} more are absent" if len(absent) > 1 else f"{absent[0]} is absent"
    elif is_folder(cache.folder):
        num_bytes = cache.partial_bytes()
        why = f"{num_bytes} bytes of unfinished files are kept" if num_bytes else "it is not whole"
    else:
        why = f"{cache.folder} is absent"
    if reference.part.casefold().endswith(".gguf"):
        why += "; no file here has this path"
    if reference.folder_without_config is not None:
        why += f"; the folder {name!r} has no config.json"
    if hub.offline:
        why += "; offline, nothing is fetched"
    if reference.entry is None and (nearest := [near for near in registry.nearest(name) if near != reference.name]):
        why += f"; did you mean {' or '.join(nearest)}?"
    fixes = [pull_command(name)]
    if reference.entry is None and (meant := _meant(reference, cache, hub)):
        why += f"; {meant} is here"
        fixes = [Fix.model(name, meant), *fixes]
    return ModelNotFoundError(f"{name} is not on this disk", why=why, fix=fixes)


def _meant(reference: ModelReference, cache: RepoCache, hub: HubSettings) -> str | None:
    """Return the model on this disk whose repository has almost the same name, and the same numbers: another one is
    another size of the series. None where there is none."""
    folders = hub.cache_dir.glob("models--*--*") if is_folder(hub.cache_dir) else []
    repos = (folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    numbers = re.findall(r"\d+", cache.repo)
    others = [repo for repo in repos if repo != cache.repo and re.findall(r"\d+", repo) == numbers]
    for repo in difflib.get_close_matches(cache.repo, others, n=1, cutoff=_NEAR):
        other = RepoCache(hub.cache_dir, repo)
        commit = other.commit_of(reference.revision)
        if commit is not None and (other.gguf_files(commit) or not other.missing(commit)):
            return f"{repo}:{reference.part}" if reference.part else repo
    return None


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
        if reference.store or (reference.entry is None and not partial_bytes and not packed):
            raise
    found = files or reference
    size_bytes = 0 if files is None else gguf_bytes(files.gguf) if files.gguf else folder_bytes(files.directory)
    model = ModelDescription(
        found.name, files, found.entry, found.repo, found.revision or reference.revision, size_bytes, partial_bytes
    )
    return _with_numbers(replace(model, packed=packed))


def described(row: InstalledModel) -> ModelDescription:
    """Describe a model of a list; of a GGUF file that was never run, what is known without reading its header."""
    size_bytes, revision = row.size_bytes, row.revision or "main"
    model = ModelDescription(row.name, row.files, row.entry, row.repo, revision, size_bytes, row.partial_bytes)
    return _with_numbers(replace(model, packed=row.packed))


def _with_numbers(model: ModelDescription) -> ModelDescription:
    """Return the description with what config.json says."""
    config = _config(model.files.directory) if model.files else {}
    nested = config.get("text_config")
    numbers: dict[str, object] = {**config, **nested} if isinstance(nested, dict) else config
    if model.files is None and model.entry is not None:
        numbers = {"max_position_embeddings": model.entry.context}
    dtype = numbers.get("dtype") or numbers.get("torch_dtype")
    if config and model.files and model.files.gguf:
        dtype = gguf_types(model.files.directory)
    known: dict[str, Any] = {field: value for field, key in _NUMBERS.items() if type(value := numbers.get(key)) is int}
    model_type = type_of(model.files.directory) if model.files else None
    left_out = ("vision",) if isinstance(config.get("vision_config"), dict) else ()
    dtype = dtype if isinstance(dtype, str) else None
    return replace(model, model_type=model_type, dtype=dtype, left_out=left_out, **known)


def packed_of(name: str, registry: Registry, hub: HubSettings) -> tuple[PackedWeights, ...]:
    """Return what was packed of the model that `name` stands for, also where its checkpoint is gone.

    Of a repository without a revision: of every one. Raises ModelNotFoundError where the name means nothing.
    """
    sources = list(packed_sources())
    try:
        reference = understand(name, registry)
    except ModelNotFoundError:
        origin = Path(os.path.abspath(os.path.expanduser(name)))  # noqa: PTH100, PTH111 (touches no disk)
        if not any(source.origin == origin for source in sources):
            raise
        is_meant = _packed_at(origin)
    else:
        is_meant = _packed_by(reference, hub, is_pinned="@" in reference.name)
    return tuple(model for source in sources if is_meant(source) for model in marked(source, hub))


def _packed_at(*places: Path | None) -> Callable[[PackedSource], bool]:
    return lambda source: source.origin in places


def _packed_by(reference: ModelReference, hub: HubSettings, *, is_pinned: bool) -> Callable[[PackedSource], bool]:
    """Return whether something was packed of what the name means. is_pinned: of one revision alone."""
    if reference.store:
        return _packed_at(find_in_store(reference.store, reference.word).path)
    if reference.repo is None:
        return _packed_at(reference.place)
    cache = RepoCache(hub.cache_dir, reference.repo)
    commit = cache.commit_of(reference.revision) or reference.revision
    if reference.part:
        models = gguf_of(cache, commit, reference).values() if COMMIT.fullmatch(commit) else ()
        return _packed_at(*(whole_path(cache.snapshot(commit) / model.files[0]) for model in models))
    folder = (cache.snapshot(commit) if is_pinned else cache.folder).resolve()

    def is_of_repository(source: PackedSource) -> bool:
        if isinstance(source.origin, Path):
            return source.origin.is_relative_to(folder)
        return source.origin == reference.repo and (not is_pinned or source.key == commit)

    return is_of_repository


def marked(source: PackedSource, hub: HubSettings) -> tuple[PackedWeights, ...]:
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


def _config(directory: Path) -> dict[str, object]:
    try:
        return read_json(directory / "config.json")
    except CheckpointError:
        return {}


def type_of(directory: Path) -> str | None:
    model_type = _config(directory).get("model_type")
    return model_type if isinstance(model_type, str) else None


def folder_bytes(folder: Path) -> int:
    """Bytes of the files of a model that a folder leads to, GGUF files beside it left out; none where it is not
    there."""
    files = (path for path in folder.glob("*") if path.suffix.casefold() != ".gguf" and path.is_file())
    return sum(path.stat().st_size for path in files)
