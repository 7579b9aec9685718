"""`localllm help`: one section of the errors page, or the help of a command."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from localllm.cli.context import cli_context
from localllm.cli.help_page import help_page
from localllm.cli.options import argument, option, takes
from localllm.errors import Fix, LocalLLMError, UsageError


@takes(
    argument("topics", "TOPIC...", "A command, such as run or config set, or the code of an error.", list[str]),
    option("--all", "Show all options of a command.", name="everything"),
)
def help_command(context: typer.Context, topics: Sequence[str], everything: bool) -> None:
    """Explain an error or a command.

    The last line of an error message names its code.
    """
    output = cli_context(context).output
    root: Any = context.find_root()
    if not topics:
        output.line(root.get_help())
        output.line(f"\nErrors explained by `localllm help CODE`: {', '.join(read_sections())}")
        return
    sections = {} if topics[0] in root.command.commands else read_sections()
    if len(topics) == 1 and topics[0] in sections:
        output.line(sections[topics[0]])
        return
    inner, left = _described(root, topics)
    if left:
        commands = getattr(inner.command, "commands", {})
        nearest = difflib.get_close_matches(left[0], [*commands, *sections], n=1)
        fix = Fix.command("help", *topics[: -len(left)], *nearest) if nearest else Fix.command("--help")
        why = f"the codes of errors are {', '.join(sections)}" if sections else f"it is no command of {topics[0]}"
        raise UsageError(f"there is no help for {' '.join(topics)[:80]!r}", why=why, fix=fix)
    output.line(help_page(inner.command, inner, everything=everything))


def _described(context: Any, topics: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Return the context of the command that the words name from here on, and the words that name none."""
    while topics and hasattr(group := context.command, "commands"):
        name = group.aliases.get(topics[0], topics[0])
        if name not in group.commands:
            break
        context = typer.Context(group.loaded(name), info_name=name, parent=context)
        topics = topics[1:]
    return context, topics


def read_sections() -> dict[str, str]:
    """The errors page by code, each section with its heading. Raises LocalLLMError where the page is not installed."""
    package = Path(__file__).parent.parent
    for page in (package / "errors.md", package.parent / "docs" / "using" / "errors.md"):
        if page.is_file():
            _, *sections = page.read_text("utf-8").split("\n## ")
            return {text.partition("\n")[0]: f"## {text.strip()}" for text in sections}
    raise LocalLLMError(
        "the errors page is not installed", why=f"{package} has no errors.md", fix="pip install localllm"
    )
