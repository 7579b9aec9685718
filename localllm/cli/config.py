"""`localllm config`: the settings in force, who set them, and the file that keeps them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from localllm.cli import options
from localllm.cli.adapters import lasting_adapter
from localllm.cli.app import PlainCommand, plain_group
from localllm.cli.context import cli_context
from localllm.cli.options import argument, complete_setting, complete_setting_values, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.settings_file import SettingName, remove_setting, settings_path, write_setting
from localllm.config import ENVIRONMENT_PREFIX, load_settings, parsed_setting, shown_setting
from localllm.errors import Fix, SettingsError
from localllm.hub.names import understand
from localllm.registry import load_registry
from localllm.runtime.presets import is_preset
from localllm.settings import SETTINGS, Settings

config_app = plain_group("config", "Show and change the settings.")
_KEY = argument("key", "KEY", "A setting, such as ctx.", completion=complete_setting, required=True)


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
    file = str(settings_path())
    if as_json:
        fields = {name: {"value": value, "origin": origins[name]} for name, value in values.items()}
        output.json({"schema_version": SCHEMA_VERSION, "file": file, "settings": fields}, indent=2)
        return
    rows = [(name, shown_setting(value), *([origins[name]] if origin else [])) for name, value in values.items()]
    output.table(("SETTING", "VALUE", *(["ORIGIN"] if origin else [])), rows)
    output.note(f"settings file: {file}")


@config_app.command("get", cls=PlainCommand)
@takes(_KEY)
def get_setting(context: typer.Context, key: str) -> None:
    """Print the value of one setting.

    `-` is left to the model.
    """
    name = SettingName.of(key)
    value = getattr(load_settings().settings, name.key)
    cli_context(context).output.line(shown_setting(value.get(name.entry) if name.entry else value))


@config_app.command("set", cls=PlainCommand)
@takes(
    _KEY,
    argument(
        "values",
        "VALUE...",
        "Its value, as after its flag. Several for `stop` and `adapter`, one for all others.",
        list[str],
        completion=complete_setting_values,
        required=True,
    ),
)
def set_setting(context: typer.Context, key: str, values: Sequence[str]) -> None:
    """Write a setting into config.toml.

    It then holds for every command, unless a flag or a variable says otherwise. Comments and other lines of the file
    stay as they are. A value that begins with a hyphen stands behind `--`.
    """
    name = SettingName.of(key)
    value = _understood(name, values)
    _require_known(name.key, value)
    if name.key == "adapter":
        value = list(map(lasting_adapter, value))
    before = write_setting(name, value)
    output = cli_context(context).output
    output.line(f"{name} = {_shown(value)} (before: {_shown(before)})")
    output.note(f"written to {settings_path()}")
    _tell_override(context, name)


@config_app.command("unset", cls=PlainCommand)
@takes(_KEY)
def unset_setting(context: typer.Context, key: str) -> None:
    """Take a setting out of config.toml, so that its default holds."""
    name, before = remove_setting(key)
    output = cli_context(context).output
    if before is None:
        output.note(f"{name} is not set in {settings_path()}")
    else:
        default = getattr(Settings(), name, None)
        now = "the default holds" if default is None else f"the default is {shown_setting(default)}"
        output.line(f"{name} is no longer set (before: {_shown(before)}); {now}")
    if name in SETTINGS:
        _tell_override(context, SettingName(name))


@config_app.command("path", cls=PlainCommand)
@takes()
def print_path(context: typer.Context) -> None:
    """Print the path of config.toml, which need not exist."""
    cli_context(context).output.line(str(settings_path()))


def _understood(name: SettingName, words: Sequence[str]) -> Any:
    """Return the value of a setting that the words mean, as the file has it. Raises SettingsError."""
    accepts, text = SETTINGS[name.key].accepts, " ".join(words)
    if accepts.kind == "texts":
        value: Any = list(words)
    elif len(words) > 1:
        fix = Fix.command("config", "set", name, text)
        raise SettingsError(f"{name} takes one value", why=f"{len(words)} words are given", fix=fix)
    else:
        value = text if name.entry else parsed_setting(name.key, text)
    if not accepts.allows({name.entry: value} if name.entry else value):
        likeliest = accepts.likeliest(text)
        fix = Fix.command("config", "set", name, likeliest) if likeliest else Fix.command("config", "unset", name)
        raise SettingsError(f"{name} cannot be {text[:80]!r}", why=f"it must be {accepts.describe()}", fix=fix)
    return value


def _require_known(key: str, value: Any) -> None:
    """Raise ModelNotFoundError or SettingsError for a model or a theme that there is not."""
    if key == "model" and not is_preset(value):
        understand(value, load_registry())
    if key == "theme":
        from localllm.tui.key_scopes import nearest_theme  # which needs textual

        if (nearest := nearest_theme(value)) != value:
            fix = Fix.word(value, nearest)
            raise SettingsError(f"there is no theme {value[:80]!r}", why=f"the nearest is {nearest!r}", fix=fix)


def _shown(value: Any) -> str:
    return "not set" if value is None else shown_setting(tuple(value) if isinstance(value, list) else value)


def _tell_override(context: typer.Context, name: SettingName) -> None:
    """Warns where a variable of this shell hides the file's value."""
    variable = f"{ENVIRONMENT_PREFIX}{name.key.upper()}"
    if text := os.environ.get(variable):
        line = f"{variable}={shlex.quote(text)}"
        cli_context(context).output.warn(f"{line} in the environment overrides the file; `unset {variable}` ends that")
