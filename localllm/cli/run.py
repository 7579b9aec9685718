"""`localllm run`: one prompt, one answer, for scripts and pipes."""

from __future__ import annotations

import contextlib
import inspect
import queue
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat.answer import Answer
from localllm.chat.cascade import Tried
from localllm.chat.context import can_be_longer, chat_request, evicted_text, is_cut_by_context
from localllm.chat.dialogue import Dialogue
from localllm.chat.miss_report import explain
from localllm.chat.pending_turn import PendingTurn
from localllm.chat.recorder import ChatRecorder, Resumed, look_up, recorder_of
from localllm.chat.tool_words import adapted
from localllm.cli import options
from localllm.cli.cascade import CASCADE_OPTIONS, cascade_of
from localllm.cli.choices import CHOICE_OPTIONS, AnswerChoice, choice_of
from localllm.cli.compress import COMPRESS_OPTIONS, compressed, compressing, refuse_idle_compression
from localllm.cli.context import CliContext, cli_context
from localllm.cli.generate import AnswerPrinter, Printing
from localllm.cli.options import (
    DEFAULT_MAX_TOKENS,
    argument,
    complete_sessions,
    extra_sampling,
    number,
    option,
    refuse_together,
    takes,
)
from localllm.cli.prompt import argument_text, has_blanks, split_positionals
from localllm.cli.pulling import PULL
from localllm.cli.selection import select_resumed, select_text_only
from localllm.cli.source import (
    FORM_OPTIONS,
    Encoder,
    Source,
    read_source,
    refuse_idle_strict,
    require_met,
    typed_grammar,
)
from localllm.errors import MODEL, ContextOverflowError, Fix, ModelNotFoundError, UsageError
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import Opening
from localllm.runtime.plan_request import DEFAULT_PARALLEL
from localllm.runtime.selection import Selection, is_model, within_context
from localllm.settings import ANSWER, KEPT, OUTPUT, PROMPT, SETTINGS, EngineConfig, SamplingSettings
from localllm.text.eviction import Fitted, Message

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.request import Request, SamplingParams
    from localllm.runtime.engine_handle import Inbox
    from localllm.text.grammar.grammar import Grammar

RUN_EXAMPLES = """Examples:

\b
  localllm run "Tell me a tale about a fox who finds a lantern."
  localllm run mistral-7b -s "Answer in one sentence." -p "Why is the sky blue?"
  git diff | localllm run qwen3-8b "Write a commit message for this." --temperature 0
  localllm run -c "And what does the fox do with it?"
  localllm run qwen3-8b --schema person.json "Who wrote Faust?"
  localllm run qwen3-8b --batch prompts.jsonl --max-tokens 200 > answers.jsonl
"""


_JOB = "Many prompts"  # a heading in the help

# Why flags contradict each other, in the order in which they are looked at.
_RAW_ALONE = "--raw knows no template, and its answer is printed as it is"
_ONE_FORM = "an answer has one form"
_NOTHING_GENERATED = "the prompt is printed byte for byte, and nothing is generated"
_NOTHING_KEPT = "nothing is computed, and nothing kept"
_BY_MESSAGES = "a chat is gone on with by its messages, and through the chat template"
_LINES_OF_A_FILE = "the prompts are the lines of its file, and the output is a JSON object for each"
KEPT_JOB = {
    "--batch --private": "a job keeps its answers in a journal until it is done, to go on where it was interrupted"
}
EXCLUSIVE = {
    "--json --jsonl": "one prints a single object, the other one object for each event",
    "--jsonl --no-stream": "--jsonl is the stream of events",
    "--raw --messages": "--raw knows no template, and messages need one",
    "--raw --system": "--raw knows no template, and a system message needs one",
    "--raw --think --show-thoughts": _RAW_ALONE,
    "--show-thoughts --json --jsonl --batch": "JSON has them as `reasoning`",
    "--show-thoughts --show-prompt": "nothing is generated",
    "--messages --prompt --file": "the messages are the prompt",
    "--messages --system": "write the system message into the file",
    "--continue --raw --messages --batch": f"the last {_BY_MESSAGES[2:]}",
    "--session --raw --messages --batch": _BY_MESSAGES,
    "--continue --session": "--continue goes on with the last chat, --session with the one that it names",
    **KEPT_JOB,
    "--batch --cache-disk": "a job keeps no pages on the disk",
    "--private --cache-disk": "a private chat stores nothing on the disk",
    "--batch --prompt --file --messages --show-prompt --json --jsonl --no-stream": _LINES_OF_A_FILE,
    "--show-prompt --json --jsonl --no-stream --stats --logprobs": _NOTHING_GENERATED,
    "--show-prompt --overflow": "no model is loaded, so that the size of its context is not known",
    "--show-prompt --private --cache-disk": _NOTHING_KEPT,
    "--batch --overflow": "each prompt of a job stands alone, and one that does not fit is named before any runs",
    "--schema --regex --grammar": _ONE_FORM,
    "--regex --grammar": _ONE_FORM,
    "--show-prompt --schema --regex --grammar --strict": _NOTHING_GENERATED,
}


