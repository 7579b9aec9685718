"""Models by name: where they are on this disk, and how they get there.

The files lie in huggingface_hub's cache, beside those that other tools fetched. Importing this loads neither torch nor
huggingface_hub.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.hub.installed import (
    InstalledModel,
    ModelDescription,
    contents,
    current,
    describe,
    described,
    files_of,
    gguf_of,
    locate,
)
from localllm.hub.listing import list_models
from localllm.hub.names import ModelFiles, understand
from localllm.hub.packed import PackedWeights
from localllm.hub.removal import Removal, removal
from localllm.hub.repo_cache import RepoCache
from localllm.hub.settings import HubSettings, Progress, PullProgress, RetryPolicy
from localllm.registry import load_registry

__all__ = [
    "HubSettings",
    "InstalledModel",
    "ModelDescription",
    "ModelFiles",
    "PackedWeights",
    "Progress",
    "PullProgress",
    "Removal",
    "RetryPolicy",
    "contents",
    "current",
    "describe",
    "described",
    "download_bytes",
    "list_models",
    "locate",
    "pull",
    "removal",
]


def download_bytes(name: str, *, offline: bool = False) -> int:
    """Return how many bytes `pull` would fetch of a model of the hub, of which none are here. Raises what it does."""
    from localllm.hub.fetch import listed_bytes
    from localllm.hub.http import HubClient

    registry, hub = load_registry(), HubSettings.from_environment(offline=offline)
    reference = understand(name, registry)
    if reference.repo is None or hub.offline:
        locate(name, registry=registry, offline=offline)
        return 0
    return listed_bytes(HubClient(hub, reference.repo, name), reference.revision, reference.part)


def pull(name: str, *, progress: Progress = lambda _: None, offline: bool = False) -> ModelFiles:
    """Fetch what `name` still lacks, going on where an earlier pull stopped; every byte is verified.

    What another program keeps is here already. Raises ModelNotFoundError, AccessError, DownloadError,
    UnsupportedModelError or DoesNotFitError. What was fetched
    until then, also until a KeyboardInterrupt or a kill, serves the next pull.
    """
    from localllm.hub.fetch import fetch_repository  # the network's modules cost 20 ms, which `list` need not pay
    from localllm.hub.http import HubClient

    registry, hub = load_registry(), HubSettings.from_environment(offline=offline)
    reference = understand(name, registry)
    if reference.repo is None or hub.offline:
        return locate(name, registry=registry, offline=offline)
    cache = RepoCache(hub.cache_dir, reference.repo)
    client = HubClient(hub, reference.repo, name)
    commit, gguf = fetch_repository(client, cache, reference.revision, progress, reference.part)
    if gguf:
        [(name, model)] = gguf_of(cache, commit, replace(reference, part=gguf)).items()
        return files_of(cache, commit, name, model)
    return ModelFiles(cache.snapshot(commit), reference.name, reference.repo, commit, reference.entry)
