"""The files of one adapter (LoRA): a folder of PEFT's or a GGUF file, and what it says of itself.

Reads adapter_config.json and the header of a GGUF file, no weights; what they say is shown, and never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import AdapterError, CheckpointError, Fix, ModelNotFoundError
from localllm.gguf.header import read_header
from localllm.hub.gguf_files import is_gguf_adapter
from localllm.hub.names import HubName, refusal, short_name, whole_path
from localllm.hub.quants import models_among, named
from localllm.hub.repo_cache import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, RepoCache, behind, read_json
from localllm.present import is_file
from localllm.registry import REPO_ID, Registry

_TAG = "base_model:adapter:"  # of the hub
_LORA_B = ".lora_b"  # [N, rank]
_BASE = "general.base_model.0."
# What is written behind a model's name where its weights are quantized.
_QUANTIZED = re.compile(
    r"(?:-(?:unsloth|bnb|gguf|gptq|awq|mlx|\d-?bits?|int\d|i?q\d\w*|fp8|nvfp4|mxfp4|dynamic|quantized))+$"
)
_MOST_SHOWN = 300  # characters


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on this disk.

    path: PEFT's folder, or the GGUF file.
    name: as people type it.
    repo, revision: where it was pulled from, and the commit; None for a folder or a file of the user's.
    base: the model that it changes, in its own words; a repository, a folder of whoever trained it, or a title.
    hub_name: its whole name on the hub, "org/repo@v1"; "" where `repo` is None.
    is_usable: its config and its header say nothing that is refused when it is loaded, as far as a glance tells.
    """

    path: Path
    name: str
    repo: str | None
    revision: str | None
    base: str | None
    rank: int | None
    num_bytes: int
    hub_name: str = ""
    is_usable: bool = True

    @property
    def origin(self) -> str:
        """Return where it is from: its name on the hub, or its path."""
        return self.hub_name or str(self.path)


def is_for(adapter: AdapterFiles, base: str, registry: Registry) -> bool:
    """Return whether an adapter says that it changes a model, or one that is this model in another format.

    base: a name of the model, as `names.understand` takes it.
    """
    return adapter.base is not None and _plain(adapter.base, registry) == _plain(base, registry)


def typed_base(base: str | None, registry: Registry) -> str | None:
    """Return the shortest name of the model that an adapter changes; None where it does not say one that is known."""
    if base is None:
        return None
    found = HubName.read(base)
    entry = registry.by_repo(found.repo) if found is not None else registry.find(base)
    return entry.name if entry is not None else found.repo if found is not None else None


def base_in_tags(tags: Iterable[object]) -> str:
    """Return the repository that an adapter changes, as the hub tags it; "" of what is no adapter."""
    found = (tag.removeprefix(_TAG) for tag in tags if isinstance(tag, str) and tag.startswith(_TAG))
    return next(filter(REPO_ID.fullmatch, found), "")


class NamesAdapterError(ModelNotFoundError):
    """An adapter is named where a model is needed."""

    def __init__(self, name: str, base: str | None, registry: Registry) -> None:
        """base: as `AdapterFiles` has it."""
        why = f"it was made for {base}" if base else "it was made for another model, and does not say which"
        fix = Fix.adapter(name, typed_base(base, registry) or "BASE", name)
        super().__init__(f"{name[:200]} is an adapter, not a model", why=why, fix=fix)


def peft_adapter(
    folder: Path, name: str, repo: str | None = None, revision: str | None = None, hub_name: str = ""
) -> AdapterFiles:
    """Return the adapter in PEFT's folder. Raises AdapterError where its weights are not there, or are a pickle."""
    weights = folder / ADAPTER_WEIGHTS
    if not is_file(weights):
        raise without_weights(str(folder), is_pickle=is_file(folder / ADAPTER_PICKLE))
    config = _config(folder)
    base, rank = _said_by_peft(config)
    num_bytes = weights.stat().st_size + (folder / ADAPTER_CONFIG).stat().st_size
    is_usable = config.get("peft_type") == "LORA" and not config.get("use_dora")
    return AdapterFiles(folder, name, repo, revision, base, rank, num_bytes, hub_name, is_usable)


