"""Models by name: where they are on this disk, and how they get there.

The files lie in huggingface_hub's cache, beside those that other tools fetched. Importing this loads neither torch nor
huggingface_hub. `registry` and `hub` default to the user's models.toml and environment.
"""

from __future__ import annotations

from collections.abc import Callable

from localllm.hub import installed as _installed
from localllm.hub.installed import InstalledModel, ModelDescription, contents, current
from localllm.hub.names import ModelFiles, understand
from localllm.hub.packed import PackedWeights
from localllm.hub.progress import Progress, PullProgress
from localllm.hub.removal import remove as _remove
from localllm.hub.repo_cache import RepoCache
from localllm.hub.settings import HubSettings, RetryPolicy
from localllm.registry import Registry, load_registry

__all__ = [
    "HubSettings",
    "InstalledModel",
    "ModelDescription",
    "ModelFiles",
    "PackedWeights",
    "Progress",
    "PullProgress",
    "RetryPolicy",
    "contents",
    "current",
    "describe",
    "list_models",
    "locate",
    "pull",
    "remove",
]


def locate(
    name: str,
    *,
    registry: Registry | None = None,
    hub: HubSettings | None = None,
    offline: bool = False,
    needs_config: bool = True,
) -> ModelFiles:
    """The folder of `tiny`, a directory, a registry name or `org/repo[@revision]`. Touches no network.

    needs_config: whether a user's folder must hold config.json; a tokenizer alone needs none. Raises ModelNotFoundError
    for an unknown name, and with the command that fetches it for a model that is not, or only partly, on this disk.
    """
    hub = hub or HubSettings.from_environment(offline=offline)
    return _installed.find(name, registry or load_registry(), hub, needs_config=needs_config)


def pull(
    name: str,
    *,
    token: str | None = None,
    progress: Progress | None = None,
    offline: bool = False,
    registry: Registry | None = None,
    hub: HubSettings | None = None,
) -> ModelFiles:
    """Fetches what `name` still lacks, resuming where an earlier pull stopped; every byte is verified.

    Raises ModelNotFoundError, AccessError, DownloadError, UnsupportedModelError or DoesNotFitError. What was fetched
    until then, also until a KeyboardInterrupt or a kill, serves the next pull.
    """
    from localllm.hub.fetch import fetch_repository  # the network's modules cost 20 ms, which `list` need not pay
    from localllm.hub.http import HubClient

    registry = registry or load_registry()
    hub = hub or HubSettings.from_environment(offline=offline, token=token)
    reference = understand(name, registry)
    if reference.repo is None or hub.offline:
        return _installed.find(name, registry, hub, needs_config=True)
    cache = RepoCache(hub.cache_dir, reference.repo)
    client = HubClient(hub, reference.repo, name)
    commit = fetch_repository(client, cache, reference.revision, progress or (lambda _: None))
    return ModelFiles(cache.snapshot(commit), reference.name, reference.repo, commit, reference.entry)


def list_models(*, registry: Registry | None = None, hub: HubSettings | None = None) -> list[InstalledModel]:
    """The built-in model, every model in the cache that this version runs, whole or partly fetched, and what is packed.

    A user's folder is listed where something is packed of it; so are packed weights whose checkpoint is gone.
    """
    return list(_installed.installed(registry or load_registry(), hub or HubSettings.from_environment()))


def describe(name: str, *, registry: Registry | None = None, hub: HubSettings | None = None) -> ModelDescription:
    """What is known about a model, on this disk or not. Raises ModelNotFoundError where the name means nothing."""
    return _installed.describe(name, registry or load_registry(), hub or HubSettings.from_environment())


def remove(
    name: str,
    *,
    packed_only: bool = False,
    confirm: Callable[[int, int], None] = lambda _checkpoint_bytes, _packed_bytes: None,
    registry: Registry | None = None,
    hub: HubSettings | None = None,
) -> int:
    """Deletes a model from the cache, with what was packed of it, and returns the bytes freed.

    packed_only: nothing but what was packed, also of a user's folder and of the built-in model. confirm(bytes of the
    checkpoint, packed bytes) hears of it before anything is deleted, and may raise. Raises UsageError,
    ModelNotFoundError, or LocalLLMError where another process is at work on it.
    """
    hub = hub or HubSettings.from_environment()
    return _remove(name, registry or load_registry(), hub, packed_only=packed_only, confirm=confirm)
