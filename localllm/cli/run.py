"""`localllm run`: one prompt, one answer, for scripts and pipes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.answer import Answer
from localllm.cli.front import Front, front_of
from localllm.cli.generate import Printing, can_be_longer, is_cut_by_context, print_answer
from localllm.cli.names import is_model
from localllm.cli.options import DEFAULT_MAX_TOKENS, DEFAULT_PARALLEL, refuse_together
from localllm.cli.prompt import has_blanks, split_positionals
from localllm.cli.selection import Selection, select, select_text_only
from localllm.cli.source import Source, read_source
from localllm.errors import ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from localllm.engine.request import SamplingParams

EXAMPLES = """Examples:

\b
  localllm run "Tell me a tale about a fox who finds a lantern."
  localllm run mistral-7b -s "Answer in one sentence." -p "Why is the sky blue?"
  git diff | localllm run qwen3-8b "Write a commit message for this." --temperature 0
  localllm run --raw -p "Once upon a time" --max-tokens 40 --json
  localllm run qwen3-8b --batch prompts.jsonl --max-tokens 200 > answers.jsonl
"""


def run_command(
    context: typer.Context,
    model: options.Model = None,
    prompt_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="The prompt: piped text, files and this, in this order. One word alone is a MODEL: use -p for it.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt, also of one word.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", metavar="FILE", help="Text before the prompt; may be repeated. -: stdin."),
    ] = None,
    system: options.System = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            metavar="FILE",
            help="Chat messages as JSON: an array, or {messages, tools, ...}. -: stdin, which is not read otherwise.",
        ),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Many prompts, a line of JSON each; goes on where it was interrupted. -: stdin.",
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            metavar="N",
            help=f"With --batch: answers at once. Default: {DEFAULT_PARALLEL}, or as many as memory has room for.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --batch: what an interrupted run answered counts as nothing.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Print what the model would be given, and generate nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is complete.")] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print a JSON object for each event as it comes.")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is complete.")] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Print on stderr how many tokens there were, how fast, and what the time went to."
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="With --json, --jsonl or --batch: log-probabilities of each token and of the N likeliest there.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            help=f"Longest answer, in tokens. Default: to the context's end; with --batch {DEFAULT_MAX_TOKENS}.",
        ),
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    typical_p: options.TypicalP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    dry_multiplier: options.DryMultiplier = None,
    dry_base: options.DryBase = None,
    dry_allowed_length: options.DryAllowedLength = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ctx: options.Ctx = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    threads: options.Threads = None,
) -> None:
    """Answer one prompt, or with --batch many.

    For scripts and pipes: the answer goes to stdout, everything else to stderr.
    """
    flags = dict(locals())  # by name: they are passed on as one
    front = front_of(context)
    refuse_conflicts(flags)
    positionals = [part for part in (model, prompt_argument) if part is not None]
    word, text = split_positionals(positionals, prompt[0] if prompt else None, is_model)
    if messages is not None and text is not None:
        raise UsageError(
            "--messages and a prompt cannot go together",
            why="the messages are the prompt",
            fix="localllm run MODEL --messages FILE.json",
        )
    if batch is not None and text is not None:
        why = "the prompts are the lines of its file"
        raise UsageError("--batch and a prompt cannot go together", why=why, fix="localllm run MODEL --batch FILE")
    selection = _select(front, word, text, flags)
    if batch is not None:
        from localllm.cli.batch import run_batch

        run_batch(front, selection, flags)
        return
    source = read_source(front.output, text, flags, selection.settings.system)
    if show_prompt:
        front.output.verbatim(source.render(selection.files.directory))
        if source.chat is not None and source.chat.add_generation_prompt is None:
            front.output.note("shown as the file has it; to answer it, add_generation_prompt is taken as true")
        return
    sampling = selection.sampling(flags)
    answer = _answer(front, selection, source, sampling, flags)
    if answer.finished is not None and answer.finished.finish_reason == "cancelled":
        raise typer.Exit(front.interrupts.exit_code or 130)


def refuse_conflicts(flags: Mapping[str, Any]) -> None:
    """Raises UsageError for flags that contradict each other, and for one that would have no effect."""
    refuse_together(flags, "--json", "--jsonl")
    refuse_together(flags, "--jsonl", "--no-stream")
    refuse_together(flags, "--raw", "--messages", "--system")
    refuse_together(flags, "--messages", "--prompt", "--file", "--system")
    refuse_together(
        flags, "--batch", "--prompt", "--file", "--messages", "--show-prompt", "--json", "--jsonl", "--no-stream"
    )
    refuse_together(flags, "--show-prompt", "--json", "--jsonl", "--no-stream", "--stats", "--logprobs")
    if len(flags["prompt"] or ()) > 1:
        why = f"{len(flags['prompt'])} of them; what belongs to one prompt goes into one text, or into files"
        raise UsageError("-p/--prompt is given more than once", why=why, fix="localllm run -f FILE -f FILE -p TEXT")
    for flag in ("parallel", "fresh"):
        if flags[flag] and flags["batch"] is None:
            number = f" {flags[flag]}" if flag == "parallel" else ""
            fix = f"localllm run MODEL --batch FILE --{flag}{number}"
            raise UsageError(f"--{flag} needs --batch", why="one prompt is one answer", fix=fix)
    if flags["logprobs"] is not None and not (flags["json"] or flags["jsonl"] or flags["batch"]):
        why = "text alone has no place for them"
        raise UsageError(
            "--logprobs needs --json, --jsonl or --batch", why=why, fix="localllm run --json --logprobs 3 -p TEXT"
        )


def _select(front: Front, word: str | None, text: str | None, flags: Mapping[str, Any]) -> Selection:
    try:
        return (select_text_only if flags["show_prompt"] else select)(front, word, flags)
    except ModelNotFoundError as error:
        if word is None or flags["messages"] is not None:
            raise
        if text is None:
            error.fix += f", or if it is the prompt: localllm run -p {shlex.quote(word)}"
        elif has_blanks(word) and is_model(text):  # in the wrong order
            error.fix = shlex.join(["localllm", "run", text, word])
        raise


def _answer(
    front: Front, selection: Selection, source: Source, sampling: SamplingParams, flags: Mapping[str, Any]
) -> Answer:
    from localllm.cli.opening import loading
    from localllm.engine.request import Request

    printing = Printing(
        as_json=flags["json"],
        as_events=flags["jsonl"],
        streams=not flags["no_stream"],
        statistics=flags["stats"],
        logprobs=flags["logprobs"] is not None,
    )
    with loading(front, selection) as load:
        ids = source.encode(selection.files.directory)
        engine = load.wait()
        request = Request(ids, sampling)
        answer = print_answer(front, selection.files, load.service.submit(request), request, printing)
        if (
            answer.finished is not None
            and answer.finished.usage.completion_tokens != sampling.max_tokens
            and is_cut_by_context(answer.finished, engine.ctx)
        ):
            larger = "--ctx makes it larger" if can_be_longer(engine) else "it is the longest that the model has"
            front.output.warn(f"the answer was cut: the context of {engine.ctx} tokens is full ({larger})")
    return answer
