"""`run --compress`: the prompt's context without what says least, as a small model finds that judges it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.chat.compression import HIGHEST, LOWEST, Compressible, Compression, Judge, Reading, compressible, fitting
from localllm.cli.context import CliContext
from localllm.cli.options import complete_models, number, option, refuse_together
from localllm.cli.prompt import argument_text
from localllm.cli.source import Source
from localllm.config import ResolvedSettings
from localllm.errors import ContextOverflowError, Fix, ModelNotFoundError, UsageError
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import Opening
from localllm.runtime.selection import Selection, require_weights, selected
from localllm.settings import PROMPT

if TYPE_CHECKING:
    from localllm.runtime.engine_handle import EngineHandle
    from localllm.text.tokenizer import Tokenizer

COMPRESS_OPTIONS = (
    number(
        "--compress",
        "Keep this share of the tokens of files, piped text and long messages, 0.01 to 0.99: the words that say most "
        "beside the question. Code, tables, system messages and the question stay. Says what it removed.",
        LOWEST,
        HIGHEST,
        "0.5",
        "RATIO",
        float,
        group=PROMPT,
    ),
    option(
        "--compress-with",
        f"With --compress: the small model that judges the words. Default: {BUILT_IN}.",
        "MODEL",
        completion=complete_models,
        group=PROMPT,
    ),
)
_NOT_RAW = {"--compress --raw": "a raw text has no question beside which the rest of it is judged"}
_NOT_BATCH = {"--compress --batch": "the prompts of a job are answered as they are"}
_WHOLE = Fix.without("--compress", "--compress-with")
_SURE = 1.02  # sentences that have moved together may be of fewer tokens
_OF_MACHINE = ("device", "ram", "vram", "threads", "offline", "private")  # settings that the judge shares


def refuse_idle_compression(flags: Mapping[str, Any]) -> None:
    """Raises UsageError where nothing can be removed, and for a judge without anything to judge."""
    refuse_together(flags, _NOT_RAW, [Fix.without("--raw"), _WHOLE])
    refuse_together(flags, _NOT_BATCH, _WHOLE)
    if flags["compress_with"] is not None and flags["compress"] is None:
        why = "without it the prompt stays as it is"
        raise UsageError("--compress-with needs --compress", why=why, fix=Fix.flag("--compress", 0.5))


def compressing(
    error: ContextOverflowError, flags: Mapping[str, Any], source: Source, tokenizer: Tokenizer
) -> list[Fix]:
    """Return the flag by which a prompt would fit into the context that it does not fit into, if enough of it may
    leave. tokenizer: of the model that answers."""
    if flags["compress"] is not None or source.chat is None or error.num_tokens is None or error.ctx is None:
        return []
    whole = compressible(source.chat.messages, verbatim=list(source.verbatim.values()))
    return _fitting(whole.cost(tokenizer), error.num_tokens, error.ctx)


def _fitting(may_leave: float, num_tokens: int, ctx: int) -> list[Fix]:
    ratio = fitting(may_leave, num_tokens, ctx)
    return [] if ratio is None else [Fix.flag("--compress", ratio)]


def _require_room(selection: Selection, source: Source, may_leave: float, ratio: float, tokenizer: Tokenizer) -> None:
    """Raise ContextOverflowError where more stays of a prompt than the model has room for, before a judge reads it."""
    from localllm.models.families import load_config

    settings, longest = selection.settings, load_config(selection.files.directory).longest_context
    limit = longest if settings.overflow == "grow" or settings.ctx is None else min(longest, settings.ctx)
    num_tokens = len(tokenizer.encode(source.render(selection.files.directory, selection.resolved), special=True))
    least = round(num_tokens - (1 - ratio) * may_leave)
    if settings.overflow == "evict" or least <= _SURE * limit:
        return
    what = f"the prompt does not fit into the context with --compress {ratio:g}"
    why = f"of its {num_tokens:,} tokens {least:,} would stay, and there is room for {limit:,}"
    needed = min(longest, least * 5 // 4)
    fixes = [*_fitting(may_leave, num_tokens, limit), *([Fix.flag("--ctx", needed)] if least < longest else [])]
    raise ContextOverflowError(what, why=why, fix=fixes or "shorten the prompt")


def compressed(
    cli: CliContext, selection: Selection, source: Source, flags: Mapping[str, Any], text: str | None
) -> Source:
    """Return the source with less context where that is asked for, and say what left. text: the prompt that is typed,
    which stays.

    Raises UsageError where nothing may leave, ModelNotFoundError, and what keeps the judge from being loaded.
    """
    from localllm.text.tokenizer import Tokenizer

    if flags["compress"] is None:
        return source
    assert source.chat is not None
    question = argument_text(text, "the prompt") if text else ""
    for name in source.verbatim:
        cli.output.note(f"--compress leaves {name} as it is: by its name it is no prose")
    whole = compressible(source.chat.messages, question, list(source.verbatim.values()))
    if not whole.passages:
        why = "files, piped text and the user's messages have no prose but what is asked; code and tables stay"
        raise UsageError("--compress has nothing to remove", why=why, fix=_WHOLE)
    judge, tokenizer = _judge_of(selection.resolved, flags["compress_with"]), Tokenizer.load(selection.files.directory)
    if flags["cascade"] is None:  # the next model may have room for it
        _require_room(selection, source, whole.cost(tokenizer), flags["compress"], tokenizer)
    messages, told = _judged(cli, judge, whole, flags, tokenizer)
    cli.output.note(
        f"compressed the context: {told.tokens_after:,} of {told.tokens_before:,} tokens kept (judge: {told.judge})"
    )
    return replace(source, chat=replace(source.chat, messages=messages), compression=told)


def _judge_of(resolved: ResolvedSettings, word: str | None) -> Selection:
    own = {name: (getattr(resolved.settings, name), resolved.origins[name]) for name in _OF_MACHINE}
    try:
        judge = selected(ResolvedSettings().overlaid(own), word or BUILT_IN)
    except ModelNotFoundError as error:
        error.why = f"--compress-with names it; {error.why}"
        raise
    require_weights(judge.files)
    return judge


def _judged(
    cli: CliContext, selection: Selection, whole: Compressible, flags: Mapping[str, Any], tokenizer: Any
) -> tuple[list[dict[str, Any]], Compression]:
    from localllm.cli.load_progress import loading

    answering, cli.model = cli.model, selection.files  # whom an error is about
    with loading(cli, selection, Opening(), attaches=not flags["no_attach"]) as load:
        engine = load.wait()
        judge = Judge(selection.files.name, engine.tokenizer, engine.ctx)
        readings = list(whole.readings(judge))
        read = zip(readings, _read(cli, load.handle, readings), strict=True)
        found = whole.compressed(read, flags["compress"], judge, tokenizer)
    cli.model = answering
    return found


def _read(cli: CliContext, handle: EngineHandle, readings: list[Reading]) -> Iterator[list[float]]:
    """Yield the log-probabilities of each reading's ids; 0 for one that nothing predicts."""
    from localllm.engine.events import FinishedEvent, PrefillEvent
    from localllm.engine.request import Request

    with cli.output.progress("judging the context") as line:
        for number, reading in enumerate(readings, start=1):
            line.show(f"judging the context: {number} of {len(readings)}")
            logprobs: list[float] = []
            for event in handle.submit(Request(reading.ids, prompt_logprobs=0, reads_only=True)):
                if isinstance(event, PrefillEvent):
                    logprobs += [0.0 if each is None else each.logprob for each in event.logprobs]
                elif isinstance(event, FinishedEvent) and event.error is not None:
                    raise event.error
            yield logprobs
