"""Models that other programs keep on this disk: Ollama's, LM Studio's and llama.cpp's. Read where they lie, and never
written.

    Ollama       manifests/HOST/NAMESPACE/NAME/TAG         JSON, which names the blob that is the GGUF file
                 blobs/sha256-DIGEST
    LM Studio    PUBLISHER/REPOSITORY/*.gguf, or a folder with config.json and safetensors files
    llama.cpp    ORG_REPOSITORY_FILE.gguf and manifest=ORG=REPOSITORY=TAG.json, or folders as in the hub's cache

What is broken or cannot be read is no model; what is found is bounded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from localllm.config import format_bytes
from localllm.errors import CheckpointError, Fix, LocalLLMError, ModelNotFoundError, UnsupportedModelError
from localllm.hub.gguf_files import is_gguf_model
from localllm.hub.names import LLAMA_CPP, LM_STUDIO, OLLAMA, STORES, refusal, whole_path
from localllm.hub.quants import GgufChoice, ambiguous, is_gguf_name, models_among, named, pick
from localllm.hub.repo_cache import RepoCache, below, read_json
from localllm.hub.settings import HubSettings
from localllm.present import is_file, is_folder
from localllm.registry import REPO_ID

PROGRAMS = {OLLAMA: "Ollama", LM_STUDIO: "LM Studio", LLAMA_CPP: "llama.cpp"}
_MOST_ENTRIES = 20_000  # of a store
_MOST_MODELS = 2000
_MOST_TOLD = 12

_OLLAMA_DEFAULTS = ("registry.ollama.ai", "library")
_LATEST = "latest"
_LAYER = "application/vnd.ollama.image."
_OLLAMA_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_OLLAMA_SERVICES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/models", "/var/lib/ollama/.ollama/models")

_LM_STUDIO_DEPTH = 5  # publisher, repository, two folders of files, file
_LLAMA_CPP_MANIFEST = re.compile(r"manifest=([^=]+)=([^=]+)=.+\.json")


@dataclass(frozen=True)
class StoreModel:
    """A model in another program's folder. name: under which it runs here. path: its first GGUF file, or its folder."""

    name: str
    store: str
    path: Path
    size_bytes: int


def store_models() -> Iterator[StoreModel]:
    """Yield what other programs keep, by program and name. Raises nothing."""
    for models in (_ollama_models(), _models_of(LM_STUDIO), _models_of(LLAMA_CPP)):
        yield from (model for model in islice(models, _MOST_MODELS) if not refusal(model.name))


def find_in_store(store: str, word: str) -> StoreModel:
    """Return the model that another program has under this name.

    Raises ModelNotFoundError where it has none, or several that may be meant; UnsupportedModelError and CheckpointError
    for one that cannot be run.
    """
    if store == OLLAMA:
        return _find_in_ollama(word)
    path, colon, quant = word.partition(":")
    if not path:
        raise _absent(store, word)
    is_of_file, found = path.casefold().endswith(".gguf"), []
    for repo, files in _repositories(store):
        if _may_hold(repo, path):
            choices = _choices(repo, files)
            kept = pick(choices.values(), _part(repo, path) if is_of_file else quant)
            found += [_model(store, name, files, each) for name, each in choices.items() if each in kept]
    if not colon:
        found += [each for each in _folders(store) if _is_called(each.name.partition(":")[2], path)]
    if not found:
        raise _absent(store, word)
    if len(found) > 1:
        sizes = ", ".join(f"{each.name} {format_bytes(each.size_bytes)}" for each in found[:_MOST_TOLD])
        names, fix = [each.name for each in found], partial(Fix.model, f"{store}:{word}")
        raise ambiguous(f"{store}:{word} may be {len(found)} models", sizes, names, fix)
    return found[0]


def names_in_stores(word: str) -> list[str]:
    """Return the names of the models that other programs have under this name, or may mean by it. Raises nothing."""
    found: list[str] = []
    for store in STORES:
        try:
            found.append(find_in_store(store, word).name)
        except LocalLLMError as error:
            found += [fix.words[1] for fix in error.fixes if fix.kind == "model"]
    return found


def _absent(store: str, word: str) -> ModelNotFoundError:
    program, folders = PROGRAMS[store], ", ".join(map(str, _ROOTS[store]()))
    what, why = f"{program} has no model {word[:80]!r}", f"it is not among what is kept in {folders}"
    if not folders:
        why = f"no folder of {program} was found" + (
            f"; {_VARIABLES[store]} may name one" if store in _VARIABLES else ""
        )
    return ModelNotFoundError(what, why=why, fix=Fix.command("list"))


def _is_called(repo: str, word: str) -> bool:
    """Return whether the word is a repository's name, with its publisher or without."""
    return word.casefold() in _names(repo)


def _names(repo: str) -> tuple[str, str]:
    return repo.casefold(), repo.casefold().rpartition("/")[2]


