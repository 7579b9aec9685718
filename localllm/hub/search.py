"""A search of the hub for models by words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from localllm.errors import Fix
from localllm.gguf.architectures import ARCHITECTURES
from localllm.hub.adapter_files import base_in_tags
from localllm.hub.http import HubClient
from localllm.hub.settings import HubSettings
from localllm.registry import FAMILIES, REPO_ID

_WANTED = ("config", "downloads", "gated", "gguf", "safetensors", "tags")
MOST_FOUND = 30


@dataclass(frozen=True)
class FoundModel:
    """A repository of the hub, by its own account.

    architecture: as its config.json or its GGUF files name it; "" where it does not say.
    parameters: billions.
    downloads: of the last 30 days.
    why_not: why it does not run here; "" where it does as far as can be told.
    adapter_of: the model that it changes; "" where it is no adapter.
    """

    repo: str
    architecture: str
    is_gguf: bool
    parameters: float | None
    licence: str
    gated: bool
    downloads: int
    why_not: str
    adapter_of: str


def search_hub(words: str, hub: HubSettings, report: Callable[[str], None]) -> list[FoundModel]:
    """Return the models whose names have the words in them, at most MOST_FOUND, those that are pulled most first.

    Raises DownloadError, AccessError.
    """
    query = [("search", words), ("sort", "downloads"), ("direction", "-1"), ("limit", str(MOST_FOUND))]
    query += [("expand[]", each) for each in _WANTED]
    client = HubClient(hub, "", words, again=Fix.command("search", *words.split()))
    listed = client.json_list(f"{hub.endpoint}/api/models?{urlencode(query)}", report)
    return list(_found(listed))


def _found(listed: list[Any]) -> Iterator[FoundModel]:
    for item in listed:
        repo = item.get("id") if isinstance(item, dict) else None
        if isinstance(repo, str) and REPO_ID.fullmatch(repo):
            yield _read(repo, item)


def _read(repo: str, item: Mapping[str, Any]) -> FoundModel:
    tags = [tag for tag in _listed(item, "tags") if isinstance(tag, str)]
    gguf, config = _object(item, "gguf"), _object(item, "config")
    is_gguf = bool(gguf) or "gguf" in tags
    architecture = (gguf if is_gguf else config).get("architecture" if is_gguf else "model_type")
    architecture = architecture if isinstance(architecture, str) else ""
    total = (gguf or _object(item, "safetensors")).get("total")
    downloads = item.get("downloads")
    return FoundModel(
        repo,
        architecture,
        is_gguf,
        total / 1e9 if isinstance(total, int) and total > 0 else None,
        next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), ""),
        bool(item.get("gated")),
        downloads if isinstance(downloads, int) else 0,
        _why_not(architecture, tags, is_gguf=is_gguf, has_safetensors=bool(_object(item, "safetensors"))),
        base_in_tags(tags),
    )


def _why_not(architecture: str, tags: list[str], *, is_gguf: bool, has_safetensors: bool) -> str:
    if base_in_tags(tags):
        return "" if is_gguf or "safetensors" in tags else "no safetensors"
    if is_gguf:
        return f"{architecture} is not supported" if architecture and architecture not in ARCHITECTURES else ""
    if not architecture:
        return "no language model"
    if architecture not in FAMILIES:
        return f"{architecture} is not supported"
    return "" if has_safetensors or "safetensors" in tags else "no safetensors"


def _object(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = item.get(name)
    return value if isinstance(value, dict) else {}


def _listed(item: Mapping[str, Any], name: str) -> list[Any]:
    value = item.get(name)
    return value if isinstance(value, list) else []
