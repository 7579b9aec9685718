"""`run --n`, `--best-of` and `--beams`: several answers to one prompt, or the best of many."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat.answer import MAX_ANSWERS, Answer, Piece, best, seeded, silence, statistics
from localllm.chat.context import evicted_fields, grown_text
from localllm.chat.miss_report import miss_fields
from localllm.chat.recorder import AnswerRecording, ChatRecorder
from localllm.chat.session import PendingTurn
from localllm.cli.context import CliContext
from localllm.cli.generate import Printing, answer_fields, event_fields, print_whole
from localllm.cli.options import option, refuse_together
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.stream import follow
from localllm.engine.events import Event, FinishedEvent, GrownEvent, PrefillEvent, Usage
from localllm.engine.request import MAX_BEAMS, Request, SamplingParams
from localllm.errors import Fix, UsageError
from localllm.settings import Accepts

if TYPE_CHECKING:
    from localllm.hub import ModelFiles
    from localllm.runtime.engine_handle import EngineHandle

SEPARATOR = "---"
_SEARCHING = {
    "--beams --best-of": "a search finds the best of many more answers",
    "--beams --top-k --top-p --min-p --typical-p --seed --speculate --draft-tokens": (
        "a search samples nothing and drafts nothing"
    ),
}
_SEVERAL = {
    "--batch": "a line of a job has one answer; write it down once for each that you want",
    "--show-prompt": "nothing is answered",
}
_ONE_ANSWER = "a chat goes on with one answer: --best-of and --beams give one"
_KNOWN_LATE = "which answers are the best is known when all are whole: --json"

CHOICE_OPTIONS = (
    option(
        "--n",
        f"N answers, with a line {SEPARATOR} between two. The chat keeps the first.",
        "N",
        int,
        accepts=Accepts("integer", 1, MAX_ANSWERS, usual="3"),
    ),
    option(
        "--best-of",
        "Have N answers computed and print the likeliest one, or --n of them.",
        "N",
        int,
        accepts=Accepts("integer", 1, MAX_ANSWERS, usual="3"),
    ),
    option(
        "--beams",
        "Search the likeliest answer with N beams instead of drawing it; --n prints more.",
        "N",
        int,
        accepts=Accepts("integer", 1, MAX_BEAMS, usual="4"),
    ),
)


@dataclass(frozen=True)
class AnswerChoice:
    """n: answers that are printed; count: that are drawn. beams: more than 1 has them searched."""

    n: int = 1
    count: int = 1
    beams: int = 1

    @property
    def is_plain(self) -> bool:
        """True for one answer, among which nothing is chosen."""
        return self.n == self.count == self.beams == 1

    @property
    def is_best_of(self) -> bool:
        return self.count > self.n

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how each answer is sampled. Raises UsageError where all would be the same."""
        if self.beams > 1:
            return replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
        if self.count > 1 and sampling.temperature == 0:
            why = "the likeliest token is always the same one, and so is the answer"
            raise UsageError(
                f"{self.count} answers at temperature 0 are one", why=why, fix=Fix.flag("--temperature", "0.8")
            )
        return sampling

    def requests(self, request: Request) -> list[Request]:
        if self.beams > 1:
            return [replace(request, beams=self.beams, num_answers=self.n, is_scored=True)]
        scored = replace(request, is_scored=self.is_best_of)
        several = [replace(scored, sampling=seeded(request.sampling, index)) for index in range(self.count)]
        return [several[0], *(replace(each, explains_miss=False) for each in several[1:])]


def choice_of(flags: Mapping[str, Any]) -> AnswerChoice:
    """Raises UsageError for flags that contradict each other."""
    n, beams = flags["n"] or 1, flags["beams"] or 1
    choice = AnswerChoice(n, n if beams == 1 and flags["best_of"] is None else flags["best_of"] or 1, beams)
    if beams > 1:
        choice = replace(choice, count=1)
        refuse_together(flags, _SEARCHING)
        if flags["temperature"]:
            what = f"--beams and --temperature {flags['temperature']:g} cannot go together"
            raise UsageError(what, why="a search draws nothing")
        if n > beams:
            why = "no more answers are found than there are beams"
            raise UsageError(f"--n {n} is more than --beams {beams}", why=why)
    elif choice.count < n:
        raise UsageError(f"--best-of {choice.count} is less than --n {n}", why="no more can be printed than there are")
    if not choice.is_plain:
        first = next(flag for flag in ("beams", "best_of", "n") if (flags[flag] or 1) > 1)
        typed = f"--{first.replace('_', '-')}"
        refuse_together(flags, {f"{typed} {other}": why for other, why in _SEVERAL.items()})
        if choice.n > 1:
            refuse_together(flags, {"--n --continue --session": _ONE_ANSWER})
        if choice.is_best_of:
            refuse_together(flags, {"--best-of --jsonl": _KNOWN_LATE})
    return choice


