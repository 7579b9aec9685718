"""Answers many prompts with one engine: keeps it busy, journals each answer, prints them in the order of the prompts.

Knows a journal and a place to print; knows nothing of how the prompts were read or which job they are.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.chat.answer import Answer
from localllm.cli.batch_input import BatchLine, Prompts
from localllm.cli.context import CliContext
from localllm.cli.generate import answer_fields
from localllm.cli.interrupts import Interrupted
from localllm.cli.journal import SYNC_S, Journal
from localllm.cli.output import ReaderGoneError
from localllm.cli.source import Encoder
from localllm.config import format_figure
from localllm.engine.events import Event, FinishedEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from localllm.hub import ModelFiles
    from localllm.runtime.engine_handle import Inbox
    from localllm.runtime.engine_thread import EngineThread

_DRAW_S, _LOG_S = 0.1, 30.0  # between two reports of progress: on a terminal, and in a log
SEEDS = 2**31


@dataclass(frozen=True)
class _Asked:
    """One prompt that the engine has."""

    index: int
    id: str | int | None
    sampling: SamplingParams
    answer: Answer


@dataclass
class JobTally:
    """The counts of a job. Tokens are those of this run; the rest counts answers that were there before, too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0  # tokens
    accepted: int = 0  # those of them that were right
    elapsed_s: float = 0.0
    num_failed: int = 0
    num_cut_by_max_tokens: int = 0  # of the job, not of a line of its own
    num_cut_by_context: int = 0
    num_silent: int = 0  # that ended before anything was said
    num_incomplete: int = 0  # that have not the form of the job's grammar

    @property
    def tokens_per_s(self) -> float | None:
        """None where nothing was answered."""
        return self.completion_tokens / self.elapsed_s if self.completion_tokens and self.elapsed_s > 0 else None


