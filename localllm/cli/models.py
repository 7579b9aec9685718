"""`localllm pull`, `list`, `show` and `rm`: the models on this disk, and those that can be had."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.adapters import print_pulled
from localllm.cli.context import cli_context
from localllm.cli.options import argument, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.pulling import pull, pull_adapter
from localllm.cli.selection import select_text_only
from localllm.config import format_bytes, load_settings
from localllm.errors import Fix, UsageError
from localllm.offload.planner.profile import kept_profile
from localllm.runtime.fit_check import machine_line
from localllm.runtime.model_catalog import (
    ModelRow,
    fact_lines,
    licence_text,
    model_facts,
    model_rows,
    packed_text,
    parameters_text,
    row_fields,
    size_text,
    source_text,
    total_text,
)
from localllm.runtime.model_choice import (
    CHOICE_NUMBERS,
    CHOICE_TITLES,
    ModelChoice,
    best_of,
    choice_cells,
    choice_fields,
    model_choices,
)
from localllm.runtime.presets import find_preset, is_preset, model_of, preset_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.cli.output import Output

PULL_EXAMPLES = """Examples:

\b
  localllm pull mistral-7b
  localllm pull HuggingFaceTB/SmolLM2-135M-Instruct
  localllm pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
  HF_TOKEN=hf_... localllm pull gemma2-2b
