"""`localllm help`: one section of the errors page, or the help of a command."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer

from localllm.cli.context import cli_context
from localllm.cli.options import argument, takes
from localllm.errors import Fix, LocalLLMError, UsageError


@takes(argument("topic", "CODE", "An error's code, or a command."))
def help_command(context: typer.Context, topic: str | None) -> None:
    """Explain an error or a command.

    The last line of an error message names its code.
    """
    output = cli_context(context).output
    root = context.find_root()
    if topic is None:
        output.line(root.get_help())
        output.line(f"\nErrors explained by `localllm help CODE`: {', '.join(read_sections())}")
        return
    group: Any = root.command
    if topic in group.commands:
        command = group.loaded(topic)
        output.line(command.get_help(typer.Context(command, info_name=topic, parent=root)))
        return
    sections = read_sections()
    if topic not in sections:
        nearest = difflib.get_close_matches(topic, sections, n=1)
        raise UsageError(
            f"there is no help for {topic!r}",
            why=f"the codes are {', '.join(sections)}",
            fix=Fix.command("help", nearest[0] if nearest else "usage"),
        )
    output.line(sections[topic])


def read_sections() -> dict[str, str]:
    """The errors page by code, each section with its heading. Raises LocalLLMError where the page is not installed."""
    package = Path(__file__).parent.parent
    for page in (package / "errors.md", package.parent / "docs" / "errors.md"):
        if page.is_file():
            _, *sections = page.read_text("utf-8").split("\n## ")
            return {text.partition("\n")[0]: f"## {text.strip()}" for text in sections}
    raise LocalLLMError(
        "the errors page is not installed", why=f"{package} has no errors.md", fix="pip install localllm"
    )
