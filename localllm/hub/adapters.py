"""Adapters (LoRA) by name: where they are on this disk, and how they get there.

Their names are a namespace of their own: `--adapter qwen3-8b` never means a model.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localllm.config import format_bytes
from localllm.errors import AdapterError, Fix, LocalLLMError, UsageError
from localllm.hub.adapter_files import (
    AdapterFiles,
    adapters_of,
    gguf_adapter,
    is_for,
    peft_adapter,
    typed_base,
    without_weights,
)
from localllm.hub.gguf_files import is_gguf_adapter, is_gguf_model
from localllm.hub.installed import locate
from localllm.hub.names import HubName, looks_like_path, path_of, pull_command, refusal, short_name, whole_path
from localllm.hub.quants import models_among, pick
from localllm.hub.repo_cache import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, RepoCache
from localllm.hub.settings import HubSettings, Progress
from localllm.present import is_file, is_folder, is_there
from localllm.registry import REPO_ID, load_registry
from localllm.settings import MAX_ADAPTER_SCALE

__all__ = [
    "AdapterFiles",
    "adapters_for",
    "download_bytes",
    "is_for",
    "is_here",
    "list_adapters",
    "locate_adapter",
    "pull_adapter",
    "split_scale",
    "typed_base",
]

_LIST = Fix.command("adapters")


def split_scale(text: str) -> tuple[str, float]:
    """Return the name and the scale of NAME_OR_PATH[:SCALE]. Of a path that is there the whole text is the name.

    Raises UsageError for a number that is no scale, and for what is no number behind an adapter that is here.
    """
    name, colon, written = text.rpartition(":")
    if not colon or is_there(path_of(text)):
        return text, 1.0
    scale = _number(written)
    if scale is None:
        before, _, number = name.rpartition(":")
        if _number(number) is not None and is_here(before):  # "./fox:3:"
            name, written = before, text.removeprefix(f"{before}:")
        elif not is_here(name):
            return text, 1.0
    elif -MAX_ADAPTER_SCALE <= scale <= MAX_ADAPTER_SCALE:
        return name, scale
    near = _number(written.strip(":").replace(",", "."))
    meant = near if near is not None and -MAX_ADAPTER_SCALE <= near <= MAX_ADAPTER_SCALE else 1.0
    what = f"the scale of the adapter {name[:80]!r} is no number from {-MAX_ADAPTER_SCALE:g} to {MAX_ADAPTER_SCALE:g}"
    raise UsageError(what, why=f"it is {written[:20]!r}", fix=Fix.word(text, f"{name}:{meant:g}"))


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return None if "_" in text else float(text)
    return None


def is_here(name: str) -> bool:
    """Return whether an adapter has exactly this name: of a repository with GGUF files each has a longer one."""
    path, called = path_of(name), short_name(name).casefold()
    if is_gguf_adapter(path) or is_file(path / ADAPTER_CONFIG):
        return True
    return any(called in (each.name.casefold(), each.hub_name.casefold()) for each in list_adapters())


def list_adapters(text: str | None = None) -> list[AdapterFiles]:
    """Return the adapters in the hub's cache that are here whole. One is called by the last part of its repository's
    name, in small letters, where no other is called so.

    text: only those are looked at whose repositories it may name.
    """
    cache_dir = HubSettings.from_environment().cache_dir
    found: list[AdapterFiles] = []
    for folder in sorted(cache_dir.glob("models--*--*")) if is_folder(cache_dir) else []:
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        is_meant = text is None or repo.partition("/")[2].casefold() in text.casefold()
        if is_meant and REPO_ID.fullmatch(repo):
            found += adapters_of(RepoCache(cache_dir, repo))
    times = Counter(map(_last_part, found))
    return [replace(each, name=_last_part(each)) if times[_last_part(each)] == 1 else each for each in found]


def adapters_for(base: str) -> list[AdapterFiles]:
    """Return the adapters in the hub's cache that say that they are for this model, and can be used."""
    registry = load_registry()
    return [each for each in list_adapters() if each.is_usable and is_for(each, base, registry)]


def locate_adapter(name: str, *, offline: bool = False) -> AdapterFiles:
    """Return the files of an adapter: by a folder with adapter_config.json, a GGUF file, ORG/REPO[@REVISION], the
    address of its page, or its short name. Touches no network.

    offline: nothing can be pulled. Raises AdapterError where it is none, is not here, or its weights are a pickle.
    """
    is_path = looks_like_path(name)
    if reason := refusal(name, is_path=is_path):
        raise AdapterError(f"{name[:80]!r} is not the name of an adapter", why=reason, fix=_LIST)
    path = path_of(name)
    if is_file(path):
        return _of_file(path, name)
    if is_file(path / ADAPTER_CONFIG):
        return peft_adapter(path.resolve(), path.resolve().name)
    if is_path:
        raise _no_folder(path, name)
    hub, here = HubSettings.from_environment(offline=offline), list_adapters()
    by_name = [each for each in here if name.casefold() == each.name.casefold()]
    if len(by_name) == 1:
        return by_name[0]
    found = _on_hub(name)
    if found is None:
        raise _not_here(name, "no folder and no file here has this name", here, hub)
    return _of_hub(name, found, here, hub)


