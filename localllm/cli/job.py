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
from localllm.cli.batch_input import Prompts
from localllm.cli.context import CliContext
from localllm.cli.generate import answer_fields
from localllm.cli.interrupts import Interrupted
from localllm.cli.journal import SYNC_S, Journal
from localllm.cli.output import ProgressLine, ReaderGoneError
from localllm.cli.source import Encoder
from localllm.config import format_figure
from localllm.engine.events import Event, FinishedEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from localllm.runtime.engine_handle import EngineHandle, Inbox
    from localllm.runtime.selection import Selection

_DRAW_S, _LOG_S = 0.1, 30.0  # between two reports of progress: on a terminal, and in a log
SEEDS = 2**31


@dataclass(frozen=True)
class _Running:
    """A prompt that the engine has."""

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
    """The prompts of one job on their way.

    first_seed: where nobody named one, each prompt's is this and its index.
    """

    def __init__(
        self, cli: CliContext, selection: Selection, prompts: Prompts, encoder: Encoder, journal: Journal
    ) -> None:
        self.tally = JobTally()
        self.prompts = prompts
        self.num_before = len(journal)
        self.first_seed = journal.seed
        self._cli = cli
        self._files, self._adapters = selection.files, selection.adapters()
        self._encoder = encoder
        self._journal = journal
        self._inbox: Inbox = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}  # by the engine's number
        self._failed: dict[int, dict[str, Any]] = {}  # not printed yet
        self._num_printed = 0

    @property
    def num_answers(self) -> int:
        """The number of answers of this run and the ones before."""
        return len(self._journal)

    def run(self, handle: EngineHandle, *, window: int) -> None:
        """Answers what is not answered; at most `window` prompts are in the engine's hands.

        The journal is removed when every prompt has its answer and all are printed. Raises Interrupted, what broke the
        engine, and ReaderGoneError; what was answered until then is kept.
        """
        output, interrupts = self._cli.output, self._cli.interrupts
        interrupts.farewell = self._farewell()
        if self.num_before:
            output.note(f"{self.num_before} of {len(self.prompts)} answers were there from a run that was interrupted")
        try:
            with (
                interrupts.stopping(lambda: self._inbox.put(Interrupted(interrupts.exit_code or 130))),
                output.progress("answering") as line,
            ):
                self._answer(handle, window, line)
        except ReaderGoneError:
            raise
        except Exception:
            output.note(self._farewell())
            raise
        interrupts.farewell = ""
        if not self.tally.num_failed:
            output.settle()
            self._journal.remove()

    def _answer(self, handle: EngineHandle, window: int, line: ProgressLine) -> None:
        waiting = (index for index in range(len(self.prompts)) if index not in self._journal)
        began = shown_at = time.monotonic()
        output = self._cli.output
        self._print()
        while self._num_printed < len(self.prompts):
            self._submit(handle, waiting, window)
            try:
                item = self._inbox.get(timeout=SYNC_S)
            except queue.Empty:
                pass
            else:
                if isinstance(item, BaseException):
                    raise item
                self._take(item)
            self._journal.sync()
            now = time.monotonic()
            self.tally.elapsed_s = now - began
            # Where answers are printed on a terminal, they show how far the job is.
            if not output.stdout_is_terminal and now - shown_at >= (_DRAW_S if output.animated else _LOG_S):
                shown_at = now
                rate = self.tally.tokens_per_s
                text = f"{len(self._journal) + self.tally.num_failed} of {len(self.prompts)} answers"
                (line.show if output.animated else output.note)(
                    text if rate is None else f"{text}, {format_figure(rate)} tok/s"
                )
            self._print()

    def _submit(self, handle: EngineHandle, waiting: Iterator[int], window: int) -> None:
        while len(self._running) < window and (index := next(waiting, None)) is not None:
            line = self.prompts[index]
            # The seed that was named, as `run` would take it; else one for each line, so that a prompt may be repeated.
            seed = (self.first_seed + index) % SEEDS if line.sampling.seed is None else line.sampling.seed
            sampling = replace(line.sampling, seed=seed)
            ids = self._encoder.encode(line.source)
            thinking = self._encoder.thinking(ids)
            form = thinking.grammar(self.prompts.rules.grammar)
            request = Request(
                ids,
                sampling,
                opens_turn=line.source.opens_turn,
                grammar=form,
                shown_ids=thinking.shown_ids,
                adapters=self._adapters,
            )
            answer = Answer(len(ids), seed, thinking=thinking)
            request_id = handle.submit(request, self._inbox.put).request_id
            self._running[request_id] = _Running(index, line.id, sampling, answer)

    def _take(self, event: Event) -> None:
        running = self._running[event.request_id]
        running.answer.take(event)
        if isinstance(event, TokenEvent):
            self.tally.completion_tokens += 1
        if not isinstance(event, FinishedEvent):
            return
        del self._running[event.request_id]
        self.tally.prompt_tokens += event.usage.prompt_tokens
        if event.speculation is not None:
            self.tally.drafted += event.speculation.drafted
            self.tally.accepted += event.speculation.accepted
        sampling = running.sampling
        fields = answer_fields(self._files, running.answer, with_logprobs=sampling.logprobs is not None)
        head = {"schema_version": fields.pop("schema_version"), "index": running.index}
        name = {} if running.id is None else {"id": running.id}
        fields = {**head, **name, **fields, "seed": sampling.seed}
        if event.error is None:
            self._journal.append(fields)
            self._cli.interrupts.farewell = self._farewell()
        else:  # not kept: the next run tries it again
            self._failed[running.index] = fields
            self.tally.num_failed += 1

    def _print(self) -> None:
        """Print every answer before which none is missing."""
        while self._num_printed < len(self.prompts):
            index = self._num_printed
            if index in self._failed:
                fields = self._failed.pop(index)
            elif index in self._journal:
                fields = self._journal[index]
            else:
                return
            self._cli.output.json(fields)
            self._num_printed += 1
            self._count(index, fields)

    def _count(self, index: int, fields: dict[str, Any]) -> None:
        is_cut = fields["finish_reason"] == "length"
        self.tally.num_incomplete += fields.get("complete") is False and "error" not in fields
        self.tally.num_silent += not fields["text"].strip() and ("reasoning" in fields or is_cut)
        max_tokens = self.prompts[index].sampling.max_tokens
        if is_cut and fields["usage"]["completion_tokens"] != max_tokens:
            self.tally.num_cut_by_context += 1
        elif is_cut and max_tokens == self.prompts.rules.sampling.max_tokens:
            self.tally.num_cut_by_max_tokens += 1

    def _farewell(self) -> str:
        kept = f"{len(self._journal)} of {len(self.prompts)} answers are kept"
        return f"interrupted; {kept}. To go on: the same command"
