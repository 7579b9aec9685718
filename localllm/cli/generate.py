"""Prints an answer: as text while it comes, as one JSON object, or as an object for each event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.chat.answer import Answer, Piece, Stream, finished_fields, logprob_fields, silence, statistics
from localllm.chat.context import evicted_fields, grown_fields, grown_text
from localllm.chat.miss_report import NEW, miss_fields
from localllm.chat.recorder import AnswerRecording, ChatRecorder
from localllm.chat.session import PendingTurn
from localllm.cli.context import CliContext
from localllm.cli.output import SCHEMA_VERSION, Output
from localllm.cli.stream import follow
from localllm.engine.events import Event, FinishedEvent, GrownEvent, PrefillEvent, TokenEvent
from localllm.errors import LocalLLMError
from localllm.runtime.selection import named

if TYPE_CHECKING:
    from localllm.hub import ModelFiles
    from localllm.runtime.engine_handle import EngineHandle


@dataclass(frozen=True)
class Printing:
    """How an answer is printed. shows_thoughts: thoughts are printed, too, on stderr."""

    as_json: bool = False
    as_events: bool = False
    streams: bool = True
    statistics: bool = False
    logprobs: bool = False
    shows_thoughts: bool = False


def print_answer(
    front: CliContext,
    files: ModelFiles,
    stream: Stream,
    pending: PendingTurn,
    record: AnswerRecording,
    printing: Printing,
    session: str | None = None,
) -> None:
    """Print an answer to its end. Raises the error that ended it, after its beginning has been printed.

    record: takes each event before it is printed: a text that a full disk behind stdout refuses is recorded.
    session: the saved chat that the JSON forms name.
    """
    answer = record.answer
    if printing.as_events:
        start = {"type": "start", "schema_version": SCHEMA_VERSION, "model": files.name, "session": session}
        about = {"prompt_tokens": answer.num_prompt_tokens, "seed": answer.seed}
        front.output.json({**start, **about, **evicted_fields(pending.evicted)})
        for event, piece in follow(stream, record.take, front.interrupts, record.answer.num_prompt_tokens):
            fields = event_fields(files, event, piece)
            if isinstance(event, FinishedEvent):
                fields["cache_miss"] = miss_fields(pending.explained(event))
            front.output.json(fields)
    elif printing.as_json or not printing.streams:
        for event, _ in follow(stream, record.take, front.interrupts, record.answer.num_prompt_tokens):
            if isinstance(event, GrownEvent):
                front.output.note(grown_text(event))
    else:
        _stream_text(front, stream, record, printing)
    finished = answer.finished
    assert finished is not None
    if printing.as_json:
        whole = answer_fields(files, answer, with_logprobs=printing.logprobs)
        missed = {"cache_miss": miss_fields(pending.explained(finished))}
        front.output.json({**whole, **evicted_fields(pending.evicted), **missed, "session": session})
    elif not printing.as_json and not printing.as_events and not printing.streams:
        print_whole(front.output, answer, printing)
    front.output.end_answer()
    if (empty := silence(answer)) is not None:
        front.output.warn(empty)
    if printing.statistics or finished.finish_reason == "cancelled":
        front.output.note(statistics(answer))
    if printing.statistics and (explanation := pending.explained(finished)) is not None and explanation.cause != NEW:
        front.output.note(str(explanation))
    if finished.error is not None:
        raise finished.error


def print_recorded(
    front: CliContext,
    files: ModelFiles,
    service: EngineHandle,
    pending: PendingTurn,
    printing: Printing,
    recorder: ChatRecorder,
) -> Answer:
    """Print the answer to the last question, as `print_answer` does, and record it."""
    with recorder.answering(pending.answer()) as record:
        print_answer(front, files, service.submit(pending.request), pending, record, printing, recorder.session_id)
    return record.answer


def print_whole(output: Output, answer: Answer, printing: Printing) -> None:
    """Print an answer that has ended, behind its thought."""
    if printing.shows_thoughts:
        output.thought(answer.thought)
    output.answer(answer.said)
    output.end_answer()


def _stream_text(front: CliContext, stream: Stream, record: AnswerRecording, printing: Printing) -> None:
    num_words, folds = 0, not printing.shows_thoughts  # of the thought
    with front.output.progress("reading the prompt") as line:
        for event, piece in follow(stream, record.take, front.interrupts, record.answer.num_prompt_tokens):
            num_words += len(piece.thought.split())
            if isinstance(event, GrownEvent):
                line.interject(grown_text(event))
            elif isinstance(event, PrefillEvent) and event.done < event.total:
                line.show(f"reading the prompt: {event.done} of {event.total} tokens")
            elif folds and record.answer.is_thinking:
                line.show(f"thinking: {num_words} words")
            else:
                line.clear()
            if not folds:
                front.output.thought(piece.thought)
            elif num_words and piece.said and front.output.animated:
                front.output.note(f"thought: {num_words} words; --show-thoughts shows them")
                folds = False
            front.output.answer(piece.said)


def answer_fields(files: ModelFiles, answer: Answer, *, with_logprobs: bool) -> dict[str, Any]:
    """Return the object of `run --json`."""
    assert answer.finished is not None
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": files.name,
        "text": answer.said,
        **_reasoning(answer.thought),
        "token_ids": answer.token_ids,
        **finished_fields(answer.finished),
    }
    if with_logprobs:
        fields["logprobs"] = [logprob_fields(logprob) for logprob in answer.logprobs]
    if answer.finished.error is not None:
        fields["error"] = error_fields(files, answer.finished.error)
    return fields


def _reasoning(thought: str) -> dict[str, str]:
    """Absent where nothing was thought."""
    return {"reasoning": thought} if thought else {}


def event_fields(files: ModelFiles, event: Event, piece: Piece) -> dict[str, Any]:
    """Return a line of `run --jsonl`. piece: of the answer, as the event adds it."""
    if isinstance(event, GrownEvent):
        return grown_fields(event)
    if isinstance(event, PrefillEvent):
        return {"type": "prefill", "done": event.done, "total": event.total}
    if isinstance(event, TokenEvent):
        fields: dict[str, Any] = {"type": "token", "token_id": event.token_id, "text": piece.said}
        fields |= _reasoning(piece.thought)
        return fields if event.logprob is None else {**fields, "logprob": logprob_fields(event.logprob)}
    fields = {"type": "finish", "text": piece.said, **_reasoning(piece.thought), **finished_fields(event)}
    return fields if event.error is None else {**fields, "error": error_fields(files, event.error)}


def error_fields(files: ModelFiles, error: Exception) -> Mapping[str, str]:
    """Return an error's four lines for the JSON forms."""
    if isinstance(error, LocalLLMError):
        named(error, files)
        return {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "more": error.more}
    return {"code": "bug", "what": type(error).__name__, "why": str(error), "fix": "", "more": "localllm help bug"}