def pull_adapter(name: str, *, progress: Progress = lambda _: None, offline: bool = False) -> AdapterFiles:
    """Fetch what an adapter ORG/REPO[@REVISION] or ORG/REPO:QUANT still lacks: adapter_config.json and
    adapter_model.safetensors, or its GGUF file. Any other name is of one that must be here.

    Raises AdapterError for a repository without one, and what `hub.pull` does.
    """
    found = None if refusal(name) else _on_hub(name)
    hub = HubSettings.from_environment(offline=offline)
    is_own = is_file(path_of(name) / ADAPTER_CONFIG) or is_file(path_of(name))
    if found is None or hub.offline or is_own:
        return locate_adapter(name, offline=offline)
    from localllm.hub.fetch import fetch_repository
    from localllm.hub.http import HubClient

    client = HubClient(hub, found.repo, name)
    cache = RepoCache(hub.cache_dir, found.repo)
    fetch_repository(client, cache, found.revision or "main", progress, found.part, is_adapter=True)
    return locate_adapter(name, offline=offline)


def download_bytes(name: str) -> int:
    """Return how many bytes `pull_adapter` would fetch of an adapter of the hub, of which none are here. Raises what it
    does."""
    from localllm.hub.fetch import listed_bytes
    from localllm.hub.http import HubClient

    found = _on_hub(name)
    if found is None:
        return locate_adapter(name).num_bytes
    client = HubClient(HubSettings.from_environment(), found.repo, name)
    return listed_bytes(client, found.revision or "main", found.part, is_adapter=True)


def _last_part(adapter: AdapterFiles) -> str:
    """Return what a name on the hub has behind the maker's, in small letters: "my-lora" or "my-lora:f16"."""
    return adapter.hub_name.partition("/")[2].casefold()


def _on_hub(name: str) -> HubName | None:
    """Return what a name may be on the hub; None also for folder/x.gguf, which is a file's."""
    found = HubName.read(name)
    return None if _is_of_file(name) and found is not None and not found.part else found


def _is_of_file(name: str) -> bool:
    return name.casefold().endswith(".gguf")


def _of_file(path: Path, name: str) -> AdapterFiles:
    if is_gguf_adapter(path):
        return gguf_adapter(whole_path(path), path.stem)
    why, fix = "an adapter is a folder with adapter_config.json, or a GGUF file", _LIST
    if is_file(path.parent / ADAPTER_CONFIG):
        fix = Fix.word(name, str(path.parent))
    elif is_gguf_model(path):
        why, fix = "its header does not say that it is one (general.type)", Fix.command("run", name)
    raise AdapterError(f"{path} is not an adapter", why=why, fix=fix)


def _of_hub(name: str, wanted: HubName, here: Sequence[AdapterFiles], hub: HubSettings) -> AdapterFiles:
    """Return the adapter of a name on the hub. here: all that are on this disk."""
    cache = RepoCache(hub.cache_dir, wanted.repo)
    commit = cache.commit_of(wanted.revision or "main")
    if commit is None:
        raise _not_here(name, f"{cache.folder} is absent", here, hub)
    snapshot = cache.snapshot(commit)
    own = [each for each in here if (each.repo, each.revision) == (wanted.repo, commit)]
    if wanted.part:
        picked = pick(models_among(cache.gguf_files(commit)), wanted.part)
        own = [each for each in own if each.path in [whole_path(snapshot / choice.files[0]) for choice in picked]]
    found = [each for each in own if each.path == snapshot] or own
    if len(found) == 1:
        return found[0]
    if found:
        sizes = ", ".join(f"{each.hub_name} {format_bytes(each.num_bytes)}" for each in found)
        fixes = [Fix.word(name, each.name) for each in found]
        raise AdapterError(f"{name} has {len(found)} adapters", why=sizes, fix=fixes)
    if cache.holds(snapshot / ADAPTER_CONFIG) and cache.holds(snapshot / ADAPTER_PICKLE):
        raise without_weights(name, is_pickle=True)
    raise _not_here(name, f"{ADAPTER_WEIGHTS} is absent", here, hub)


def _no_folder(path: Path, name: str) -> AdapterError:
    """Return the error of a path at which there is no adapter."""
    if not is_folder(path):
        return AdapterError(f"there is no adapter {name[:200]!r}", why="nothing is there", fix=_LIST)
    is_model = _model_instead(name)
    return is_model or AdapterError(f"{path} is not an adapter", why=f"it has no {ADAPTER_CONFIG}", fix=_LIST)


def _not_here(name: str, why: str, here: Sequence[AdapterFiles], hub: HubSettings) -> AdapterError:
    """Return the error of a name without an adapter on this disk."""
    if (error := _model_instead(name)) is not None:
        return error
    path, found = path_of(name), _on_hub(name)
    if is_folder(path) or (found is None and _is_of_file(name)):
        return _no_folder(path, name)
    nearest = _nearest(name, here)
    why += f"; {' and '.join(nearest)} {'is' if len(nearest) == 1 else 'are'} here" if nearest else ""
    why += "; offline, nothing is fetched" if hub.offline else ""
    fixes = [Fix.word(name, near) for near in nearest]
    if found is not None or not nearest:
        fixes.append(pull_command(name if found is not None else "ORG/REPO"))
    return AdapterError(f"the adapter {name[:80]} is not on this disk", why=why, fix=fixes)


def _model_instead(name: str) -> AdapterError | None:
    """Return the error of a name that is a model's; None where it is none."""
    is_model = load_registry().find(name) is not None
    with suppress(LocalLLMError):
        is_model = is_model or bool(locate(name))
    if not is_model:
        return None
    why = "an adapter changes a model, and is named beside it"
    return AdapterError(f"{name[:80]} is a model, not an adapter", why=why, fix=Fix.command("run", name))


def _nearest(name: str, here: Sequence[AdapterFiles]) -> list[str]:
    """Return the names of those on this disk that may be meant."""
    last = name.rpartition("/")[2].casefold()
    parts = [_last_part(each) for each in here]
    near = [last] if last in parts else difflib.get_close_matches(last, set(parts), n=2)
    return [each.name for part in near for each in here if _last_part(each) == part]
