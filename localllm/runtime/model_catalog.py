"""The models on this disk and those that can be had, as rows that every front end shows alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from localllm.config import format_bytes

if TYPE_CHECKING:
    from localllm.hub import InstalledModel, PackedWeights
    from localllm.registry import ModelEntry

State = Literal["installed", "partial", "available", "folder", "orphan"]


@dataclass(frozen=True)
class ModelRow:
    """A model. size_bytes: of its files, None where they are not here, or not all of them. parameters: billions."""

    name: str
    state: State
    repo: str | None = None
    revision: str | None = None
    directory: str | None = None
    size_bytes: int | None = None
    partial_bytes: int = 0
    packed: tuple[PackedWeights, ...] = ()
    model_type: str | None = None
    aliases: tuple[str, ...] = ()
    licence: str | None = None
    gated: bool | None = None
    context: int | None = None
    parameters: float | None = None

    @property
    def is_here(self) -> bool:
        """Whether the model can be run at once."""
        return self.state in ("installed", "folder")


def model_rows(*, has_available: bool) -> list[ModelRow]:
    """Return the models on this disk; then, where `has_available`, those known by a short name that are not. Reads the
    disk.

    Raises SettingsError for a models.toml that cannot be understood.
    """
    from localllm import hub
    from localllm.registry import load_registry

    rows = [_of_installed(model) for model in hub.list_models()]
    if has_available:
        here = {row.name for row in rows}
        rows += [_of_entry(entry) for entry in load_registry().entries if entry.name not in here]
    return rows


def row_fields(row: ModelRow) -> dict[str, Any]:
    """Return a row's fields in the JSON forms."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {**values, "packed": packed_fields(row.packed), "aliases": list(row.aliases)}


def packed_fields(models: Iterable[PackedWeights]) -> list[dict[str, Any]]:
    """Packed models as the JSON forms have them."""
    names = ("weights", "size_bytes", "state")
    return [{**{name: getattr(model, name) for name in names}, "directory": str(model.directory)} for model in models]


def packed_text(packed: PackedWeights) -> str:
    """One packed model in a table: "int4-g64 3.9 GiB"."""
    note = "" if packed.state == "whole" else f" ({packed.state})"
    return f"{packed.weights} {format_bytes(packed.size_bytes)}{note}"


def size_text(row: ModelRow) -> str:
    """Return the bytes of a model, whole and unfinished; "" where nothing of it is here."""
    size = format_bytes(row.size_bytes) if row.size_bytes else ""
    if not row.partial_bytes:
        return size
    return f"{size} + {format_bytes(row.partial_bytes)} unfinished".removeprefix(" + ")


def licence_text(row: ModelRow) -> str:
    return f"{row.licence or ''}{' (gated)' if row.gated else ''}"


def _of_installed(model: InstalledModel) -> ModelRow:
    entry = model.entry
    return ModelRow(
        name=model.name,
        state=model.state,
        repo=model.repo,
        revision=model.revision,
        directory=str(model.directory) if model.directory else None,
        size_bytes=model.size_bytes if model.directory else None,
        partial_bytes=model.partial_bytes,
        packed=model.packed,
        model_type=model.model_type,
        aliases=entry.aliases if entry else (),
        licence=entry.licence if entry else None,
        gated=entry.gated if entry else None,
        context=entry.context if entry else None,
        parameters=entry.parameters if entry else None,
    )


def _of_entry(entry: ModelEntry) -> ModelRow:
    return ModelRow(
        name=entry.name,
        state="available",
        repo=entry.repo,
        revision=entry.revision,
        aliases=entry.aliases,
        licence=entry.licence,
        gated=entry.gated,
        context=entry.context,
        parameters=entry.parameters,
    )