def gguf_adapter(
    file: Path, name: str, repo: str | None = None, revision: str | None = None, hub_name: str = ""
) -> AdapterFiles:
    """Return the adapter in a GGUF file."""
    base, rank = _said_by_gguf(file)
    return AdapterFiles(file, name, repo, revision, base, rank, file.stat().st_size, hub_name, rank is not None)


def without_weights(place: str, *, is_pickle: bool) -> AdapterError:
    """Return the error of an adapter whose weights are not there, or not in a form that is read."""
    if not is_pickle:
        why, fix = f"its {ADAPTER_CONFIG} is there alone", f"have {ADAPTER_WEIGHTS} beside it, or name another"
        return AdapterError(f"{place} has no weights of an adapter", why=why, fix=fix)
    why = f"{ADAPTER_PICKLE} is a pickle, which could run code when it is read, so it is not"
    fix = f"have PEFT convert it where you trust it: model.save_pretrained(FOLDER) writes {ADAPTER_WEIGHTS}"
    return AdapterError(f"the weights of the adapter {place} are a pickle", why=why, fix=fix)


def adapters_in(cache: RepoCache, commit: str, behind: str = "") -> Iterator[AdapterFiles]:
    """Yield the adapters of a snapshot that are here whole, by their names on the hub. behind: a revision, "@v1"."""
    snapshot = cache.snapshot(commit)
    if cache.has_adapter(commit):
        name = f"{cache.repo}{behind}"
        yield peft_adapter(snapshot, name, cache.repo, commit, name)
    for name, choice in named(models_among(cache.gguf_files(commit)), cache.repo, behind).items():
        if is_gguf_adapter(path := whole_path(snapshot / choice.files[0])):
            yield gguf_adapter(path, name, cache.repo, commit, name)


def adapters_of(cache: RepoCache) -> Iterator[AdapterFiles]:
    """Yield all adapters of a repository that are here, each snapshot's by the names that lead to it."""
    refs = cache.refs()
    for commit in cache.commits():
        yield from adapters_in(cache, commit, behind(commit, refs))


def base_of(path: Path) -> str | None:
    """Return the model that an adapter says it changes. path: PEFT's folder, or the GGUF file."""
    return (_said_by_gguf(path) if is_file(path) else _said_by_peft(_config(path)))[0]


def _config(folder: Path) -> Mapping[str, object]:
    """Return what PEFT's config says, or nothing: whoever loads the adapter tells what is wrong with it."""
    with suppress(CheckpointError):
        return read_json(folder / ADAPTER_CONFIG)
    return {}


def _said_by_peft(config: Mapping[str, object]) -> tuple[str | None, int | None]:
    """Return the base and the rank, where the config has them."""
    rank = config.get("r")
    return _shown(config.get("base_model_name_or_path")), rank if type(rank) is int and 0 < rank < 2**31 else None


def _said_by_gguf(file: Path) -> tuple[str | None, int | None]:
    """Return the base and the rank, as far as they can be read."""
    with suppress(CheckpointError):
        header = read_header(file)
        address, title = (header.metadata.get(f"{_BASE}{key}") for key in ("repo_url", "name"))
        shapes = (entry.shape for name, entry in header.tensors.items() if name.endswith(_LORA_B))
        base = _shown(short_name(address)) if isinstance(address, str) else _shown(title)
        return base, max((shape[-1] for shape in shapes if shape), default=None)
    return None, None


def _shown(text: object) -> str | None:
    """Return what an adapter says, where it can be shown."""
    is_shown = isinstance(text, str) and len(text) <= _MOST_SHOWN and not refusal(text, is_path=True)
    return str(text) if is_shown else None


def _plain(name: str, registry: Registry) -> str:
    """Return a model's name without its maker, its folder and its format: "llama-3.2-1b-instruct"."""
    found = HubName.read(name)
    entry = registry.find(name) or (registry.by_repo(found.repo) if found else None)
    repo = entry.repo or entry.name if entry is not None else found.repo if found is not None else name
    last = repo.rstrip("/").rpartition("/")[2].casefold().removesuffix(".gguf").replace(" ", "-")
    return _QUANTIZED.sub("", last)
