"""`localllm search`: models by words, among those with a short name and on the hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.models import print_choices
from localllm.cli.options import argument, takes
from localllm.cli.output import SCHEMA_VERSION, Output
from localllm.config import load_settings
from localllm.errors import DownloadError, Fix
from localllm.runtime.model_catalog import licence_text, model_rows, parameters_text
from localllm.runtime.model_choice import choice_fields, model_choices

if TYPE_CHECKING:
    from localllm.config import ResolvedSettings
    from localllm.hub.search import FoundModel

SEARCH_EXAMPLES = """Examples:

\b
  localllm search qwen3 coder
  localllm search gemma gguf
"""
_TITLES = ("ON THE HUB", "PARAMETERS", "PULLS", "LICENCE", "RUNS HERE")


@takes(
    argument("words", "WORDS...", "Words that the model's name has in it.", list[str], required=True),
    "offline",
    options.AS_JSON,
)
def search_command(context: typer.Context, words: list[str], offline: bool | None, as_json: bool) -> None:
    """Search for models by name, also on the Hugging Face hub.

    Models with a short name come first, with how each would run here.
    """
    cli = cli_context(context)
    output, resolved = cli.output, load_settings({"offline": offline})
    cli.resolved = resolved
    words = " ".join(words).split()
    rows = [row for row in model_rows(has_available=True) if row.matches(words) and row.state != "orphan"]
    with output.progress("planning") as line:
        choices = model_choices(rows, resolved, line.show)
    if not as_json and choices:
        print_choices(output, choices)
        output.line()
    elif not as_json:
        output.note(f"no short name has {' '.join(words)!r} in it")
    found = _on_hub(output, " ".join(words), resolved)
    if as_json:
        known = [choice_fields(choice) for choice in choices]
        on_hub = None if found is None else [asdict(model) for model in found]
        output.json({"schema_version": SCHEMA_VERSION, "known": known, "hub": on_hub}, indent=2)
    elif found:
        output.table(_TITLES, map(_cells, found), optional=("LICENCE", "PULLS"), numbers=("PARAMETERS", "PULLS"))
        output.note("pull one by its name: localllm pull ORG/REPOSITORY, of GGUF files with :QUANT (Q4_K_M) behind it")
        if any(model.adapter_of for model in found):
            output.note("with MODEL: an adapter for it, used by localllm run MODEL --adapter ORG/REPOSITORY")
    elif found is not None:
        output.note(f"the hub has no model with {' '.join(words)!r} in its name")


def _on_hub(output: Output, words: str, resolved: ResolvedSettings) -> list[FoundModel] | None:
    """Return the models on the hub; None where it is not asked, which is said."""
    from localllm.hub.search import search_hub
    from localllm.hub.settings import HubSettings

    hub = HubSettings.from_environment(offline=resolved.settings.offline)
    if hub.offline:
        where = resolved.origins["offline"].where if resolved.settings.offline else "HF_HUB_OFFLINE"
        output.note(f"the hub was not asked: offline ({where})")
        return None
    try:
        with output.progress("asking the hub") as line:
            return search_hub(words, hub, line.show)
    except DownloadError as error:
        error.fix = [*error.fixes, Fix.flag("--offline")]
        raise


def _cells(model: FoundModel) -> tuple[str, ...]:
    kind = "GGUF" if model.is_gguf else model.architecture
    runs = f"no: {model.why_not}" if model.why_not else f"with {model.adapter_of}" if model.adapter_of else kind
    parameters, licence = parameters_text(model.parameters), licence_text(model.licence, gated=model.gated)
    return model.repo, parameters, _counted(model.downloads), licence, runs


def _counted(count: int) -> str:
    """Return a number of pulls in few characters: 950, 12k, 3.4M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 10 * size else f"{count // size}{unit}"
    return str(count)
