"""Prints answers: as text while it comes, as one JSON object, or as an object for each event."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from localllm.chat.answer import Answer, Piece, best, finished_fields, logprob_fields, silence, statistics
from localllm.chat.cascade import Tried, judged
from localllm.chat.context import evicted_fields, grown_fields, grown_text
from localllm.chat.miss_report import NEW, miss_fields
from localllm.chat.pending_turn import PendingTurn
from localllm.chat.recorder import AnswerRecording
from localllm.cli.choices import SEPARATOR, AnswerChoice
from localllm.cli.context import CliContext
from localllm.cli.interrupts import Interrupted, Interrupts
from localllm.cli.output import SCHEMA_VERSION, ProgressLine
from localllm.engine.events import Event, FinishedEvent, GrownEvent, PrefillEvent, Timings, TokenEvent, Usage
from localllm.errors import LocalLLMError
from localllm.runtime.error_origins import named

if TYPE_CHECKING:
    from localllm.hub import ModelFiles
    from localllm.runtime.engine_handle import Inbox, RequestStream

ABORT_GRACE_S = 1.0  # how long a stopped request may take to say so: a step that is being computed ends first


def follow(
    streams: Sequence[RequestStream], inbox: Inbox, answers: Sequence[Answer], interrupts: Interrupts
) -> Iterator[tuple[int, Event]]:
    """Yield the events of requests as they come, each with the place of its request; the last of each is a
    FinishedEvent.

    The first signal aborts them and the events go on to their ends. Leaving the loop early aborts as well.
    """
    places = {stream.request_id: place for place, stream in enumerate(streams)}
    deadline: float | None = None
    try:
        # SimpleQueue.put may be called by a signal handler.
        with interrupts.stopping(lambda: inbox.put(Interrupted(interrupts.exit_code or 130))):
            while places:
                try:
                    item = inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except queue.Empty:  # the engine did not stop in time
                    request_id = next(iter(places))
                    answer = answers[places[request_id]]
                    usage = Usage(answer.num_prompt_tokens, 0, len(answer.token_ids))
                    item = FinishedEvent(request_id, "cancelled", usage, Timings())
                if isinstance(item, Interrupted):
                    for stream in streams:
                        stream.abort()
                    deadline = time.monotonic() + ABORT_GRACE_S
                elif isinstance(item, BaseException):
                    raise item
                else:
                    place = places[item.request_id]
                    if isinstance(item, FinishedEvent):
                        del places[item.request_id]
                    yield place, item
    finally:
        if places:
            for stream in streams:
                stream.abort()


@dataclass(frozen=True)
class Printing:
    """How an answer is printed. shows_thoughts: thoughts are printed, too, on stderr."""

    as_json: bool = False
    as_events: bool = False
    streams: bool = True
    statistics: bool = False
    logprobs: bool = False
    shows_thoughts: bool = False


@dataclass
class AnswerPrinter:
    """Prints the answers to one question that are chosen, each as soon as it can be, and records the first of them.

    record: takes each event before it is printed: a text that a full disk behind stdout refuses is recorded.
    session: the saved chat that the JSON forms name.
    tried: the models of a cascade, as far as they were asked; None without one.
    """

    cli: CliContext
    files: ModelFiles
    pending: PendingTurn
    printing: Printing
    record: AnswerRecording
    choice: AnswerChoice = field(default_factory=AnswerChoice)
    session: str | None = None
    tried: list[Tried] | None = None
    num_printed: int = 0
    num_thought_words: int = 0
    has_told_thought: bool = False

    def print(self, streams: Sequence[RequestStream], inbox: Inbox, answers: Sequence[Answer]) -> list[Answer]:
        """Print them to their ends, and return the chosen ones: none where they do not pass a cascade's bar. Raises the
        error that ended one of them."""
        choice, printing, output = self.choice, self.printing, self.cli.output
        is_live = printing.streams and choice.in_turn and not (printing.as_json or printing.as_events)
        others: list[Answer] = []  # the next best of a search
        held: list[tuple[int, Event, Piece]] = []  # events that are printed once the answer has passed
        if choice.bar is None:
            self._pass(answers[0])
        with output.progress("answering") as line:
            for place, event in follow(streams, inbox, answers, self.cli.interrupts):
                piece = answers[place].take(event)
                if choice.in_turn and place == 0:
                    self.record.write(piece.text)
                for events in event.others if isinstance(event, FinishedEvent) else ():
                    others.append(Answer(answers[0].num_prompt_tokens, thinking=self.pending.thinking))
                    for other in events:
                        others[-1].take(other)
                if printing.as_events and choice.bar is not None:
                    held.append((place, event, piece))
                elif printing.as_events:
                    self._print_event(place, event, piece)
                    continue
                if isinstance(event, GrownEvent):
                    line.interject(grown_text(event))
                if is_live and choice.is_plain:
                    self._print_piece(line, answers[0], event, piece)
                    continue
                if is_live and isinstance(event, FinishedEvent):
                    line.clear()
                    self._print_whole(answers)
                line.show(self._progress(event, answers))
        if choice.bar is not None:
            return self._judge(answers, held)
        chosen = best(answers, choice.n, _ending) if choice.is_best_of else [*answers, *others]
        if not choice.in_turn:
            self.record.write(chosen[0].text)
        self.record.answer = chosen[0]
        self._end(chosen, is_printed=is_live and choice.is_plain)
        _raise_failure(answers)
        return chosen

    def _judge(self, answers: Sequence[Answer], held: Sequence[tuple[int, Event, Piece]]) -> list[Answer]:
        """Print the one that passes, if any does, as it would have come; of stopped ones none does."""
        output, bar, tried = self.cli.output, self.choice.bar, self.tried
        assert bar is not None and tried is not None
        self.record.answer = Answer(0)  # nothing of what is held back is recorded
        _raise_failure(answers)
        if any(_ending(answer).finish_reason == "cancelled" for answer in answers):
            output.note("stopped before the answer was judged")
            return [*answers]
        judgement = judged(bar, [answer.said for answer in answers], [_ending(answer) for answer in answers])
        tried.append(Tried(self.files.name, judgement.confidence, judgement.is_accepted, judgement.fault))
        is_told = output.animated or self.printing.statistics
        if not judgement.is_accepted:
            if is_told:
                output.note(f"{self.files.name} is not sure: {tried[-1].reason(bar)}")
            return []
        chosen = answers[judgement.place]
        self._pass(chosen)
        for place, event, piece in held:
            if place == judgement.place:
                self._print_event(0, event, piece)
        self.record.write(chosen.text)
        self.record.answer = chosen
        self._end([chosen], is_printed=False)
        if is_told:
            output.note(f"{self.files.name} has answered: {tried[-1].reason(bar)}")
        return [chosen]

    def _pass(self, answer: Answer) -> None:
        """Begin to print: it is known which model answers."""
        if self.tried is not None and self.choice.bar is None:
            self.tried.append(Tried(self.files.name, None, is_accepted=True))
        if self.printing.as_events:
            start = {"type": "start", "schema_version": SCHEMA_VERSION, "model": self.files.name}
            about = {"session": self.session, "prompt_tokens": answer.num_prompt_tokens, "seed": answer.seed}
            several = {} if self.choice.is_plain else {"answers": self.choice.n}
            evicted = evicted_fields(self.pending.evicted)
            self.cli.output.json({**start, **about, **several, **evicted, **self._own_fields})

    @property
    def _own_fields(self) -> dict[str, Any]:
        """Return what only some commands have to say."""
        compression = self.pending.compression
        told = {} if compression is None else {"compression": compression.fields()}
        return told if self.tried is None else {**told, "cascade": [each.fields() for each in self.tried]}

    def _print_event(self, place: int, event: Event, piece: Piece) -> None:
        fields = event_fields(self.files, event, piece)
        if not self.choice.is_plain:
            fields["index"] = place
        if isinstance(event, FinishedEvent) and place == 0:
            fields["cache_miss"] = miss_fields(self.pending.explained(event))
        self.cli.output.json(fields)
        for index, events in enumerate(event.others if isinstance(event, FinishedEvent) else (), start=1):
            told = Answer(0, thinking=self.pending.thinking)
            for other in events:
                self.cli.output.json({**event_fields(self.files, other, told.take(other)), "index": index})

    def _print_piece(self, line: ProgressLine, answer: Answer, event: Event, piece: Piece) -> None:
        output, folds = self.cli.output, not self.printing.shows_thoughts
        self.num_thought_words += len(piece.thought.split())
        if isinstance(event, PrefillEvent) and event.done < event.total:
            line.show(self._progress(event, [answer]))
        elif folds and answer.is_thinking:
            line.show(f"thinking: {self.num_thought_words} words")
        elif not isinstance(event, GrownEvent):
            line.clear()
        if not folds:
            output.thought(piece.thought)
        elif self.num_thought_words and piece.said and output.animated and not self.has_told_thought:
            output.note(f"thought: {self.num_thought_words} words; --show-thoughts shows them")
            self.has_told_thought = True
        output.answer(piece.said)

    def _print_whole(self, answers: Sequence[Answer]) -> None:
        """Print the answers that are whole, in order, up to the first that is not."""
        output = self.cli.output
        while self.num_printed < len(answers) and answers[self.num_printed].finished is not None:
            answer = answers[self.num_printed]
            if self.num_printed:
                output.line(SEPARATOR)
            if self.printing.shows_thoughts:
                output.thought(answer.thought)
            output.answer(answer.said)
            output.end_answer()
            self.num_printed += 1

    def _progress(self, event: Event, answers: Sequence[Answer]) -> str:
        if isinstance(event, PrefillEvent) and event.done < event.total:
            return f"reading the prompt: {event.done} of {event.total} tokens"
        if self.choice.beams > 1:
            return "searching the answer"
        num_whole = sum(answer.finished is not None for answer in answers)
        return "answering" if len(answers) == 1 else f"answering: {num_whole} of {len(answers)} are whole"

    def _end(self, chosen: Sequence[Answer], *, is_printed: bool) -> None:
        output, printing = self.cli.output, self.printing
        explanation = self.pending.explained(_ending(chosen[0]))
        if printing.as_json:
            about = {**evicted_fields(self.pending.evicted), "cache_miss": miss_fields(explanation)}
            output.json({**self._fields(chosen), **about, "session": self.session, **self._own_fields})
        elif not printing.as_events and not is_printed:
            self._print_whole(chosen)
        output.end_answer()
        for place, answer in enumerate(chosen, start=1):
            place_name, finished = f"answer {place}: " if len(chosen) > 1 else "", _ending(answer)
            if (empty := silence(answer)) is not None:
                output.warn(place_name + empty)
            num_tokens = len(answer.token_ids)
            if finished.finish_reason == "cancelled" and not printing.statistics:
                output.note(f"{place_name}stopped after {num_tokens} token{'s' * (num_tokens != 1)}")
            if printing.statistics:
                mean = finished.mean_logprob
                likelihood = "" if mean is None else f", log-probability {mean:.3f} per token"
                output.note(place_name + statistics(answer) + likelihood)
        if printing.statistics and explanation is not None and explanation.cause != NEW:
            output.note(str(explanation))

    def _fields(self, chosen: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON fields: of one answer as they are, of several as an array."""
        each = [answer_fields(self.files, answer, with_logprobs=self.printing.logprobs) for answer in chosen]
        for fields, answer in zip(each, chosen, strict=True) if not self.choice.is_plain else ():
            fields["seed"] = answer.seed
            if (mean := _ending(answer).mean_logprob) is not None:
                fields["mean_logprob"] = mean
        if self.choice.n == 1:
            return each[0]
        common = {name: each[0][name] for name in ("schema_version", "model")}
        own = [{name: value for name, value in fields.items() if name not in common} for fields in each]
        return {**common, "answers": [{"index": index, **fields} for index, fields in enumerate(own)]}


