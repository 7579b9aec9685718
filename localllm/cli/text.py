"""`localllm tokenize`: a text's tokens, without weights and torch; `perplexity`: how well a model predicts a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.options import argument, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.prompt import argument_text, read_input, read_stdin, split_positionals
from localllm.cli.selection import select, select_text_only
from localllm.errors import MODEL, Fix, ModelNotFoundError, UsageError
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import Opening
from localllm.runtime.selection import is_model
from localllm.settings import OUTPUT, PROMPT, EngineConfig

if TYPE_CHECKING:
    from localllm.engine.engine import Engine

TOKENIZE_EXAMPLES = """Examples:

\b
  localllm tokenize "How many tokens is this?"
  localllm tokenize qwen3-8b --json < chapter.txt
"""
PERPLEXITY_EXAMPLES = """Examples:

\b
  localllm perplexity tiny --file chapter.txt
  localllm perplexity qwen3-8b --file wiki.test.txt --ctx 2048 --json
"""


@takes(
    options.MODEL,
    argument("text", "TEXT", "The text. Default: standard input."),
    option("--json", "One JSON object: schema_version, model, token_ids, tokens.", name="as_json"),
)
def tokenize_command(context: typer.Context, model: str | None, text: str | None, as_json: bool) -> None:
    """Print the tokens of a text.

    One line per token, with id and text. No special token is added, and no weights are needed.
    """
    from localllm.text.tokenizer import Tokenizer

    cli = cli_context(context)
    word, given = split_positionals([part for part in (model, text) if part is not None], None, is_model)
    try:
        files = select_text_only(cli, word, {}).files
    except ModelNotFoundError as error:
        if word is not None and given is None:
            error.fix = [*error.fixes, f"if it is the text: {Fix.command('tokenize', BUILT_IN, word)}"]
        raise
    tokenizer = Tokenizer.load(files.directory)
    content = argument_text(given, "TEXT") if given is not None else read_stdin(cli.output, encoding="utf-8")
    if content is None:
        fix: list[str | Fix] = [Fix.command("tokenize", MODEL, "TEXT"), "localllm tokenize MODEL < FILE"]
        raise UsageError("there is no text", why="none on the command line, and nothing is piped in", fix=fix)
    ids = tokenizer.encode(content)
    tokens = [tokenizer.token_text(token_id) for token_id in ids]
    if as_json:
        cli.output.json({"schema_version": SCHEMA_VERSION, "model": files.name, "token_ids": ids, "tokens": tokens})
        return
    for token_id, token in zip(ids, tokens, strict=True):
        cli.output.line(f"{token_id:>7}  {token!r}")


@takes(
    options.REQUIRED_MODEL,
    option(
        "-f --file",
        "A text file in UTF-8; -: stdin.\nMay be repeated: the figures are of all files, of which each is read alone.",
        "FILE",
        list[Path],
        required=True,
        group=PROMPT,
        is_basic=True,
    ),
    EngineConfig,
    option(
        "--json",
        "Print one JSON object.\nIts keys: schema_version, model, perplexity, nll, tokens, ctx.",
        name="as_json",
        group=OUTPUT,
        is_basic=True,
    ),
)
def perplexity_command(context: typer.Context, **flags: Any) -> None:
    """Measure how well a model predicts a text.

    Perplexity is exp of the mean negative log-likelihood of the tokens: lower is better.
    """
    from localllm.cli.load_progress import loading, on_a_thread

    cli = cli_context(context)
    texts = [read_input(path, "--file", cli.output) for path in flags["file"]]
    selection = select(cli, flags["model"], flags)
    with (
        loading(cli, selection, Opening(measures=True)) as load,  # what is asked for is measured
        cli.output.progress("measuring") as line,
    ):
        engine = cast("Engine", load.wait())

        def show(done: int, total: int) -> None:
            line.show(f"measuring: {done} of {total} tokens")

        def measured() -> Any:
            from localllm.engine.perplexity import Perplexity

            ids = [engine.tokenizer.encode(text, bos=True) for text in texts]
            for path, of_file in zip(flags["file"], ids, strict=True):
                if len(of_file) < 2:
                    why = "the first token is predicted by nothing; a text needs two or more"
                    fix = Fix.advice(f"leave {path} out, or give it a text")
                    raise UsageError(f"--file {path}: there is nothing to predict", why=why, fix=fix)
            return Perplexity.of_all(
                [engine.perplexity(each, ctx=selection.settings.ctx, progress=show) for each in ids]
            )

        result = on_a_thread(measured)
    shown = result.perplexity if math.isfinite(result.perplexity) else None  # JSON has no infinity
    fields = {"perplexity": shown, "nll": result.nll, "tokens": result.tokens, "ctx": result.ctx}
    if flags["as_json"]:
        cli.output.json({"schema_version": SCHEMA_VERSION, "model": selection.files.name, **fields})
    else:
        cli.output.line(
            f"perplexity {result.perplexity:.4f} ({result.nll:.5f} nats a token over {result.tokens} tokens, "
            f"context {result.ctx})"
        )
