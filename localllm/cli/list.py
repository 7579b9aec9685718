"""`localllm list`: the models on this disk, and those that can be had."""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.output import SCHEMA_VERSION
from localllm.runtime.model_catalog import ModelRow, licence_text, model_rows, packed_text, row_fields, size_text


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
    output = cli_context(context).output
    rows = model_rows(has_available=everything)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "models": [row_fields(row) for row in rows]}, indent=2)
        return
    if not rows:
        output.note("no model is on this disk; `localllm list --all` shows what can be pulled")
        return
    header = ("NAME", "STATE", "PARAMETERS", "SIZE", "PACKED", "CONTEXT", "LICENCE", "FROM")
    output.table(header, [_cells(row) for row in rows], optional=("FROM", "LICENCE", "CONTEXT", "PARAMETERS"))
    if any(packed.state == "orphan" for row in rows for packed in row.packed):
        output.note("orphan: its checkpoint is gone or has changed; `localllm rm NAME --packed` frees the space")


def _cells(row: ModelRow) -> tuple[str, ...]:
    source = row.repo or {"installed": "built in", "folder": "a folder of yours"}.get(row.state, "")
    parameters = f"{row.parameters:g}B" if row.parameters else ""
    packed = ", ".join(packed_text(packed) for packed in row.packed)
    context = str(row.context or "")
    return row.name, row.state, parameters, size_text(row), packed, context, licence_text(row), source
