"""`localllm rm`: deletes a model's files from the cache, and what was packed of it."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.confirm import ask_to_delete
from localllm.cli.context import cli_context
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import format_bytes


def rm_command(
    context: typer.Context,
    model: options.InstalledModel,
    packed: Annotated[
        bool, typer.Option("--packed", help="Only what was packed of it; also of a folder of yours, and of tiny.")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: schema_version, model, freed_bytes.")
    ] = False,
) -> None:
    """Delete a model from this disk.

    Its files in the download cache, finished and unfinished ones, and what was packed of it. The files of the built-in
    model and those in folders of your own are left alone.
    """
    from localllm import hub

    front = cli_context(context)

    def confirm(checkpoint_bytes: int, packed_bytes: int) -> None:
        if not yes:
            sizes = [] if packed else [format_bytes(checkpoint_bytes)]
            sizes += [f"{format_bytes(packed_bytes)} packed"] if packed or packed_bytes else []
            what = f"what is packed of {model}" if packed else model
            unasked = f"localllm rm {shlex.quote(model)}{' --packed' if packed else ''} --yes"
            ask_to_delete(front, f"{what} ({', '.join(sizes)})", unasked)

    freed_bytes = hub.remove(model, packed_only=packed, confirm=confirm)
    if as_json:
        front.output.json({"schema_version": SCHEMA_VERSION, "model": model, "freed_bytes": freed_bytes})
    else:
        what = f"what was packed of {model}" if packed else model
        front.output.line(f"removed {what}: {format_bytes(freed_bytes)} freed")
