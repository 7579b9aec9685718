"""`localllm run`: one prompt, one answer, for scripts and pipes."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.chat.answer import Answer
from localllm.chat.context import ChatPrompt, can_be_longer, evicted_text, explain_text, is_cut_by_context
from localllm.chat.dialogue import Dialogue
from localllm.chat.miss_report import explain
from localllm.chat.recorder import ChatRecorder, Resumed, look_up, recorder_of
from localllm.chat.tool_words import told_in_words
from localllm.cli import options
from localllm.cli.choices import Beams, BestOf, Choice, N, choice_of, print_chosen
from localllm.cli.front import Front, front_of
from localllm.cli.generate import Printing, print_recorded
from localllm.cli.names import complete_sessions
from localllm.cli.options import DEFAULT_MAX_TOKENS, extra_sampling, refuse_together
from localllm.cli.prompt import argument_text, has_blanks, split_positionals
from localllm.cli.selection import select_resumed, select_text_only
from localllm.cli.source import Encoder, Source, read_source
from localllm.cli.structured import refuse_form_conflicts, require_met, typed_grammar
from localllm.errors import ContextOverflowError, ModelNotFoundError, UsageError
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import Opening
from localllm.runtime.plan_request import DEFAULT_PARALLEL
from localllm.runtime.selection import Selection, is_model
from localllm.text.eviction import Fitted, Message

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.request import Request, SamplingParams
    from localllm.text.chat_template import ChatInput
    from localllm.text.grammar.grammar import Grammar

EXAMPLES = """Examples:

\b
  localllm run "Tell me a tale about a fox who finds a lantern."
  localllm run mistral-7b -s "Answer in one sentence." -p "Why is the sky blue?"
  git diff | localllm run qwen3-8b "Write a commit message for this." --temperature 0
  localllm run --raw -p "Once upon a time" --max-tokens 40 --json
  localllm run -c "And what does the fox do with it?"
  localllm run qwen3-8b --schema person.json --strict "Who wrote Faust?"
  localllm run qwen3-8b --n 3 --temperature 1 "Name a café."
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
    continues: Annotated[
        bool,
        typer.Option("-c", "--continue", help="Go on with the last kept chat, and with its model unless one is named."),
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="ID",
            autocompletion=complete_sessions,
            help="Go on with this chat of `localllm sessions list`: its id, the beginning of one, or a part of its "
            "title.",
        ),
    ] = None,
    private: options.Private = None,
    overflow: options.Overflow = None,
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
    think: options.Think = None,
    show_thoughts: options.ShowThoughts = None,
    n: N = None,
    best_of: BestOf = None,
    beams: Beams = None,
    stop: options.Stop = None,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", metavar="FILE", help="The answer is JSON that this JSON Schema allows. -: stdin."),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            "--regex", metavar="PATTERN", help="The answer is a text that this regular expression matches whole."
        ),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            "--grammar",
            metavar="FILE",
            help="The answer is a text of this grammar, in Lark or llama.cpp's GBNF: by its ending, or by its rules. "
            "-: stdin.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit code 7 where an answer was cut before it had the form of one of these three."
        ),
    ] = False,
    ctx: options.Ctx = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    kv: options.KV = None,
    speculate: options.Speculate = None,
    draft_tokens: options.DraftTokens = None,
    cache_disk: options.CacheDisk = None,
    threads: options.Threads = None,
    no_attach: options.NoAttach = False,
) -> None:
    """Answer one prompt, or with --batch many.

    For scripts and pipes: the answer goes to stdout, everything else to stderr. Question and answer are kept as a chat,
    on this disk alone, but those of --raw, --messages and --batch.
    """
    flags = dict(locals())  # by name: they are passed on as one
    flags["continue"] = flags.pop("continues")
    front = front_of(context)
    refuse_conflicts(flags)
    form = typed_grammar(flags, front.output)
    choice = choice_of(flags)
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
    resumed = _resumed(front, flags)
    selection = _select(front, word, text, flags, resumed)
    if batch is not None:
        from localllm.cli.batch import run_batch

        refuse_together({"batch": batch, "private": selection.private}, "--batch", "--private")
        run_batch(front, selection, flags, form)
        return
    source = read_source(front.output, text, flags, selection.settings.system)
    dialogue = None
    if not raw and messages is None:
        from localllm.text.chat_template import ChatInput

        dialogue = _dialogue(selection, source, text, system, resumed)
        source = Source(chat=ChatInput(dialogue.for_template))
    if show_prompt:
        front.output.verbatim(source.render(selection.files.directory, selection.resolved))
        if source.chat is not None and source.chat.add_generation_prompt is None:
            front.output.note("shown as the file has it; to answer it, add_generation_prompt is taken as true")
        return
    sampling = choice.sampling(selection.sampling(extra_sampling(flags)))
    said = dialogue or Dialogue(selection.resolved)
    recorder = recorder_of(said, front.output, selection, resumed, records=dialogue is not None)
    with contextlib.closing(recorder):
        try:
            answers = _answers(front, selection, source, sampling, flags, recorder, form, choice)
        finally:
            recorder.catch_up()
    endings = [answer.finished for answer in answers if answer.finished is not None]
    if any(finished.finish_reason == "cancelled" for finished in endings):
        raise typer.Exit(front.interrupts.exit_code or 130)
    require_met(front, endings, strict=strict)