@takes(
    options.MODEL,
    argument(
        "prompt_argument",
        "PROMPT",
        "The prompt. A single word is MODEL; use -p instead.\nPiped text and files come before it.",
    ),
    option("-p --prompt", "The prompt; may be a single word.", "TEXT", list[str], group=PROMPT, is_basic=True),
    option(
        "-f --file",
        "Put this file's text before the prompt. -: stdin.\nMay be repeated.",
        "FILE",
        list[Path],
        group=PROMPT,
        is_basic=True,
    ),
    "system",
    option(
        "--messages",
        "Chat messages as JSON in place of a prompt: an array, or {messages, tools, ...}. -: stdin.",
        "FILE",
        Path,
        group=PROMPT,
    ),
    option(
        "--batch",
        "Answer many prompts, one JSON value a line.\n-: stdin. An interrupted job resumes.",
        "FILE",
        Path,
        group=PROMPT,
        is_basic=True,
    ),
    number(
        "--parallel",
        f"With --batch: answers generated at once. Default: {DEFAULT_PARALLEL}, or as many as memory has room for.",
        1,
        1024,
        "8",
        group=_JOB,
    ),
    option("--fresh", "With --batch: start over instead of resuming an interrupted job.", group=_JOB),
    option(
        "-c --continue",
        "Continue the last saved chat.\nIts model answers, unless you name one.",
        name="continues",
        group=KEPT,
        is_basic=True,
    ),
    option(
        "--session",
        "Continue this saved chat: its id in `localllm sessions list`, the beginning of one, or a part of its title.",
        "ID",
        completion=complete_sessions,
        group=KEPT,
    ),
    "private",
    "overflow",
    option("--raw", "Use the prompt as it is, without the chat template.", group=PROMPT),
    *COMPRESS_OPTIONS,
    option("--show-prompt", "Print the prompt that the model would get, and generate nothing.", group=PROMPT),
    option("--json", "Print one JSON object when the answer is complete.", group=OUTPUT, is_basic=True),
    option("--jsonl", "Print one JSON object for each event while it streams.", group=OUTPUT),
    option("--no-stream", "Print the answer when it is complete.", group=OUTPUT),
    option("--stats", "Print token counts, speeds and times, on stderr.", group=OUTPUT, is_basic=True),
    options.LOGPROBS,
    option(
        "--max-tokens",
        f"{SETTINGS['max_tokens'].help}\nWith --batch: {DEFAULT_MAX_TOKENS}.",
        "N",
        int,
        accepts=SETTINGS["max_tokens"].accepts,
        group=ANSWER,
        is_basic=True,
    ),
    SamplingSettings,
    *options.DRY,
    options.LOGIT_BIAS,
    "seed",
    "think",
    "show_thoughts",
    *CHOICE_OPTIONS,
    *CASCADE_OPTIONS,
    "stop",
    *FORM_OPTIONS,
    EngineConfig,
    PULL,
    options.NO_ATTACH,
)
def run_command(context: typer.Context, **flags: Any) -> None:
    """Answer one prompt, or many with --batch.

    Without a prompt it opens a chat. The answer goes to stdout, all else to stderr. It is saved; not with --private,
    --raw, --messages or --batch.
    """
    flags["continue"] = flags.pop("continues")
    cli = cli_context(context)
    _refuse_conflicts(flags)
    word, text = _positionals(flags)
    if _is_for_chat(cli, text, flags):
        _chat(context, word, flags)
        return
    form = typed_grammar(flags, cli.output)
    choice, cascade = choice_of(flags), cascade_of(flags)
    chat = "last" if flags["continue"] else flags["session"]
    resumed = None if chat is None else look_up(cli.output, chat)
    if flags["continue"] and resumed is not None and cli.output.animated:
        cli.output.note(f"going on with {resumed.session.id}: {resumed.session.title}")
    if cascade is None:
        selections = [_select(cli, word, text, flags, resumed)]
    else:
        *small, last = cascade.select(word, lambda name: select_resumed(cli, name, flags, resumed, None))
        selections = [*(within_context(each, cli.output.note) for each in small), last]
    selection = selections[0]
    if flags["batch"] is not None:
        from localllm.cli.batch import run_batch

        refuse_together({"batch": True, "private": selection.private}, KEPT_JOB)
        run_batch(cli, selection, flags, form)
        return
    source = _under_preset(cli, read_source(cli.output, text, flags, selection.settings.system), selection)
    dialogue = None
    if not flags["raw"] and flags["messages"] is None:
        from localllm.text.chat_template import ChatInput

        dialogue = _dialogue(selection, source, text, flags["system"], resumed)
        source = replace(source, chat=ChatInput(dialogue.for_template))
    source = compressed(cli, selection, source, flags, text)
    if flags["show_prompt"]:
        cli.output.verbatim(source.render(selection.files.directory, selection.resolved))
        if source.chat is not None and source.chat.add_generation_prompt is None:
            cli.output.note("shown as the file has it; to answer it, add_generation_prompt is taken as true")
        return
    said = dialogue or Dialogue(selection.resolved)
    recorder = recorder_of(said, cli.output, selection, resumed, records=dialogue is not None)
    with contextlib.closing(recorder):
        try:
            asked = partial(_answers, cli, source=source, flags=flags, recorder=recorder, form=form)
            if cascade is None:
                answers = asked(selection, choice=choice)
            else:
                answers = cascade.answers(cli, selections, recorder, asked)
        finally:
            recorder.catch_up()
    require_met(cli, [answer.finished for answer in answers if answer.finished], strict=flags["strict"])