class Job:
    """The prompts of one job on their way."""

    def __init__(
        self, front: CliContext, files: ModelFiles, prompts: Prompts, encoder: Encoder, journal: Journal
    ) -> None:
        self.tally = JobTally()
        self.num_before = len(journal)
        self.first_seed = journal.seed  # where nobody named one: each prompt's is this and its index
        self._front = front
        self._files = files
        self._prompts = prompts
        self._encoder = encoder
        self._journal = journal
        self._inbox: Inbox = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}  # by the engine's number
        self._failed: dict[int, dict[str, Any]] = {}  # not printed yet
        self._num_printed = 0

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_answers(self) -> int:
        """The number of answers of this run and the ones before."""
        return len(self._journal)

    def run(self, service: EngineThread, *, window: int) -> None:
        """Answers what is not answered; at most `window` prompts are in the engine's hands.

        The journal is removed when every prompt has its answer and all are printed. Raises Interrupted, what broke the
        engine, and ReaderGoneError; what was answered until then is kept.
        """
        interrupts = self._front.interrupts
        interrupts.farewell = self._farewell()
        if self.num_before:
            count = f"{self.num_before} of {len(self._prompts)} answers"
            self._front.output.note(f"{count} were there from a run that was interrupted")
        try:
            with interrupts.stopping(lambda: self._inbox.put(Interrupted(interrupts.exit_code or 130))):
                self._answer(service, window)
        except ReaderGoneError:
            raise
        except Exception:
            self._front.output.note(self._farewell())
            raise
        interrupts.farewell = ""
        if not self.tally.num_failed:
            self._front.output.settle()
            self._journal.remove()

    def _answer(self, service: EngineThread, window: int) -> None:
        waiting = (index for index in range(len(self._prompts)) if index not in self._journal)
        progress = _Progress(self._front, len(self._prompts))
        began = time.monotonic()
        with progress.line:
            while True:
                self._print()
                if self._num_printed == len(self._prompts):
                    return
                self._submit(service, waiting, window)
                event = self._next()
                if event is not None:
                    self._take(event)
                self._journal.sync()
                self.tally.elapsed_s = time.monotonic() - began
                progress.show(len(self._journal) + self.tally.num_failed, self.tally.tokens_per_s)

    def _submit(self, service: EngineThread, waiting: Iterator[int], window: int) -> None:
        while len(self._asked) < window and (index := next(waiting, None)) is not None:
            line = self._prompts[index]
            sampling = replace(line.sampling, seed=self._seed(index, line))
            ids = self._encoder.encode(line.source)
            thinking = self._encoder.thinking(ids)
            form = thinking.grammar(self._prompts.rules.grammar)
            request = Request(
                ids, sampling, opens_turn=line.source.opens_turn, grammar=form, shown_ids=thinking.shown_ids
            )
            request_id = service.submit(request, self._inbox).request_id
            self._asked[request_id] = _Asked(
                index, line.id, sampling, Answer(len(ids), sampling.seed, thinking=thinking)
            )

    def _seed(self, index: int, line: BatchLine) -> int:
        """The one that was named, as `run` would take it; else one for each line, so that a prompt may be repeated."""
        return (self.first_seed + index) % SEEDS if line.sampling.seed is None else line.sampling.seed

    def _next(self) -> Event | None:
        try:
            item = self._inbox.get(timeout=SYNC_S)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def _take(self, event: Event) -> None:
        asked = self._asked[event.request_id]
        asked.answer.take(event)
        if isinstance(event, TokenEvent):
            self.tally.completion_tokens += 1
        if not isinstance(event, FinishedEvent):
            return
        del self._asked[event.request_id]
        self.tally.prompt_tokens += event.usage.prompt_tokens
        if event.speculation is not None:
            self.tally.drafted += event.speculation.drafted
            self.tally.accepted += event.speculation.accepted
        fields = self._fields(asked)
        if event.error is None:
            self._journal.append(fields)
            self._front.interrupts.farewell = self._farewell()
        else:  # not kept: the next run tries it again
            self._failed[asked.index] = fields
            self.tally.num_failed += 1

    def _fields(self, asked: _Asked) -> dict[str, Any]:
        """A line of the output."""
        with_logprobs = asked.sampling.logprobs is not None
        fields = answer_fields(self._files, asked.answer, with_logprobs=with_logprobs)
        head = {"schema_version": fields.pop("schema_version"), "index": asked.index}
        name = {} if asked.id is None else {"id": asked.id}
        return {**head, **name, **fields, "seed": asked.sampling.seed}

    def _print(self) -> None:
        """Every answer before which none is missing."""
        while self._num_printed < len(self._prompts):
            index = self._num_printed
            if index in self._failed:
                fields = self._failed.pop(index)
            elif index in self._journal:
                fields = self._journal[index]
            else:
                return
            self._front.output.json(fields)
            self._num_printed += 1
            self._count_if_cut(index, fields)

    def _count_if_cut(self, index: int, fields: dict[str, Any]) -> None:
        self.tally.num_incomplete += fields.get("complete") is False and "error" not in fields
        self.tally.num_silent += not fields["text"].strip() and (
            "reasoning" in fields or fields["finish_reason"] == "length"
        )
        if fields["finish_reason"] != "length":
            return
        max_tokens = self._prompts[index].sampling.max_tokens
        if fields["usage"]["completion_tokens"] != max_tokens:
            self.tally.num_cut_by_context += 1
        elif max_tokens == self._prompts.rules.sampling.max_tokens:
            self.tally.num_cut_by_max_tokens += 1

    def _farewell(self) -> str:
        kept = f"{len(self._journal)} of {len(self._prompts)} answers are kept"
        return f"interrupted; {kept}. To go on: the same command"


class _Progress:
    """The progress of a job: a line on the terminal, or now and then one in a log. Silent where the answers show it."""

    def __init__(self, front: CliContext, total: int) -> None:
        self.line = front.output.progress("answering")
        self._output = front.output
        self._total = total
        self._interval_s = _DRAW_S if front.output.animated else _LOG_S
        self._shown_at = time.monotonic()

    def show(self, done: int, tokens_per_s: float | None) -> None:
        now = time.monotonic()
        if self._output.stdout_is_terminal or now - self._shown_at < self._interval_s:
            return
        self._shown_at = now
        rate = "" if tokens_per_s is None else f", {format_figure(tokens_per_s)} tok/s"
        text = f"{done} of {self._total} answers{rate}"
        if self._output.animated:
            self.line.show(text)
        else:
            self._output.note(text)