def _may_hold(repo: str, path: str) -> bool:
    """Return whether the path is the repository, or the name of a file that may be in it."""
    if not path.casefold().endswith(".gguf"):
        return _is_called(repo, path)
    return "/" not in path or any(path.casefold().startswith(f"{name}/") for name in _names(repo))


def _part(repo: str, path: str) -> str:
    """Return the file's name in the repository."""
    begin = next((len(name) + 1 for name in _names(repo) if path.casefold().startswith(f"{name}/")), 0)
    return path[begin:]


# Stores of GGUF files under the names of repositories


def _models_of(store: str) -> Iterator[StoreModel]:
    for repo, files in _repositories(store):
        yield from (_model(store, name, files, each) for name, each in _choices(repo, files).items())
    yield from _folders(store)


def _repositories(store: str) -> Iterator[tuple[str, dict[str, Path]]]:
    return _lm_studio_files() if store == LM_STUDIO else _llama_cpp_files()


def _choices(repo: str, files: Mapping[str, Path]) -> dict[str, GgufChoice]:
    """Return the models among a repository's files by their names."""
    sizes = {}
    for name, path in files.items():
        with suppress(OSError):
            sizes[name] = path.stat().st_size
    return named(models_among(sizes), repo)


def _model(store: str, name: str, files: Mapping[str, Path], choice: GgufChoice) -> StoreModel:
    return StoreModel(f"{store}:{name}", store, whole_path(files[choice.files[0]]), choice.size_bytes)


def _folders(store: str) -> Iterator[StoreModel]:
    """Yield LM Studio's models that are folders of safetensors files."""
    for root in lm_studio_folders() if store == LM_STUDIO else ():
        for path in islice(below(root, 3), _MOST_ENTRIES):
            if path.name == "config.json" and (sizes := _weights(path.parent)):
                name = path.parent.relative_to(root).as_posix()
                yield StoreModel(f"{store}:{name}", store, path.parent.resolve(), sum(sizes))


def _weights(folder: Path) -> list[int]:
    found = []
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):
            found.append(path.stat().st_size)
    return found


def lm_studio_folders() -> list[Path]:
    """Return the folders in which LM Studio keeps models."""
    home = _home()
    if home is None:
        return []
    own = home / ".lmstudio"
    with suppress(OSError, UnicodeDecodeError, ValueError):
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8")[:4096].strip()
        own = Path(pointer) if Path(pointer).is_absolute() else own
    chosen = None
    with suppress(CheckpointError):
        chosen = read_json(own / "settings.json").get("downloadsFolder")
    folders = [Path(chosen)] if isinstance(chosen, str) and Path(chosen).is_absolute() else []
    return _present([*folders, own / "models", home / ".cache" / "lm-studio" / "models"])


def _lm_studio_files() -> Iterator[tuple[str, dict[str, Path]]]:
    found: dict[str, dict[str, Path]] = {}
    for root in lm_studio_folders():
        for path in _gguf_files(below(root, _LM_STUDIO_DEPTH)):
            *folders, name = path.relative_to(root).parts
            repo, file = "/".join(folders[:2]), "/".join((*folders[2:], name))
            found.setdefault(repo, {}).setdefault(file, path)
    return iter(found.items())


def llama_cpp_folders() -> list[Path]:
    """Return the folder in which llama.cpp keeps what it has fetched."""
    home, chosen = _home(), os.environ.get("LLAMA_CACHE")
    if chosen:
        return _present([Path(chosen)])
    if home is None:
        return []
    if sys.platform == "darwin":
        return _present([home / "Library" / "Caches" / "llama.cpp"])
    return _present([Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "llama.cpp"])


def _llama_cpp_files() -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield the files by repository; those of which no manifest says where they are from without one."""
    for root in llama_cpp_folders():
        entries = list(islice(below(root, 1), _MOST_ENTRIES))
        manifests = filter(None, (_LLAMA_CPP_MANIFEST.fullmatch(path.name) for path in entries))
        repos = sorted({f"{found[1]}/{found[2]}" for found in manifests}, key=len, reverse=True)
        flat: dict[str, dict[str, Path]] = {}
        for path in _gguf_files(entries):
            repo = next((repo for repo in repos if path.name.startswith(repo.replace("/", "_") + "_")), "")
            name = path.name.removeprefix(repo.replace("/", "_") + "_") if repo else path.name
            flat.setdefault(repo, {})[name] = path
        yield from flat.items()
        yield from _hub_files(root, entries)


def _hub_files(root: Path, entries: Iterable[Path]) -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield what a newer llama.cpp has fetched, which lays its own folder out as the hub's cache."""
    if root.resolve() == HubSettings.from_environment().cache_dir.resolve():
        return
    for folder in entries:
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if folder.name.startswith("models--") and REPO_ID.fullmatch(repo):
            cache = RepoCache(root, repo)
            commit = cache.commit_of("main") or next(iter(cache.commits()), "")
            files = {name: cache.snapshot(commit) / name for name in cache.gguf_files(commit)} if commit else {}
            yield repo, {name: path for name, path in files.items() if is_gguf_model(path)}