def _ending(answer: Answer) -> FinishedEvent:
    assert answer.finished is not None
    return answer.finished


def _raise_failure(answers: Sequence[Answer]) -> None:
    """Raise the error that ended one of them."""
    for answer in answers:
        if (failure := _ending(answer).error) is not None:
            raise failure


def answer_fields(files: ModelFiles, answer: Answer, *, with_logprobs: bool) -> dict[str, Any]:
    """Return the object of `run --json`."""
    finished = _ending(answer)
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": files.name,
        "text": answer.said,
        **({"reasoning": answer.thought} if answer.thought else {}),
        "token_ids": answer.token_ids,
        **finished_fields(finished),
    }
    if with_logprobs:
        fields["logprobs"] = [logprob_fields(logprob) for logprob in answer.logprobs]
    if finished.error is not None:
        fields["error"] = error_fields(files, finished.error)
    return fields


def event_fields(files: ModelFiles, event: Event, piece: Piece) -> dict[str, Any]:
    """Return a line of `run --jsonl`. piece: of the answer, as the event adds it."""
    reasoning = {"reasoning": piece.thought} if piece.thought else {}
    match event:
        case GrownEvent():
            return grown_fields(event)
        case PrefillEvent():
            return {"type": "prefill", "done": event.done, "total": event.total}
        case TokenEvent():
            fields = {"type": "token", "token_id": event.token_id, "text": piece.said, **reasoning}
            return fields if event.logprob is None else {**fields, "logprob": logprob_fields(event.logprob)}
    fields = {"type": "finish", "text": piece.said, **reasoning, **finished_fields(event)}
    return fields if event.error is None else {**fields, "error": error_fields(files, event.error)}


def error_fields(files: ModelFiles, error: Exception) -> Mapping[str, str]:
    """Return an error's four lines for the JSON forms."""
    if isinstance(error, LocalLLMError):
        named(error, files)
        return {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "more": error.more}
    return {"code": "bug", "what": type(error).__name__, "why": str(error), "fix": "", "more": "localllm help bug"}