class _Streams:
    """The events of several requests in the order in which they come."""

    def __init__(self, service: EngineHandle, requests: Sequence[Request]) -> None:
        self._inbox: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._streams = [service.submit(request, self._inbox) for request in requests]
        self.request_ids = [stream.request_id for stream in self._streams]

    def __iter__(self) -> Iterator[Event]:
        num_open = len(self._streams)
        while num_open:
            event = self._inbox.get()
            if isinstance(event, BaseException):
                raise event
            num_open -= isinstance(event, FinishedEvent)
            yield event

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()


@dataclass
class _Answers:
    """The answers so far. others: the next best of a search."""

    request_ids: Sequence[int]
    each: list[Answer]
    others: list[Answer] = field(default_factory=list)

    @property
    def num_whole(self) -> int:
        return sum(answer.finished is not None for answer in self.each)

    def index(self, event: Event) -> int:
        return self.request_ids.index(event.request_id)

    def take(self, event: Event) -> Piece:
        if event.request_id not in self.request_ids:  # in place of an end: the engine did not stop in time
            assert isinstance(event, FinishedEvent)
            for answer in self.each:
                usage = Usage(answer.num_prompt_tokens, 0, len(answer.token_ids))
                answer.finished = answer.finished or replace(event, usage=usage)
            return Piece()
        piece = self.each[self.index(event)].take(event)
        for events in event.others if isinstance(event, FinishedEvent) else ():
            self.others.append(Answer(self.each[0].num_prompt_tokens, thinking=self.each[0].thinking))
            for other in events:
                self.others[-1].take(other)
        return piece


def print_chosen(
    front: CliContext,
    files: ModelFiles,
    service: EngineHandle,
    pending: PendingTurn,
    printing: Printing,
    recorder: ChatRecorder,
    choice: AnswerChoice,
) -> list[Answer]:
    """Print the answers that are chosen, each when it is known, and record the first of them; return all of them.

    Raises the error that ended any. Exits where the user has stopped them.
    """
    requests = choice.requests(pending.request)
    answers = [replace(pending, request=request).answer() for request in requests]
    with recorder.answering(answers[0]) as record:
        streams = _Streams(service, requests)
        shown = _Shown(front, files, pending, printing, choice, record, recorder.session_id)
        chosen = shown.follow(streams, _Answers(streams.request_ids, answers))
    if any(answer.finished is not None and answer.finished.finish_reason == "cancelled" for answer in answers):
        raise typer.Exit(front.interrupts.exit_code or 130)
    return chosen


