"""`localllm show`: what is known about one model, without the network."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.front import Front, front_of
from localllm.cli.list import packed_fields, packed_text
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.selection import select_text_only
from localllm.config import format_bytes
from localllm.frontend.selection import sampling_defaults

if TYPE_CHECKING:
    from localllm.hub import ModelDescription

_NUMBERS = ("layers", "hidden_size", "attention_heads", "kv_heads", "vocabulary", "context")


def show_command(
    context: typer.Context,
    model: options.RequiredModel,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template and nothing else.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show what is known about one model.

    Where it is, its size, what is packed of it, architecture, context, licence and sampling defaults; without the
    network.
    """
    from localllm import hub

    front = front_of(context)
    output = front.output
    if template:
        source = _template_source(front, model)
        if as_json:
            output.json({"schema_version": SCHEMA_VERSION, "model": model, "template": source})
        else:
            output.verbatim(source if source.endswith("\n") else f"{source}\n")
        return
    fields = _fields(hub.describe(model))
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, **fields}, indent=2)
        return
    for name, value in fields.items():
        if value not in (None, [], {}) and (name, value) != ("partial_bytes", 0):
            label = name.removesuffix("_bytes").replace("_", " ")
            shown = [_shown(name, item) for item in value] if name == "packed" else [_shown(name, value)]
            for text in shown:
                output.line(f"{label:<16}  {text}")


def _template_source(front: Front, model: str) -> str:
    from localllm.engine.chat_template import ChatTemplate

    directory = select_text_only(front, model, {}).files.directory
    sources = ChatTemplate.load(directory).sources
    if len(sources) == 1:
        return next(iter(sources.values()))
    return "\n".join(f"--- {name} ---\n{source}" for name, source in sources.items())


def _fields(model: ModelDescription) -> dict[str, Any]:
    entry = model.entry
    return {
        "name": model.name,
        "state": _state(model),
        "repo": model.repo,
        "revision": model.revision if model.repo else None,
        "directory": str(model.files.directory) if model.files else None,
        "size_bytes": model.size_bytes if model.files else None,
        "partial_bytes": model.partial_bytes,
        "packed": packed_fields(model.packed),
        "model_type": model.model_type,
        "dtype": model.dtype,
        "parameters": entry.parameters if entry else None,
        **{name: value for name, value in asdict(model).items() if name in _NUMBERS},
        "licence": entry.licence if entry else None,
        "gated": entry.gated if entry else None,
        "aliases": list(entry.aliases) if entry else [],
        "sampling": sampling_defaults(entry, model.files),
        "stop": list(entry.stop) if entry else [],
    }


def _state(model: ModelDescription) -> str:
    if model.files:
        return "installed"
    if model.partial_bytes:
        return "partial"
    return "orphan" if model.packed and model.entry is None else "available"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "packed":
        return f"{packed_text(value)} in {value['directory']}"
    if name == "parameters":
        return f"{value:g} billion"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, list):
        return ", ".join(repr(item) if name == "stop" else str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item:g}" for key, item in value.items())
    return str(value)