def _under_preset(cli: CliContext, source: Source, selection: Selection) -> Source:
    """Return the messages of a file with the system message of a preset in front, where they have none. A plain text
    has no place for one, which is said."""
    system = selection.preset.values.get("system") if selection.preset is not None else None
    if system is None or selection.resolved.origins["system"].kind != "preset":
        return source
    if source.chat is None:
        cli.output.note("--raw: the preset's system message is left out")
        return source
    if any(message["role"] in ("system", "developer") for message in source.chat.messages):
        return source
    messages = ({"role": "system", "content": system}, *source.chat.messages)
    return replace(source, chat=replace(source.chat, messages=messages))


def _is_for_chat(cli: CliContext, text: str | None, flags: Mapping[str, Any]) -> bool:
    """Return whether the line names no prompt, where somebody who sits at a terminal can type one."""
    if text is not None or not cli.can_ask or not cli.output.stdout_is_terminal:
        return False
    from localllm.cli.chat import chat_command

    typed = {name for name, value in flags.items() if value not in (None, False, [], ())}
    taken = {*inspect.signature(chat_command).parameters, "continue", "session"}
    return typed <= taken


def _chat(context: typer.Context, word: str | None, flags: Mapping[str, Any]) -> None:
    """Open a chat with the flags of `run` that it has, too."""
    from localllm.cli.chat import chat_command

    taken = set(inspect.signature(chat_command).parameters) - {"context"}
    resume = "last" if flags["continue"] else flags["session"]
    typed = {**{name: flags.get(name) for name in taken}, "model": word, "resume": resume}
    try:
        chat_command(context, **typed)
    except ModelNotFoundError as error:
        if word is not None and not has_blanks(word):
            error.fix = [*error.fixes, _as_prompt(word)]
        raise


def _as_prompt(word: str) -> Fix:
    """Return the fix that types the command again with the word as the prompt."""
    return Fix.word(word, f"--prompt={word}")


