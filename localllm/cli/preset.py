"""`localllm preset`: models with a system message and settings under names of the user's; `create`: of a Modelfile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from localllm.cli import options
from localllm.cli.adapters import lasting_adapter
from localllm.cli.app import PlainCommand, plain_group
from localllm.cli.context import cli_context
from localllm.cli.options import argument, complete_models, complete_presets, option, setting_flags, takes
from localllm.cli.output import SCHEMA_VERSION, Output
from localllm.cli.prompt import argument_text, read_input
from localllm.config import accepted, load_settings
from localllm.errors import LocalLLMError
from localllm.present import is_there
from localllm.runtime.modelfile import parse_modelfile
from localllm.runtime.presets import (
    PRESET_SETTINGS,
    Preset,
    based_on,
    delete_preset,
    find_preset,
    get_preset,
    is_preset,
    preset_names,
    save_preset,
)

_PRESET = "Preset"  # a heading of the help
_SAVE_EXAMPLES = """Examples:

\b
  localllm preset save mario -s "You are Mario." --temperature 0.7
  localllm preset save reviewer --model qwen3-8b -s @review.md --ctx 32768
"""
CREATE_EXAMPLES = """Examples:

\b
  localllm create mario -f Modelfile
  printf 'FROM tiny\\nSYSTEM You tell tales of owls.\\n' | localllm create owls -f -
"""
preset_app = plain_group("preset", "Save and list presets: a model, a system message and settings under one name.")

_NAME = argument("name", "NAME", "The preset.", completion=complete_presets, required=True)
_NEW = argument("name", "NAME", "The preset's name, by which `run`, `chat` and `serve` find it.", required=True)


@preset_app.command("save", cls=PlainCommand, epilog=_SAVE_EXAMPLES)
@takes(
    _NEW,
    option(
        "--model",
        "The model, or a preset whose settings are taken over. Default: the setting `model` (tiny).",
        "MODEL",
        completion=complete_models,
        group=_PRESET,
        is_basic=True,
    ),
    option("-s --system", "The system message; @FILE: the text of a file.", "TEXT", group=_PRESET, is_basic=True),
    *(name for name in PRESET_SETTINGS if name not in ("model", "system")),
    option("--replace", "Replace the preset of that name.", group=_PRESET, is_basic=True),
)
def keep(context: typer.Context, name: str, replace: bool, **flags: Any) -> None:
    """Save a preset.

    `localllm run NAME` then is `localllm run MODEL` with these flags, of which each may still be typed.
    """
    output = cli_context(context).output
    if flags["system"] is not None:
        flags["system"] = _system(flags["system"], output)
    typed = {key: value for key, value in setting_flags(flags).items() if value is not None}
    values = {key: accepted(key, value, options.flag_of(key)) for key, value in typed.items()}
    if adapters := values.get("adapter"):
        values["adapter"] = tuple(lasting_adapter(word) for word in adapters)
    word = load_settings().settings.model if flags["model"] is None else flags["model"]
    path = save_preset(name, based_on(word, values), replaces=replace)
    output.line(f"{path.stem}: {path}")


@preset_app.command("list", cls=PlainCommand)
@takes(options.AS_JSON)
def list_presets(context: typer.Context, as_json: bool) -> None:
    """List the presets."""
    output = cli_context(context).output
    found = []
    for name in preset_names():
        try:
            preset = find_preset(name)
        except LocalLLMError as error:  # of one file; the others are listed
            output.warn(f"{error.what}: {error.why}")
            continue
        found += [preset] if preset is not None else []
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "presets": list(map(_fields, found))}, indent=2)
        return
    output.table(("NAME", "MODEL", "SETTINGS"), [(each.name, each.model, _summary(each)) for each in found])
    if not found:
        output.note("`localllm preset save NAME --system TEXT` saves one")


@preset_app.command("show", cls=PlainCommand)
@takes(_NAME, options.AS_JSON)
def print_preset(context: typer.Context, name: str, as_json: bool) -> None:
    """Print the settings of a preset."""
    output, preset = cli_context(context).output, get_preset(name)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, **_fields(preset)}, indent=2)
        return
    output.table(("SETTING", "VALUE"), [("model", preset.model), *preset.shown().items()])
    output.note(f"its file: {preset.path}")


@preset_app.command("rm", cls=PlainCommand)
@takes(_NAME, options.UNASKED)
def delete(context: typer.Context, name: str, yes: bool) -> None:
    """Delete a preset. Its model and chats stay."""
    cli = cli_context(context)
    if not yes and is_preset(name):
        cli.ask_to_delete(f"the preset {name}", f"localllm preset rm {name} --yes")
    delete_preset(name)
    cli.output.line(f"removed {name}")


@takes(
    _NEW,
    option("-f --file", "The Modelfile; -: stdin. Default: Modelfile, in this folder.", "FILE", Path),
)
def create_command(context: typer.Context, name: str, file: Path | None) -> None:
    """Make a preset of Ollama's Modelfile.

    FROM, ADAPTER, SYSTEM and PARAMETER make the preset, which replaces one of the same name. TEMPLATE, and messages of
    a user or an assistant, are refused. Nothing is copied: the preset names the model.
    """
    output, path = cli_context(context).output, file or Path("Modelfile")
    found = parse_modelfile(read_input(path, "--file", output), str(path))
    folder = Path() if str(path) == "-" else path.parent
    there = is_preset(name)
    if adapters := found.values.get("adapter"):
        found.values["adapter"] = tuple(lasting_adapter(word, folder) for word in adapters)
    saved = save_preset(name, based_on(_base(found.base, folder), found.values), replaces=True)
    if there:
        output.note(f"in place of the preset {saved.stem} that was there")
    if found.idle:
        output.note(f"left out, as a preset has no place for it: {', '.join(dict.fromkeys(found.idle))}")
    output.line(f"{saved.stem}: {saved}")


def _base(word: str, folder: Path) -> str:
    """A path in a Modelfile begins at the file's folder; any other word is a name."""
    is_path = word.startswith(("./", "../")) or (word.casefold().endswith(".gguf") and not word.startswith(("/", "~")))
    path = folder.absolute() / word
    return str(path) if is_path and is_there(path) else word


def _system(text: str, output: Output) -> str:
    if not text.startswith("@"):
        return argument_text(text, "--system")
    return read_input(Path(text[1:]), "--system", output).rstrip("\n")


def _fields(preset: Preset) -> Mapping[str, Any]:
    settings = {name: value for name, value in preset.values.items() if name != "model"}
    return {"name": preset.name, "file": str(preset.path), "model": preset.model, "settings": settings}


def _summary(preset: Preset) -> str:
    return ", ".join(f"{name} = {_short(text)}" for name, text in preset.shown().items())


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:39]}…"