"""


@takes(options.REQUIRED_MODEL, "offline", options.AS_JSON)
def pull_command(context: typer.Context, **flags: Any) -> None:
    """Download a model or an adapter from the Hugging Face hub.

    An interrupted download resumes. ORG/REPOSITORY:QUANT downloads the GGUF files of one quantization alone.
    """
    from localllm.hub.adapter_files import NamesAdapterError
    from localllm.hub.gguf_files import gguf_bytes
    from localllm.hub.installed import folder_bytes

    cli, model = cli_context(context), model_of(flags["model"])
    resolved = load_settings({"offline": flags["offline"]})
    try:
        files = pull(cli, model, resolved)
    except NamesAdapterError:
        print_pulled(cli.output, pull_adapter(cli, model, resolved), as_json=flags["as_json"])
        return
    size_bytes = gguf_bytes(files.gguf) if files.gguf else folder_bytes(files.directory)
    if flags["as_json"]:
        fields = {"model": files.name, "repo": files.repo, "revision": files.revision}
        where = {"file": str(files.gguf)} if files.gguf else {"directory": str(files.directory)}
        cli.output.json({"schema_version": SCHEMA_VERSION, **fields, **where, "size_bytes": size_bytes})
    else:
        cli.output.line(f"{files.name}: {format_bytes(size_bytes)} in {files.gguf or files.directory}")


@takes(
    option("--all", "Also list the models that can be pulled, with how each would run here.", name="everything"),
    options.AS_JSON,
)
def list_command(context: typer.Context, everything: bool, as_json: bool) -> None:
    """List the models on this disk.

    Shows everything that takes space: complete models, unfinished downloads and packed weights, with their sizes, and
    what Ollama, LM Studio and llama.cpp keep. `localllm plan NAME` tells how fast one would be, before a download.
    """
    from localllm.hub.adapters import list_adapters

    output = cli_context(context).output
    if everything:
        _list_choices(output, as_json=as_json)
        return
    rows = model_rows(has_available=False)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "models": [row_fields(row) for row in rows]}, indent=2)
        return
    header = ("NAME", "STATE", "PARAMETERS", "SIZE", "PACKED", "TOTAL", "CONTEXT", "LICENCE", "FROM")
    optional = ("LICENCE", "FROM", "CONTEXT", "PARAMETERS", "TOTAL")
    output.table(header, [_cells(row) for row in rows], optional=optional)
    if all(row.repo is None and not row.store for row in rows):
        output.note("`localllm list --all`: what can be pulled, and how fast it would be here")
    if adapters := [adapter.name for adapter in list_adapters()]:
        output.note(f"adapters: {', '.join(adapters)}; `localllm adapters` shows them")
    if presets := preset_names():
        output.note(f"presets: {', '.join(presets)}; `localllm preset list` shows them")
    if any(packed.state == "orphan" for row in rows for packed in row.packed):
        output.note("orphan: its checkpoint is gone or has changed; `localllm rm NAME --packed` frees the space")


def _cells(row: ModelRow) -> tuple[str, ...]:
    packed = ", ".join(packed_text(packed) for packed in row.packed)
    sizes = parameters_text(row.parameters), size_text(row), packed, total_text(row), str(row.context or "")
    return row.name, row.state, *sizes, licence_text(row.licence, gated=row.gated), source_text(row)


def _list_choices(output: Output, *, as_json: bool) -> None:
    """Print every model that is here or can be had, the one that suits this machine best first."""
    with output.progress("planning") as line:
        rows = [row for row in model_rows(has_available=True) if row.state != "orphan"]
        choices = model_choices(rows, load_settings(), line.show)
    if as_json:
        models = [choice_fields(choice) for choice in choices]
        output.json({"schema_version": SCHEMA_VERSION, "models": models}, indent=2)
        return
    print_choices(output, choices)


def print_choices(output: Output, choices: Sequence[ModelChoice]) -> None:
    """Print models as a table, with a star at the one to try first."""
    best = best_of(choices)
    cells = [choice_cells(choice, is_best=choice is best) for choice in choices]
    output.table(CHOICE_TITLES, cells, optional=("CONTEXT", "LICENCE"), numbers=CHOICE_NUMBERS)
    output.note(f"MEMORY: of the weights, packed. TOK/S: about, on this machine. {machine_line()}")
    if kept_profile().busy:
        output.note("it was measured while it was busy, and may be faster; localllm doctor --measure measures it anew")
    if best is not None:
        output.note(f"* the largest that answers faster than you read: localllm chat {best.row.name}")


@takes(
    options.REQUIRED_MODEL,
    option("--template", "Print the chat template and nothing else."),
    options.AS_JSON,
)
def show_command(context: typer.Context, model: str, template: bool, as_json: bool) -> None:
    """Show the details of one model.

    Its folder, size, packed weights, architecture, context, licence and sampling defaults. Does not use the network.
    """
    from localllm import hub

    cli = cli_context(context)
    output = cli.output
    if template:
        from localllm.text.chat_template import ChatTemplate

        sources = ChatTemplate.load(select_text_only(cli, model, {}).files.directory).sources
        named = [source if len(sources) == 1 else f"--- {name} ---\n{source}" for name, source in sources.items()]
        text = "\n".join(named)
        if as_json:
            output.json({"schema_version": SCHEMA_VERSION, "model": model, "template": text})
        else:
            output.verbatim(text if text.endswith("\n") else f"{text}\n")
        return
    preset = find_preset(model)
    description = hub.describe(model if preset is None else preset.model)
    if as_json:
        asked = {} if preset is None else {"preset": preset.name}
        output.json({"schema_version": SCHEMA_VERSION, **asked, **model_facts(description)}, indent=2)
        return
    if preset is not None:
        output.line(f"{'preset':<16}  {preset.name}, whose settings `localllm preset show {preset.name}` has")
    for label, text in fact_lines(description):
        output.line(f"{label:<16}  {text}")


@takes(
    argument(
        "model",
        "MODEL",
        "A name of `localllm list` or `localllm adapters`.",
        completion=options.complete_removable,
        required=True,
    ),
    option("--packed", "Delete only its packed weights; also works for what is not downloaded, and for tiny."),
    options.UNASKED,
    option("--json", "One JSON object: schema_version, model, freed_bytes.", name="as_json"),
)
def rm_command(context: typer.Context, model: str, packed: bool, yes: bool, as_json: bool) -> None:
    """Delete a model or an adapter from this disk.

    Deletes its downloaded files, unfinished downloads and packed weights; of ORG/REPOSITORY:QUANT those GGUF files. The
    built-in model, your own files and those that other programs keep are not touched.
    """
    from localllm import hub

    cli = cli_context(context)
    if is_preset(model) and not packed:
        why = "`rm` deletes models"
        raise UsageError(f"{model} is a preset", why=why, fix=Fix.command("preset", "rm", model))
    found = hub.removal(model_of(model), packed_only=packed)
    if not yes:
        sizes = [] if packed else [format_bytes(found.checkpoint_bytes)]
        sizes += [f"{format_bytes(found.packed_bytes)} packed"] if packed or found.packed_bytes else []
        what = f"what is packed of {model}" if packed else model
        unasked = f"localllm rm {shlex.quote(model)}{' --packed' if packed else ''} --yes"
        cli.ask_to_delete(f"{what} ({', '.join(sizes)})", unasked)
    freed_bytes = found.delete()
    if as_json:
        cli.output.json({"schema_version": SCHEMA_VERSION, "model": model, "freed_bytes": freed_bytes})
    else:
        what = f"what was packed of {model}" if packed else model
        cli.output.line(f"removed {what}: {format_bytes(freed_bytes)} freed")