def refuse_conflicts(flags: Mapping[str, Any]) -> None:
    """Raises UsageError for flags that contradict each other, and for one that would have no effect."""
    refuse_together(flags, "--json", "--jsonl")
    refuse_together(flags, "--jsonl", "--no-stream")
    refuse_together(flags, "--raw", "--messages", "--system")
    refuse_together(flags, "--raw", "--think", "--show-thoughts")
    refuse_together(flags, "--show-thoughts", "--json", "--jsonl", "--batch", "--show-prompt")
    refuse_together(flags, "--messages", "--prompt", "--file", "--system")
    for flag in ("--continue", "--session"):
        refuse_together(flags, flag, "--raw", "--messages", "--batch")
    refuse_together(flags, "--continue", "--session")
    refuse_together(flags, "--batch", "--private", "--cache-disk")
    refuse_together(flags, "--private", "--cache-disk")
    refuse_together(
        flags, "--batch", "--prompt", "--file", "--messages", "--show-prompt", "--json", "--jsonl", "--no-stream"
    )
    refuse_together(flags, "--show-prompt", "--json", "--jsonl", "--no-stream", "--stats", "--logprobs", "--overflow")
    refuse_together(flags, "--show-prompt", "--private", "--cache-disk")
    refuse_together(flags, "--batch", "--overflow")
    refuse_form_conflicts(flags)
    if flags["raw"] and flags["overflow"] == "evict":
        why = "a plain text has no turns that could leave the context"
        raise UsageError("--raw and --overflow evict cannot go together", why=why, fix="--overflow grow")
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


def _resumed(front: Front, flags: Mapping[str, Any]) -> Resumed | None:
    from localllm.history import LAST

    word = LAST if flags["continue"] else flags["session"]
    return look_up(front.output, word) if word is not None else None


def _dialogue(
    selection: Selection, source: Source, text: str | None, system: str | None, resumed: Resumed | None
) -> Dialogue:
    """What was said before, and the question."""
    assert source.chat is not None
    *before, question = source.chat.messages
    given = before[0]["content"] if before else None
    opening = argument_text(text, "the prompt") if text is not None else ""
    dialogue = Dialogue(selection.resolved, given, opening=opening.strip())
    if resumed is not None:
        resumed.restore(dialogue, None if system is None else given or "")
    dialogue.ask(question["content"])
    return dialogue


def _select(
    front: Front, word: str | None, text: str | None, flags: Mapping[str, Any], resumed: Resumed | None
) -> Selection:
    again = f"localllm run {BUILT_IN} --session {resumed.session.id} -p TEXT" if resumed else ""
    try:
        if flags["show_prompt"]:
            held_with = resumed.session.model if resumed else None
            return select_text_only(front, word or held_with, flags)
        return select_resumed(front, word, flags, resumed, again)
    except ModelNotFoundError as error:
        if word is None or flags["messages"] is not None:
            raise
        if text is None:
            error.fix += f", or if it is the prompt: localllm run -p {shlex.quote(word)}"
        elif has_blanks(word) and is_model(text):  # in the wrong order
            error.fix = shlex.join(["localllm", "run", text, word])
        raise


