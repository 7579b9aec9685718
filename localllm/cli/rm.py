"""`localllm rm`: deletes a model's files from the cache."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.front import front_of
from localllm.cli.output import SCHEMA_VERSION, format_bytes
from localllm.errors import UsageError


def rm_command(
    context: typer.Context,
    model: options.InstalledModel,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: schema_version, model, freed_bytes.")
    ] = False,
) -> None:
    """Delete a model from the download cache.

    Finished files and unfinished ones; the built-in model and folders of your own are left alone.
    """
    from localllm import hub

    output = front_of(context).output
    if not yes:
        _ask(context, model)
    freed_bytes = hub.remove(model)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "model": model, "freed_bytes": freed_bytes})
    else:
        output.line(f"removed {model}: {format_bytes(freed_bytes)} freed")


def _ask(context: typer.Context, model: str) -> None:
    """Raises UsageError where nobody can be asked, and leaves where the answer is no."""
    from localllm import hub
    from localllm.registry import BUILT_IN

    output = front_of(context).output
    if model.casefold() == BUILT_IN:
        return  # it is refused anyway
    described = hub.describe(model)
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"nobody can be asked whether to delete {model}",
            why="standard input is no terminal",
            fix=f"localllm rm {model} --yes",
        )
    size = format_bytes(described.size_bytes + described.partial_bytes)
    output.prompt(f"Delete {model} ({size})? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        output.note("nothing was deleted")
        raise typer.Exit(1)
