"""`localllm show`: what is known about one model, without the network."""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.selection import select_text_only
from localllm.runtime.model_catalog import fact_lines, model_facts


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

    front = cli_context(context)
    output = front.output
    if template:
        source = _template_source(front, model)
        if as_json:
            output.json({"schema_version": SCHEMA_VERSION, "model": model, "template": source})
        else:
            output.verbatim(source if source.endswith("\n") else f"{source}\n")
        return
    description = hub.describe(model)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, **model_facts(description)}, indent=2)
        return
    for label, text in fact_lines(description):
        output.line(f"{label:<16}  {text}")


def _template_source(front: CliContext, model: str) -> str:
    from localllm.text.chat_template import ChatTemplate

    directory = select_text_only(front, model, {}).files.directory
    sources = ChatTemplate.load(directory).sources
    if len(sources) == 1:
        return next(iter(sources.values()))
    return "\n".join(f"--- {name} ---\n{source}" for name, source in sources.items())
