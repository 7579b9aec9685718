"""The facts about one model, as values and as lines to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.config import format_bytes
from localllm.runtime.model_catalog import packed_fields, packed_text
from localllm.runtime.selection import sampling_defaults

if TYPE_CHECKING:
    from localllm.hub import ModelDescription

_NUMBERS = ("layers", "hidden_size", "attention_heads", "kv_heads", "vocabulary", "context")


def model_facts(model: ModelDescription) -> dict[str, Any]:
    """Return the facts of `localllm show --json`. Raises CheckpointError for a checkpoint's defaults out of range."""
    entry = model.entry
    return {
        "name": model.name,
        "state": _state(model),
        "repo": model.repo,
        "revision": model.revision if model.repo else None,
        "directory": str(model.files.directory) if model.files else None,
        "size_bytes": model.size_bytes if model.files else None,
        "partial_bytes": model.partial_bytes,
        "packed": packed_fields(model.packed),
        "model_type": model.model_type,
        "dtype": model.dtype,
        "parameters": entry.parameters if entry else None,
        **{name: value for name, value in asdict(model).items() if name in _NUMBERS},
        "licence": entry.licence if entry else None,
        "gated": entry.gated if entry else None,
        "aliases": list(entry.aliases) if entry else [],
        "sampling": sampling_defaults(entry, model.files),
        "stop": list(entry.stop) if entry else [],
    }


def fact_lines(model: ModelDescription) -> Iterator[tuple[str, str]]:
    """(label, text) of each fact that is known. Raises as `model_facts`."""
    for name, value in model_facts(model).items():
        if value in (None, [], {}) or (name, value) == ("partial_bytes", 0):
            continue
        label = name.removesuffix("_bytes").replace("_", " ")
        if name == "packed":
            yield from ((label, f"{packed_text(packed)} in {packed.directory}") for packed in model.packed)
        else:
            yield label, _shown(name, value)


def _state(model: ModelDescription) -> str:
    if model.files:
        return "installed"
    if model.partial_bytes:
        return "partial"
    return "orphan" if model.packed and model.entry is None else "available"


def _shown(name: str, value: bool | float | str | list[str] | Mapping[str, float]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "parameters":
        return f"{value:g} billion"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, list):
        return ", ".join(repr(item) if name == "stop" else str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item:g}" for key, item in value.items())
    return str(value)
