"""`localllm config`: the settings in force, and who set them."""

from __future__ import annotations

from dataclasses import asdict

import typer

from localllm.cli import options
from localllm.cli.app import PlainCommand, plain_group
from localllm.cli.context import cli_context
from localllm.cli.options import option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import load_settings, shown_setting, user_directories

config_app = plain_group("config", "Show the settings.")


@config_app.command("show", cls=PlainCommand)
@takes(
    option("--origin", "Also show where each value comes from: file and line, variable, or default."), options.AS_JSON
)
def show_settings(context: typer.Context, origin: bool, as_json: bool) -> None:
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