def _gguf_files(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in islice(paths, _MOST_ENTRIES) if is_gguf_name(path.name) and is_gguf_model(path))


# Ollama


@dataclass(frozen=True)
class _Manifest:
    """The file that describes a model. key: host, namespace, name and tag."""

    root: Path
    key: tuple[str, str, str, str]

    @property
    def path(self) -> Path:
        return self.root.joinpath("manifests", *self.key)

    @property
    def name(self) -> str:
        """The name that Ollama shows."""
        host, namespace, name, tag = self.key
        if host != _OLLAMA_DEFAULTS[0]:
            name = f"{host}/{namespace}/{name}"
        elif namespace != _OLLAMA_DEFAULTS[1]:
            name = f"{namespace}/{name}"
        return name if tag == _LATEST else f"{name}:{tag}"


def ollama_folders() -> list[Path]:
    """Return the folders in which Ollama keeps models: the user's own, and that of a service."""
    home, chosen = _home(), os.environ.get("OLLAMA_MODELS")
    if chosen:
        return _present([Path(chosen)])
    own = [home / ".ollama" / "models"] if home else []
    return _present([*own, *map(Path, _OLLAMA_SERVICES)])


def _ollama_manifests() -> Iterator[_Manifest]:
    for root in ollama_folders():
        manifests = root / "manifests"
        for path in islice(below(manifests, 4), _MOST_ENTRIES):
            parts = path.relative_to(manifests).parts
            if len(parts) == 4 and is_file(path):
                yield _Manifest(root, (parts[0], parts[1], parts[2], parts[3]))


def _ollama_models() -> Iterator[StoreModel]:
    for manifest in _ollama_manifests():
        with suppress(LocalLLMError):
            yield _ollama_model(manifest)


def _find_in_ollama(word: str) -> StoreModel:
    wanted = _ollama_key(word)
    others = []
    for manifest in _ollama_manifests():
        key = tuple(map(str.casefold, manifest.key))
        if key == wanted:
            return _ollama_model(manifest)
        if key[:-1] == wanted[:-1]:
            others.append(f"{OLLAMA}:{manifest.name}")
    if others:
        why = f"there is no tag {wanted[-1][:80]!r}; it has {', '.join(others[:_MOST_TOLD])}"
        raise ambiguous(f"Ollama has no model {word[:80]!r}", why, others, partial(Fix.model, f"{OLLAMA}:{word}"))
    raise _absent(OLLAMA, word)


def _ollama_key(word: str) -> tuple[str, ...]:
    """Return host, namespace, name and tag of a name as Ollama takes it, in small letters."""
    path, slash, last = word.casefold().rpartition("/")
    name, _, tag = last.partition(":")
    parts = [*(path.split("/") if slash else ()), name, tag or _LATEST]
    return (*_OLLAMA_DEFAULTS[: max(0, 4 - len(parts))], *parts)


def _ollama_model(manifest: _Manifest) -> StoreModel:
    """Raises CheckpointError for what is broken, UnsupportedModelError for what is no GGUF model of its own."""
    layers = read_json(manifest.path).get("layers")
    found: dict[str, list[str]] = {}
    for layer in layers if isinstance(layers, list) else ():
        match layer:
            case {"mediaType": str(kind), "digest": str(digest)} if kind.startswith(_LAYER):
                found.setdefault(kind.removeprefix(_LAYER), []).append(digest)
    name = f"{OLLAMA}:{manifest.name}"
    if "adapter" in found:
        why = "an adapter lies beside its weights, and Ollama's adapters are not read"
        raise UnsupportedModelError(f"{name} cannot run here", why=why, fix="run the model that it was made from")
    if len(found.get("model", ())) != 1:
        why = f"it has {len(found.get('model', ()))} GGUF files; one is needed"
        raise UnsupportedModelError(f"{name} cannot run here", why=why, fix=Fix.command("list"))
    known, again = _OLLAMA_DIGEST.fullmatch(found["model"][0]), f"ollama pull {manifest.name}"
    if known is None:
        raise CheckpointError(f"{manifest.path} is broken", why="it names a file that can be none", fix=again)
    blobs = [manifest.root / "blobs" / f"sha256{sign}{known[1]}" for sign in "-:"]
    blob = next((path for path in blobs if is_gguf_model(path)), None)
    if blob is None:
        raise CheckpointError(f"{name} is not whole", why=f"{blobs[0]} is no GGUF file that can be read", fix=again)
    return StoreModel(name, OLLAMA, whole_path(blob), blob.stat().st_size)


_VARIABLES = {OLLAMA: "OLLAMA_MODELS", LLAMA_CPP: "LLAMA_CACHE"}
_ROOTS = {OLLAMA: ollama_folders, LM_STUDIO: lm_studio_folders, LLAMA_CPP: llama_cpp_folders}


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def _present(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are there, each once."""
    return list({folder.resolve(): folder for folder in folders if is_folder(folder)}.values())
