"""`localllm adapters`: the adapters (LoRA) on this disk, and how one is used."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.options import argument, complete_installed, takes
from localllm.cli.output import SCHEMA_VERSION, Output
from localllm.config import format_bytes
from localllm.present import is_file
from localllm.registry import load_registry
from localllm.runtime.presets import model_of

if TYPE_CHECKING:
    from localllm.hub.adapters import AdapterFiles

ADAPTERS_EXAMPLES = """Examples:

\b
  localllm adapters
  localllm adapters qwen3-8b
  localllm adapters --json
"""
_HERE = Path()
_TITLES = ("NAME", "FOR", "RANK", "SIZE", "FROM")
_NO_USE = "cannot be used"


@takes(
    argument("base", "BASE", "Only those for this model, whatever its format.", completion=complete_installed),
    options.AS_JSON,
)
def adapters_command(context: typer.Context, base: str | None, as_json: bool) -> None:
    """List the adapters (LoRA) on this disk.

    `localllm run BASE --adapter NAME` uses one with the model that it changes, `localllm pull` downloads one. Your own,
    folders of PEFT's and GGUF files, are named by their paths and not listed.
    """
    from localllm.hub.adapters import is_for, list_adapters
    from localllm.hub.names import understand

    output, registry, found = cli_context(context).output, load_registry(), list_adapters()
    count = len(found)
    if base is not None:
        base = model_of(base)
        understand(base, registry)
        found = [each for each in found if is_for(each, base, registry)]
    if as_json:
        rows = [{"name": each.name, **_fields(each)} for each in found]
        output.json({"schema_version": SCHEMA_VERSION, "adapters": rows}, indent=2)
    elif found:
        output.table(_TITLES, map(_cells, found), optional=("FROM", "RANK"), numbers=("RANK", "SIZE"))
        if (first := next((each for each in found if each.is_usable), None)) is not None:
            output.note(f"`{_usage(first, base)}` uses {first.name}")
    elif count:
        output.note(f"none of the {count} adapters here says that it is for {base}: `localllm adapters` shows them")
    else:
        output.note("no adapter is here; `localllm search lora` finds some, `localllm pull ORG/REPOSITORY` fetches one")


def print_pulled(output: Output, adapter: AdapterFiles, *, as_json: bool) -> None:
    """Tell of an adapter that was pulled, and how it is used."""
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "adapter": adapter.name, **_fields(adapter)})
        return
    output.line(f"{adapter.name}: an adapter, {format_bytes(adapter.num_bytes)} in {adapter.path}")
    output.note(f"`{_usage(adapter)}` uses it" if adapter.is_usable else f"{adapter.name} {_NO_USE}: no plain LoRA")


def lasting_adapter(word: str, folder: Path = _HERE) -> str:
    """Return NAME_OR_PATH[:SCALE] as it is found from any folder: a path begins at this one. Raises AdapterError for a
    path at which there is none."""
    from localllm.history.records import UsedAdapter
    from localllm.hub.adapters import locate_adapter, split_scale
    from localllm.hub.names import looks_like_path, path_of

    name, scale = split_scale(word)
    path = folder.absolute() / path_of(name)
    if not (is_file(path) or is_file(path / "adapter_config.json") or looks_like_path(name)):
        return word
    return UsedAdapter(str(locate_adapter(str(path)).path), scale).text


def _usage(adapter: AdapterFiles, base: str | None = None) -> str:
    """Return a command that uses an adapter. base: the model that was named."""
    from localllm.hub.adapters import typed_base

    model = base or typed_base(adapter.base, load_registry()) or "BASE"
    name = adapter.name if adapter.repo else str(adapter.path)
    return f'{shlex.join(["localllm", "run", model, "--adapter", name])} "..."'


def _fields(adapter: AdapterFiles) -> dict[str, Any]:
    return {
        "base": adapter.base,
        "rank": adapter.rank,
        "size_bytes": adapter.num_bytes,
        "repo": adapter.repo,
        "revision": adapter.revision,
        "path": str(adapter.path),
    }


def _cells(adapter: AdapterFiles) -> tuple[str, ...]:
    rank = "-" if adapter.rank is None or not adapter.is_usable else str(adapter.rank)
    base = (adapter.base or "") if adapter.is_usable else _NO_USE
    return adapter.name, base, rank, format_bytes(adapter.num_bytes), adapter.origin
