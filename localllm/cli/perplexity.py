"""`localllm perplexity`: how well a model foretells a text."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.options import option, takes
from localllm.cli.output import SCHEMA_VERSION, ProgressLine
from localllm.cli.prompt import read_input
from localllm.cli.selection import select
from localllm.runtime.engine_loader import Opening
from localllm.settings import EngineConfig

if TYPE_CHECKING:
    from localllm.engine.engine import Engine

EXAMPLES = """Examples:

\b
  localllm perplexity tiny --file chapter.txt
  localllm perplexity qwen3-8b --file wiki.test.txt --ctx 2048 --json
"""


@takes(
    options.REQUIRED_MODEL,
    option("-f --file", "A text file in UTF-8; -: stdin.", "FILE", Path, required=True),
    EngineConfig,
    option("--json", "One JSON object: schema_version, model, perplexity, nll, tokens, ctx.", name="as_json"),
)
def perplexity_command(context: typer.Context, **flags: Any) -> None:
    """Measure how well a model foretells a text.

    Perplexity is exp of the mean negative log-likelihood of the tokens: lower is better.
    """
    from localllm.cli.load_progress import loading

    front = cli_context(context)
    text = read_input(flags["file"], "--file", front.output)
    selection = select(front, flags["model"], flags)
    with (
        loading(front, selection, Opening(speculates=False)) as load,  # what is asked for is measured
        front.output.progress("measuring") as line,
    ):
        result = _measure(load.wait(), text, selection.settings.ctx, line)
    shown = result.perplexity if math.isfinite(result.perplexity) else None  # JSON has no infinity
    fields = {"perplexity": shown, "nll": result.nll, "tokens": result.tokens, "ctx": result.ctx}
    if flags["as_json"]:
        front.output.json({"schema_version": SCHEMA_VERSION, "model": selection.files.name, **fields})
    else:
        front.output.line(
            f"perplexity {result.perplexity:.4f} ({result.nll:.5f} nats a token over {result.tokens} tokens, "
            f"context {result.ctx})"
        )


def _measure(engine: Engine, text: str, ctx: int | None, line: ProgressLine) -> Any:
    """The result. Computed on a thread of its own, so that this one can be interrupted in the middle of a step."""

    def show(done: int, total: int) -> None:
        line.show(f"measuring: {done} of {total} tokens")

    def compute() -> None:
        try:
            future.set_result(engine.perplexity(engine.tokenizer.encode(text, bos=True), ctx=ctx, progress=show))
        except BaseException as error:
            future.set_exception(error)

    future: Future[Any] = Future()
    Thread(target=compute, name="perplexity", daemon=True).start()
    return future.result()