def _answers(
    front: Front,
    selection: Selection,
    source: Source,
    sampling: SamplingParams,
    flags: Mapping[str, Any],
    recorder: ChatRecorder,
    form: Grammar | None,
    choice: Choice,
) -> list[Answer]:
    """Return the answers that are printed; the first of them is recorded."""
    from localllm.cli.opening import attaching

    printing = Printing(
        as_json=flags["json"],
        as_events=flags["jsonl"],
        streams=not flags["no_stream"],
        statistics=flags["stats"],
        logprobs=flags["logprobs"] is not None,
        shows_thoughts=selection.settings.show_thoughts,
    )
    with attaching(front, selection, Opening(keeps_pages=True), attaches=not flags["no_attach"]) as load:
        encoder = Encoder.load(
            selection.files.directory, selection.resolved, is_raw=source.chat is None, has_form=form is not None
        )
        if encoder.effort.note:
            front.output.note(encoder.effort.note)
        ids = encoder.encode(source)
        engine = load.wait()
        request, fitted = _request(engine, source, encoder, ids, sampling, selection.settings.overflow)
        if fitted.evicted.turns:
            front.output.note(evicted_text(fitted.evicted))
        why = partial(explain, engine, _given(source, encoder, fitted), fitted.prompt_ids, num_out=fitted.floor)
        printing = replace(printing, evicted=fitted.evicted, explain=why)
        thinking = encoder.thinking(request.prompt_ids)
        if flags["show_thoughts"] and not thinking.splits:
            front.output.note("--show-thoughts: this model's chat template knows no thoughts, and none are shown")
        request = replace(request, grammar=thinking.grammar(form), shown_ids=thinking.shown_ids)
        printing = replace(printing, thinking=thinking)
        asked = (front, selection.files, load.service, request, printing, recorder)
        answers = [print_recorded(*asked)] if choice.is_plain else print_chosen(*asked, choice)
        if form is None:
            _warn_of_cut(front, engine, answers, sampling)
    return answers


def _warn_of_cut(front: Front, engine: LoadedEngine, answers: Sequence[Answer], sampling: SamplingParams) -> None:
    endings = [answer.finished for answer in answers if answer.finished is not None]
    num_cut = sum(
        finished.usage.completion_tokens != sampling.max_tokens and is_cut_by_context(finished, engine.ctx)
        for finished in endings
    )
    if num_cut:
        named = "the answer was" if len(endings) == 1 else f"{num_cut} of {len(endings)} answers were"
        larger = "--ctx makes it larger" if can_be_longer(engine) else "it is the longest that the model has"
        front.output.warn(f"{named} cut: the context of {engine.ctx} tokens is full ({larger})")


def _given(source: Source, encoder: Encoder, fitted: Fitted) -> ChatInput | None:
    """The chat as the model is given it."""
    from localllm.text.eviction import without

    if source.chat is None or encoder.template is None:
        return None
    chat = replace(source.chat, messages=without(source.chat.messages, fitted.floor))
    return encoder.effort.told(told_in_words(encoder.template, chat))


def _request(
    engine: LoadedEngine, source: Source, encoder: Encoder, ids: tuple[int, ...], sampling: SamplingParams, policy: str
) -> tuple[Request, Fitted]:
    """What is asked as the context has room for it. ids: of all of it. Raises ContextOverflowError, TemplateError."""
    from localllm.engine.request import Request

    chat = source.chat
    if chat is not None:

        def encode(messages: Sequence[Message]) -> tuple[int, ...]:
            is_whole = len(messages) == len(chat.messages)
            return ids if is_whole else encoder.encode(Source(chat=replace(chat, messages=messages)))

        prompt = ChatPrompt(chat.messages, encode, policy, "--overflow", opens_turn=chat.opens_turn)
        return prompt.request(engine, sampling)
    request = Request(ids, sampling, explains_miss=True, grows=policy == "grow")
    try:
        engine.check(request)
    except ContextOverflowError as error:
        explain_text(error, source.raw or "", len(ids), engine.ctx, policy)
        raise
    return request, Fitted(ids)