@dataclass
class _Shown:
    """Prints the chosen answers."""

    front: CliContext
    files: ModelFiles
    pending: PendingTurn
    printing: Printing
    choice: AnswerChoice
    record: AnswerRecording
    session: str | None
    num_printed: int = 0

    def follow(self, streams: _Streams, answers: _Answers) -> list[Answer]:
        """Follow all answers to their ends, and return the chosen ones, the first of which is recorded."""
        in_turn = self.choice.n > 1 and self.choice.beams == 1 and not self.choice.is_best_of
        prints_in_turn = in_turn and self.printing.streams and not (self.printing.as_json or self.printing.as_events)
        if self.printing.as_events:
            self._begin(answers)
        with self.front.output.progress("answering") as line:
            num_prompt_tokens = answers.each[0].num_prompt_tokens
            for event, piece in follow(streams, answers.take, self.front.interrupts, num_prompt_tokens):
                if isinstance(event, GrownEvent):
                    line.interject(grown_text(event))
                if in_turn and event.request_id == answers.request_ids[0]:
                    self.record.write(piece.text)  # the first one is recorded as it comes
                if self.printing.as_events:
                    self._print_event(event, piece, answers)
                if prints_in_turn and isinstance(event, FinishedEvent):
                    line.clear()
                    self._print_whole(answers.each)
                line.show(_progress(event, answers))
        chosen = self._chosen(answers)
        if not in_turn:
            self.record.write(chosen[0].text)
        self.record.answer = chosen[0]
        self._end(chosen)
        failed = next((each.finished.error for each in answers.each if each.finished and each.finished.error), None)
        if failed is not None:
            raise failed
        return chosen

    def _chosen(self, answers: _Answers) -> list[Answer]:
        if self.choice.is_best_of:
            return best(answers.each, self.choice.n, _ending)
        return [*answers.each, *answers.others]

    def _begin(self, answers: _Answers) -> None:
        start = {"type": "start", "schema_version": SCHEMA_VERSION, "model": self.files.name, "session": self.session}
        first = answers.each[0]
        about = {"prompt_tokens": first.num_prompt_tokens, "seed": first.seed, "answers": self.choice.n}
        self.front.output.json({**start, **about, **evicted_fields(self.pending.evicted)})

    def _print_event(self, event: Event, piece: Piece, answers: _Answers) -> None:
        index = answers.index(event) if event.request_id in answers.request_ids else 0
        fields = {**event_fields(self.files, event, piece), "index": index}
        if isinstance(event, FinishedEvent) and index == 0:
            fields["cache_miss"] = miss_fields(self.pending.explained(event))
        self.front.output.json(fields)
        for place, events in enumerate(event.others if isinstance(event, FinishedEvent) else (), start=1):
            told = Answer(0, thinking=self.pending.thinking)
            for other in events:
                self.front.output.json({**event_fields(self.files, other, told.take(other)), "index": place})

    def _print_whole(self, answers: Sequence[Answer]) -> None:
        """Print the answers that are whole, in order, up to the first that is not."""
        while self.num_printed < len(answers) and answers[self.num_printed].finished is not None:
            if self.num_printed:
                self.front.output.line(SEPARATOR)
            print_whole(self.front.output, answers[self.num_printed], self.printing)
            self.num_printed += 1

    def _end(self, chosen: Sequence[Answer]) -> None:
        finished = _ending(chosen[0])
        if self.printing.as_json:
            missed = {"cache_miss": miss_fields(self.pending.explained(finished))}
            about = {**evicted_fields(self.pending.evicted), **missed, "session": self.session}
            self.front.output.json({**self._fields(chosen), **about})
        elif not self.printing.as_events:
            self._print_whole(chosen)
        for place, answer in enumerate(chosen, start=1):
            if (empty := silence(answer)) is not None:
                self.front.output.warn(f"answer {place}: {empty}" if len(chosen) > 1 else empty)
            if self.printing.statistics or _ending(answer).finish_reason == "cancelled":
                named = f"answer {place}: " if len(chosen) > 1 else ""
                self.front.output.note(named + statistics(answer) + _likelihood(_ending(answer)))

    def _fields(self, chosen: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON fields: of one answer as without a choice, of several as an array."""
        each = []
        for answer in chosen:
            fields = answer_fields(self.files, answer, with_logprobs=self.printing.logprobs)
            mean_logprob = _ending(answer).mean_logprob
            likelihood = {} if mean_logprob is None else {"mean_logprob": mean_logprob}
            each.append({**fields, "seed": answer.seed, **likelihood})
        if self.choice.n == 1:
            return each[0]
        common = {name: each[0].pop(name) for name in ("schema_version", "model")}
        kept = [{name: value for name, value in fields.items() if name not in common} for fields in each]
        return {**common, "answers": [{"index": index, **fields} for index, fields in enumerate(kept)]}


def _progress(event: Event, answers: _Answers) -> str:
    if isinstance(event, PrefillEvent) and event.done < event.total:
        return f"reading the prompt: {event.done} of {event.total} tokens"
    if len(answers.each) == 1:
        return "searching the answer"
    return f"answering: {answers.num_whole} of {len(answers.each)} are whole"


def _likelihood(finished: FinishedEvent) -> str:
    mean = finished.mean_logprob
    return "" if mean is None else f", log-probability {mean:.3f} per token"


def _ending(answer: Answer) -> FinishedEvent:
    assert answer.finished is not None
    return answer.finished