def _positionals(flags: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The model and the prompt that the line names. Raises UsageError for a prompt beside a file of prompts."""
    positionals = [part for part in (flags["model"], flags["prompt_argument"]) if part is not None]
    if flags["continue"] and positionals and (number := positionals[-1]).isdecimal():  # llama.cpp's -c
        why = f"-c is --continue here; {number} as a prompt stands behind -p"
        raise UsageError("the context is given by --ctx", why=why, fix=f"--ctx {number} in place of -c {number}")
    word, text = split_positionals(positionals, (flags["prompt"] or [None])[0], is_model)
    for flag, why, file in (
        ("messages", "the messages are the prompt", "FILE.json"),
        ("batch", "the prompts are the lines of its file", "FILE"),
    ):
        if flags[flag] is not None and text is not None:
            fix = Fix.command("run", MODEL, f"--{flag}", file)
            raise UsageError(f"--{flag} and a prompt cannot go together", why=why, fix=fix)
    return word, text


def _refuse_conflicts(flags: Mapping[str, Any]) -> None:
    """Raises UsageError for flags that contradict each other, and for one that would have no effect."""
    refuse_together(flags, EXCLUSIVE)
    refuse_idle_strict(flags)
    refuse_idle_compression(flags)
    if flags["raw"] and flags["overflow"] == "evict":
        why = "a plain text has no turns that could leave the context"
        raise UsageError("--raw and --overflow evict cannot go together", why=why, fix=Fix.flag("--overflow", "grow"))
    if len(flags["prompt"] or ()) > 1:
        why = f"{len(flags['prompt'])} of them; what belongs to one prompt goes into one text, or into files"
        raise UsageError(
            "-p/--prompt is given more than once",
            why=why,
            fix=Fix.command("run", *["-f", "FILE", "-f", "FILE", "-p", "TEXT"]),
        )
    for flag, typed in (("parallel", f"--parallel {flags['parallel']}"), ("fresh", "--fresh")):
        if flags[flag] and flags["batch"] is None:
            fix = Fix.command("run", MODEL, "--batch", "FILE", *typed.split())
            raise UsageError(f"--{flag} needs --batch", why="one prompt is one answer", fix=fix)
    if flags["logprobs"] is not None and not (flags["json"] or flags["jsonl"] or flags["batch"]):
        fix = Fix.command("run", "--json", "--logprobs", "3", "-p", "TEXT")
        raise UsageError("--logprobs needs --json, --jsonl or --batch", why="text alone has no place for them", fix=fix)


def _dialogue(
    selection: Selection, source: Source, text: str | None, system: str | None, resumed: Resumed | None
) -> Dialogue:
    """Return the conversation so far, with the question at its end."""
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
    cli: CliContext, word: str | None, text: str | None, flags: Mapping[str, Any], resumed: Resumed | None
) -> Selection:
    again = Fix.command("run", BUILT_IN, "--session", resumed.session.id, "-p", "TEXT") if resumed else None
    try:
        if flags["show_prompt"]:
            held_with = resumed.session.model if resumed else None
            return select_text_only(cli, word or held_with, flags)
        return select_resumed(cli, word, flags, resumed, again)
    except ModelNotFoundError as error:
        if word is None or flags["messages"] is not None:
            raise
        if text is None:
            error.fix = [*error.fixes, *([] if "/" in word else [_as_prompt(word)])]  # an address is no prompt
        elif has_blanks(word) and is_model(text):  # in the wrong order
            error.fix = Fix.command("run", text, word)
        raise


def _answers(
    cli: CliContext,
    selection: Selection,
    *,
    source: Source,
    flags: Mapping[str, Any],
    recorder: ChatRecorder,
    form: Grammar | None,
    choice: AnswerChoice,
    tried: list[Tried] | None = None,
) -> list[Answer]:
    """Return the answers that are printed; the first of them is recorded. Exits where the user has stopped any.

    tried: as of `AnswerPrinter`; where the model has a bar, there may be no answer.
    """
    from localllm.cli.load_progress import loading
    from localllm.text.eviction import without

    sampling = choice.sampling(selection.sampling(extra_sampling(flags)))
    with loading(cli, selection, Opening(keeps_pages=True), attaches=not flags["no_attach"]) as load:
        encoder = Encoder.of(cli, selection, is_raw=source.chat is None, has_form=form is not None)
        ids = encoder.encode(source)
        engine = load.wait()
        try:
            request, fitted = _request(engine, source, encoder, ids, sampling, selection)
        except ContextOverflowError as error:
            if choice.bar is None or tried is None:
                error.fix = [*error.fixes, *compressing(error, flags, source, engine.tokenizer)]
                raise
            tried.append(Tried(selection.files.name, None, is_accepted=False))
            return []
        if fitted.evicted.turns:
            cli.output.note(evicted_text(fitted.evicted))
        given = None
        if source.chat is not None and encoder.template is not None:
            chat = replace(source.chat, messages=without(source.chat.messages, fitted.floor))
            given = encoder.effort.told(adapted(encoder.template, chat))
        why = partial(explain, engine, given, fitted.prompt_ids, num_out=fitted.floor)
        thinking = encoder.thinking(request.prompt_ids)
        if flags["show_thoughts"] and not thinking.splits:
            cli.output.note("--show-thoughts: this model's chat template knows no thoughts, and none are shown")
        request = replace(request, grammar=thinking.grammar(form), shown_ids=thinking.shown_ids)
        pending = PendingTurn(request, fitted.evicted, why, thinking=thinking, compression=source.compression)
        requests = choice.requests(request)
        answers = [replace(pending, request=each).answer() for each in requests]
        with recorder.answering(answers[0]) as record:
            inbox: Inbox = queue.SimpleQueue()
            streams = [load.handle.submit(each, inbox.put) for each in requests]
            printing = _printing(flags, shows_thoughts=selection.settings.show_thoughts)
            printer = AnswerPrinter(cli, selection.files, pending, printing, record, choice, recorder.session_id, tried)
            chosen = printer.print(streams, inbox, answers)
        if any(answer.finished is not None and answer.finished.finish_reason == "cancelled" for answer in answers):
            raise typer.Exit(cli.interrupts.exit_code or 130)
        if form is None:
            _warn_of_cut(cli, engine, chosen, sampling)
    return chosen


def _printing(flags: Mapping[str, Any], *, shows_thoughts: bool) -> Printing:
    return Printing(
        as_json=flags["json"],
        as_events=flags["jsonl"],
        streams=not flags["no_stream"],
        statistics=flags["stats"],
        logprobs=flags["logprobs"] is not None,
        shows_thoughts=shows_thoughts,
    )


def _warn_of_cut(cli: CliContext, engine: LoadedEngine, answers: Sequence[Answer], sampling: SamplingParams) -> None:
    num_cut = sum(
        answer.finished is not None
        and answer.finished.usage.completion_tokens != sampling.max_tokens
        and is_cut_by_context(answer.finished, engine.ctx)
        for answer in answers
    )
    if num_cut:
        named = "the answer was" if len(answers) == 1 else f"{num_cut} of {len(answers)} answers were"
        larger = "--ctx makes it larger" if can_be_longer(engine) else "it is the longest that the model has"
        cli.output.warn(f"{named} cut: the context of {engine.ctx} tokens is full ({larger})")


def _request(
    engine: LoadedEngine,
    source: Source,
    encoder: Encoder,
    ids: tuple[int, ...],
    sampling: SamplingParams,
    selection: Selection,
) -> tuple[Request, Fitted]:
    """Return the request as far as the context has room for it. ids: of the whole prompt.

    Raises AdapterError, ContextOverflowError, TemplateError.
    """
    chat, policy = source.chat, selection.settings.overflow
    messages = [{"role": "user", "content": source.raw or ""}] if chat is None else chat.messages

    def encode(some: Sequence[Message]) -> tuple[int, ...]:
        if chat is None or len(some) == len(messages):
            return ids
        return encoder.encode(Source(chat=replace(chat, messages=some)))

    if chat is None and policy == "evict":  # nothing of a plain text can leave
        policy = "stop"
    opens_turn = chat is not None and chat.opens_turn
    return chat_request(
        engine,
        sampling,
        messages,
        encode,
        policy,
        "--overflow",
        opens_turn=opens_turn,
        adapters=selection.adapters(),
    )
