"""`localllm list`: the models on this disk, and those that can be had."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.front import front_of
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import format_bytes

if TYPE_CHECKING:
    from localllm.hub import InstalledModel, PackedWeights
    from localllm.registry import ModelEntry


def list_command(
    context: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the models known by a short name, which can be pulled.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the models on this disk.

    With their sizes, what was only partly fetched, and what is packed of each: everything that takes space.
    """
    from localllm import hub
    from localllm.registry import load_registry

    output = front_of(context).output
    rows = [_of_installed(model) for model in hub.list_models()]
    if everything:
        here = {row["name"] for row in rows}
        rows += [_of_entry(entry) for entry in load_registry().entries if entry.name not in here]
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "models": rows}, indent=2)
        return
    if not rows:
        output.note("no model is on this disk; `localllm list --all` shows what can be pulled")
        return
    header = ("NAME", "STATE", "PARAMETERS", "SIZE", "PACKED", "CONTEXT", "LICENCE", "FROM")
    output.table(header, [_cells(row) for row in rows], optional=("FROM", "LICENCE", "CONTEXT", "PARAMETERS"))
    if any(packed["state"] == "orphan" for row in rows for packed in row["packed"]):
        output.note("orphan: its checkpoint is gone or has changed; `localllm rm NAME --packed` frees the space")


def _of_installed(model: InstalledModel) -> dict[str, Any]:
    entry = model.entry
    return {
        "name": model.name,
        "state": model.state,
        "repo": model.repo,
        "revision": model.revision,
        "directory": str(model.directory) if model.directory else None,
        "size_bytes": model.size_bytes if model.directory else None,
        "partial_bytes": model.partial_bytes,
        "packed": packed_fields(model.packed),
        "model_type": model.model_type,
        "aliases": list(entry.aliases) if entry else [],
        "licence": entry.licence if entry else None,
        "gated": entry.gated if entry else None,
        "context": entry.context if entry else None,
        "parameters": entry.parameters if entry else None,
    }


def packed_fields(models: Iterable[PackedWeights]) -> list[dict[str, Any]]:
    """Packed models as the JSON of `list` and `show` has them."""
    names = ("weights", "size_bytes", "state")
    return [{**{name: getattr(model, name) for name in names}, "directory": str(model.directory)} for model in models]


def packed_text(packed: dict[str, Any]) -> str:
    """One packed model in a table: "int4-g64 3.9 GiB"."""
    note = "" if packed["state"] == "whole" else f" ({packed['state']})"
    return f"{packed['weights']} {format_bytes(packed['size_bytes'])}{note}"


def _of_entry(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "state": "available",
        "repo": entry.repo,
        "revision": entry.revision,
        "directory": None,
        "size_bytes": None,
        "partial_bytes": 0,
        "packed": [],
        "model_type": None,
        "aliases": list(entry.aliases),
        "licence": entry.licence,
        "gated": entry.gated,
        "context": entry.context,
        "parameters": entry.parameters,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size = format_bytes(row["size_bytes"]) if row["size_bytes"] else ""
    if row["partial_bytes"]:
        size = f"{size} + {format_bytes(row['partial_bytes'])} unfinished".removeprefix(" + ")
    licence = f"{row['licence'] or ''}{' (gated)' if row['gated'] else ''}"
    source = row["repo"] or {"installed": "built in", "folder": "a folder of yours"}.get(row["state"], "")
    parameters = f"{row['parameters']:g}B" if row["parameters"] else ""
    packed = ", ".join(packed_text(packed) for packed in row["packed"])
    return (row["name"], row["state"], parameters, size, packed, str(row["context"] or ""), licence, source)
