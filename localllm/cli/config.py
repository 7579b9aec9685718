"""`localllm config`: the settings in force, and who set them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.commands import PlainCommand, plain_group
from localllm.cli.context import cli_context
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import load_settings, shown_setting, user_directories

config_app = plain_group("config")


@config_app.callback(invoke_without_command=True)
def config(context: typer.Context) -> None:
    """Show the settings."""
    if context.invoked_subcommand is None:
        cli_context(context).output.line(context.get_help())


@config_app.command("show", cls=PlainCommand)
def show_settings(
    context: typer.Context,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also who set each: file and line, variable, or default.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print every setting and its value.

    One that is `-` is left to the model.
    """
    output = cli_context(context).output
    resolved = load_settings()
    values = asdict(resolved.settings)
    origins = {name: resolved.origins[name].where for name in values}
    file = str(user_directories().config / "config.toml")
    if as_json:
        fields = {name: {"value": value, "origin": origins[name]} for name, value in values.items()}
        output.json({"schema_version": SCHEMA_VERSION, "file": file, "settings": fields}, indent=2)
        return
    rows = [(name, shown_setting(value), *([origins[name]] if origin else [])) for name, value in values.items()]
    output.table(("SETTING", "VALUE", *(["ORIGIN"] if origin else [])), rows)
    output.note(f"settings file: {file}")
