"""`localllm tokenize`: a text's tokens. Needs a tokenizer, no weights and no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.prompt import argument_text, read_stdin, split_positionals
from localllm.cli.selection import select_text_only
from localllm.errors import MODEL, Fix, ModelNotFoundError, UsageError
from localllm.registry import BUILT_IN
from localllm.runtime.selection import is_model

EXAMPLES = """Examples:

\b
  localllm tokenize "How many tokens is this?"
  localllm tokenize qwen3-8b --json < chapter.txt
"""


def tokenize_command(
    context: typer.Context,
    model: options.Model = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", show_default=False, help="The text; without one, standard input.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: schema_version, model, token_ids, tokens.")
    ] = False,
) -> None:
    """Print the tokens of a text.

    Id and text, a line each; no special token is added. Needs no weights.
    """
    from localllm.text.tokenizer import Tokenizer

    front = cli_context(context)
    word, given = split_positionals([part for part in (model, text) if part is not None], None, is_model)
    try:
        files = select_text_only(front, word, {}).files
    except ModelNotFoundError as error:
        if word is not None and given is None:
            error.fix = [*error.fixes, f"if it is the text: {Fix.command('tokenize', BUILT_IN, word)}"]
        raise
    tokenizer = Tokenizer.load(files.directory)
    content = argument_text(given, "TEXT") if given is not None else read_stdin(front.output, encoding="utf-8")
    if content is None:
        fix: list[str | Fix] = [Fix.command("tokenize", MODEL, "TEXT"), "localllm tokenize MODEL < FILE"]
        raise UsageError("there is no text", why="none on the command line, and nothing is piped in", fix=fix)
    ids = tokenizer.encode(content)
    tokens = [tokenizer.token_text(token_id) for token_id in ids]
    if as_json:
        front.output.json({"schema_version": SCHEMA_VERSION, "model": files.name, "token_ids": ids, "tokens": tokens})
        return
    for token_id, token in zip(ids, tokens, strict=True):
        front.output.line(f"{token_id:>7}  {token!r}")
