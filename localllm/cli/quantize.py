"""`localllm quantize`: packs a model ahead of time, so that its first use need not wait."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.load_progress import PackingProgress
from localllm.cli.options import choice, completion_of, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.selection import select
from localllm.config import accepted, format_bytes
from localllm.errors import Fix, UsageError
from localllm.settings import WEIGHTS, Accepts

if TYPE_CHECKING:
    from localllm.hub import ModelFiles
    from localllm.quant.layouts import Sizes

QUANTIZE_EXAMPLES = """Examples:

\b
  localllm quantize mistral-7b
  localllm quantize qwen3-8b --weights int4 --group 32
  localllm quantize /a/folder/of/mine --weights int8 --json
"""
_DEFAULT_GROUP = 64
_UNPACKED = ("auto", "bf16")
_PACKED = Accepts("text", choices=tuple(name for name in WEIGHTS if name not in _UNPACKED), prefix="kept-")


@takes(
    options.REQUIRED_MODEL,
    option(
        "--weights",
        "The format. kept: the codes of a checkpoint that is quantized already. Default: the setting `weights` if it "
        "names one of these, else kept where there are codes, else int4.",
        "int4|int8|nf4|bf12|kept",
        completion=completion_of(_PACKED),
    ),
    option(
        "--group",
        "int4: number of weights that share a scale. Smaller groups are more exact and take more space. Default: 64.",
        "32|64|128",
        int,
        accepts=Accepts("text", choices=("32", "64", "128")),
    ),
    choice(
        "--method",
        "int4: hqq (half-quadratic) is more exact, rtn (round to nearest) is quicker. Default: hqq.",
        "hqq",
        "rtn",
    ),
    option("--ram", "Memory limit of this process, such as 2GiB.", "SIZE"),
    options.AS_JSON,
)
def quantize_command(context: typer.Context, **flags: Any) -> None:
    """Pack a model's weights ahead of time.

    `run` and `chat` do this on first use. An interrupted conversion resumes.
    """
    from localllm import hub
    from localllm.hub.packed import own_bytes, packed_directory, packed_recipes

    cli = cli_context(context)
    weights = flags["weights"]
    if weights is not None and weights not in WEIGHTS and not weights.startswith(_PACKED.prefix):
        accepted("weights", weights, "--weights", _PACKED)
    selection = select(cli, flags["model"], flags)
    files = selection.files
    recipe = _sizes(files, recipe_name(weights, selection.settings.weights, flags["group"], flags["method"]))
    name = recipe.name
    target = packed_directory(files, name)
    was_there = name in packed_recipes(files)
    was_packed = not _convert(cli, files, recipe, selection.settings.ram, was_there=was_there)
    sizes = {"size_bytes": own_bytes(target), "checkpoint_bytes": hub.describe(selection.model_name).size_bytes}
    if flags["as_json"]:
        fields = {"model": files.name, "weights": name, "was_packed": was_packed, "directory": str(target)}
        cli.output.json({"schema_version": SCHEMA_VERSION, **fields, **sizes})
        return
    packed, checkpoint = (format_bytes(count) for count in sizes.values())
    if was_packed:
        done = "was packed already, and is whole"
    else:
        done = "was damaged, or packed by another version, and is mended" if was_there else "is packed"
    cli.output.line(f"{files.name} {done}: {name}, {packed}, of a checkpoint of {checkpoint}, in {target}")


def recipe_name(weights: str | None, setting: str, group: int | None, method: str | None) -> str:
    """The format that these flags name: "int4", 32, "rtn" -> "int4-g32-rtn"; "auto" where nothing names one. Raises
    UsageError."""
    if weights == "bf16":
        why = "it is what checkpoints hold, and is read from there as it is: a copy would gain nothing"
        raise UsageError("bf16 is not packed", why=why, fix=Fix.flag("--weights", "int4"))
    flag = "--group" if group is not None else "--method" if method is not None else ""
    asked = weights or ("int4" if flag else setting)
    if asked == "auto":
        return asked
    if asked in ("int4", *_UNPACKED):
        return f"int4-g{group or _DEFAULT_GROUP}{'-rtn' if method == 'rtn' else ''}"
    if flag:
        named = asked.startswith("int4-")
        why = f"{asked} says both already" if named else f"{asked} has neither groups to choose nor a calibration"
        raise UsageError(f"{flag} and --weights {asked} cannot go together", why=why, fix=Fix.flag("--weights", "int4"))
    return asked


def _sizes(files: ModelFiles, name: str) -> Sizes:
    """Return the recipe of this name: of "auto" what the checkpoint is in, else INT4, however small the model is."""
    from localllm.engine.weights import choose_weights, codes_to_keep
    from localllm.models.families import load_config

    config = load_config(files.directory)  # a model that cannot run is refused before torch's second is spent
    if name == "auto":
        return codes_to_keep(files, config) or choose_weights("int4", files, config)
    return choose_weights(name, files, config)


def _convert(cli: CliContext, files: ModelFiles, sizes: Sizes, ram_bytes: int | None, *, was_there: bool) -> bool:
    """Makes the packed model, or verifies the one that is there and mends it; returns whether anything was written."""
    from localllm.hub.packed import packed_directory

    name = sizes.name
    target = packed_directory(files, name)
    label = f"packing {files.name} to {name}"
    if was_there:
        cli.output.note(f"{files.name} is packed to {name} already; verifying it")
        label = f"verifying {files.name} in {name}"
    again = f"localllm quantize {shlex.quote(files.name)} --weights {sizes.flag}"
    packing = PackingProgress(cli, label, again=again, is_first_use=False)
    packing.begin()
    try:
        from localllm.engine.weights import pack_model
        from localllm.quant.recipe import recipe_of

        weights = recipe_of(sizes)
        before = _last_written(target)
        pack_model(files, weights, packing.update, packing.wait, ram_bytes)
    finally:
        packing.leave()
    cli.interrupts.farewell = ""
    return _last_written(target) != before


def _last_written(target: Path) -> tuple[int, int] | None:
    """Return the identity of the index file: it changes with everything that is made or mended."""
    from localllm.hub.packed import PACKED_INDEX

    try:
        state = (target / PACKED_INDEX).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns
