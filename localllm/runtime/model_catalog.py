"""The models on this disk and those that can be had: rows and facts that every front end shows alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from localllm.config import format_bytes, format_figure
from localllm.errors import LocalLLMError
from localllm.runtime.selection import sampling_defaults

if TYPE_CHECKING:
    from localllm.hub import InstalledModel, ModelDescription, PackedWeights
    from localllm.registry import ModelEntry

_NUMBERS = ("layers", "hidden_size", "attention_heads", "kv_heads", "vocabulary", "context")

State = Literal["installed", "partial", "available", "folder", "file", "orphan"]


@dataclass(frozen=True)
class ModelRow:
    """A model. size_bytes: of its files, None where they are not here, or not all of them. parameters: billions. file:
    of a GGUF model, which has no directory. store: the program that keeps it, "" where we or the user do.
    download_bytes: of all that a pull fetches, None where it is not known. total_bytes: of its files, whole and
    unfinished, and of what is packed of it."""

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
    download_bytes: int | None = None
    file: str | None = None
    store: str = ""

    @property
    def is_here(self) -> bool:
        """Whether the model can be run at once."""
        return self.state in ("installed", "folder", "file")

    def matches(self, words: Iterable[str]) -> bool:
        """Return whether each word occurs in one of its names."""
        names = " ".join((self.name, *self.aliases, self.repo or "")).casefold()
        return all(word.casefold() in names for word in words)

    @property
    def total_bytes(self) -> int:
        return (self.size_bytes or 0) + self.partial_bytes + sum(packed.size_bytes for packed in self.packed)


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
        rows += [
            ModelRow(entry.name, "available", entry.repo, entry.revision, **_registered(entry))
            for entry in load_registry().entries
            if entry.name not in here
        ]
    return rows


def row_fields(row: ModelRow) -> dict[str, Any]:
    """Return a row's fields in the JSON forms."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    aliases = list(row.aliases)
    return {**values, "packed": packed_fields(row.packed), "aliases": aliases, "total_bytes": row.total_bytes}


def packed_fields(models: Iterable[PackedWeights]) -> list[dict[str, Any]]:
    """Packed models as the JSON forms have them."""
    names = ("weights", "size_bytes", "state")
    return [{**{name: getattr(model, name) for name in names}, "directory": str(model.directory)} for model in models]


def packed_text(packed: PackedWeights) -> str:
    """One packed model in a table: "int4-g64 3.9 GiB"."""
    note = "" if packed.state == "whole" else f" ({packed.state})"
    return f"{packed.weights} {format_bytes(packed.size_bytes)}{note}"


def parameters_text(billions: float | None) -> str:
    """Return the number of a model's weights in a table: "8.03B", "135M"; "" where it is not known."""
    if not billions:
        return ""
    return f"{format_figure(billions)}B" if billions >= 1 else f"{format_figure(billions * 1000)}M"


def size_text(row: ModelRow) -> str:
    """Return the bytes of a model, whole and unfinished; "" where nothing of it is here."""
    size = format_bytes(row.size_bytes) if row.size_bytes else ""
    if not row.partial_bytes:
        return size
    return f"{size} + {format_bytes(row.partial_bytes)} unfinished".removeprefix(" + ")


def total_text(row: ModelRow) -> str:
    """Return the bytes of a model and of what is packed of it; "" where nothing is packed."""
    return format_bytes(row.total_bytes) if row.packed and row.size_bytes else ""


def source_text(row: ModelRow) -> str:
    """Return where a model is from, or who keeps it."""
    own = {"installed": "built in", "folder": "a folder of yours", "file": "a file of yours"}
    return row.store or row.repo or own.get(row.state, "")


def licence_text(licence: str | None, *, gated: bool | None) -> str:
    return " ".join(filter(None, (licence, "(gated)" if gated else "")))


def _of_installed(model: InstalledModel) -> ModelRow:
    return ModelRow(
        name=model.name,
        state=model.state,
        repo=model.repo,
        revision=model.revision,
        directory=str(model.directory) if model.directory and not model.gguf else None,
        size_bytes=model.size_bytes if model.directory else None,
        partial_bytes=model.partial_bytes,
        packed=model.packed,
        model_type=model.model_type,
        file=str(model.gguf) if model.gguf else None,
        store=model.store,
        **(_registered(model.entry) if model.entry else {}),
    )


def _registered(entry: ModelEntry) -> dict[str, Any]:
    names = ("aliases", "licence", "gated", "context", "parameters", "download_bytes")
    return {name: getattr(entry, name) for name in names}


# One model


def model_facts(model: ModelDescription) -> dict[str, Any]:
    """Return the facts of `localllm show --json`. Raises CheckpointError for a checkpoint's defaults out of range."""
    entry, state = model.entry, "orphan" if model.packed and model.entry is None else "available"
    if model.files or model.partial_bytes:
        state = "installed" if model.files else "partial"
    return {
        "name": model.name,
        "state": state,
        "repo": model.repo,
        "revision": model.revision if model.repo else None,
        "directory": str(model.files.directory) if model.files and not model.files.gguf else None,
        "file": str(model.files.gguf) if model.files and model.files.gguf else None,
        "size_bytes": model.size_bytes if model.files else None,
        "partial_bytes": model.partial_bytes,
        "packed": packed_fields(model.packed),
        "model_type": model.model_type,
        "left_out": list(model.left_out),
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


# What a deletion would free


def freed_by(row: ModelRow) -> tuple[int, int]:
    """Bytes of the model's files, 0 where they are not to be deleted, and of what is packed of it. Reads the disk.

    Raises what `hub.removal` does where nothing of it can be deleted.
    """
    from localllm import hub

    try:
        found = hub.removal(row.name)
    except LocalLLMError:
        if not row.packed:
            raise
        found = hub.removal(row.name, packed_only=True)
    return found.checkpoint_bytes, found.packed_bytes
