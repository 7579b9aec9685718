"""One step of the engine: schedule, forward, postprocess."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.engine.card import require_no_fault
from localllm.engine.events import Event, FinishedEvent, PrefillEvent, StepSplit, TokenEvent, TokenLogprob, ignore
from localllm.engine.memory import is_device_out_of_memory, is_out_of_memory, out_of_memory
from localllm.engine.residency import Residency
from localllm.engine.runner import ModelRunner
from localllm.engine.sampler import PlainDraw, next_token, token_logprob
from localllm.engine.scheduler import Scheduled, Scheduler
from localllm.engine.scores import Scores
from localllm.engine.sequence import Sequence
from localllm.engine.speculative.speculator import Speculation
from localllm.engine.step_types import Chunk, StepCancelledError, StepOutput
from localllm.errors import LocalLLMError
from localllm.models.load import Progress

if TYPE_CHECKING:
    from localllm.engine.beam_search import BeamSearch

_REPORT_S = 0.2  # between two reports of one forward

Computed = tuple[Sequence, Chunk, StepOutput]


class StepLoop:
    """Runs the sequences of a scheduler. Whoever calls `step` owns the device."""

    def __init__(
        self,
        residency: Residency,
        scheduler: Scheduler,
        speculation: Speculation,
        eos_ids: frozenset[int],
        text_of: Callable[[int], str],
        model_name: str,
    ) -> None:
        """text_of: the text of a token, for its log-probability. model_name: for people."""
        self.residency, self.scheduler, self.speculation = residency, scheduler, speculation
        self.kv_allocator = scheduler.allocator
        self.eos_ids, self._text_of, self._model_name = eos_ids, text_of, model_name
        self.load_s = 0.0
        self._searches: dict[int, BeamSearch] = {}  # by request
        self._scores = Scores()
        self._forward_began = 0.0

    def step(self, report: Callable[[Event], None] = ignore) -> list[Event]:
        """Run one forward and return what came of it; [] where there is nothing to do.

        `report` is called while it runs, a few times a second, with how far the prompts are. Raises CardFaultError
        where a GPU computes nothing for this process any more.
        """
        events, has_prepared = self._drop_aborted(), False
        scheduled: Scheduled = ()
        try:
            is_between = self.scheduler.waiting and not self.scheduler.running
            if (is_between or self.residency.is_lost) and (prepared := self._prepare()):
                return events + prepared  # before anything is reported of the forward that follows
            has_prepared = True
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return events
            if self._searches:
                from localllm.engine.beam_search import with_beams

                scheduled = with_beams(scheduled, self._searches)
            computed = self._forward(scheduled, report)
        except StepCancelledError:
            _recover(scheduled)
            return events + self._drop_aborted()
        except (MemoryError, RuntimeError, LocalLLMError) as error:
            _recover(scheduled)
            self._require_no_fault(error)
            if has_prepared and self._gives_way(error, scheduled):  # the next step tries again
                return events
            ended = [sequence for sequence, _ in scheduled]
            if not ended:
                ended = [self.scheduler.waiting[0]] if has_prepared else self.scheduler.sequences
            return events + [self._fail(sequence, error) for sequence in dict.fromkeys(ended)]
        events += self._postprocess(computed)
        if not self.scheduler.running:
            self.residency.end_answers()
        return events

    def _require_no_fault(self, error: Exception) -> None:
        require_no_fault(self.residency.device, error, self._model_name)

    def _gives_way(self, error: Exception, scheduled: Scheduled) -> bool:
        num_rows = sum(chunk.num_rows for _, chunk in scheduled)
        return (
            self.residency.give_up_graphs(error)
            or (num_rows > 0 and self.speculation.gives_way(error))
            or self.kv_allocator.gives_way(error, num_rows)
        )

    def _prepare(self) -> list[Event]:
        """Do what is due between answers. Raises as `Residency.move`."""
        raise NotImplementedError

    # Forward

    def _forward(self, scheduled: Scheduled, report: Callable[[Event], None]) -> list[Computed]:
        """Run one forward over the scheduled chunks and the tokens that are drafted behind them."""
        runner, ids = self.residency.runner, {sequence.request_id for sequence, _ in scheduled}
        # The others of a hybrid would begin anew: their states have changed in place.
        has_states = bool(self.residency.config.state_shapes)
        is_cancelled = self.scheduler.is_cancelled(ids, all_of_them=has_states)
        with self._clocks(scheduled):
            if self.speculation.is_on:
                scheduled = self.speculation.drafted(scheduled, is_cancelled)
            self._forward_began = time.perf_counter()
            # The next step is very likely one of a token for each of the same sequences.
            goes_on = not self.scheduler.num_waiting and (not self.speculation.is_on or self.speculation.rests)
            outputs = _sampled_on_device(runner, scheduled, goes_on=goes_on) if runner.gpu_program is not None else None
            if outputs is None:
                outputs = _computed(runner, scheduled, is_cancelled, _prefill_reports(scheduled, report))
        return [(sequence, chunk, out) for (sequence, chunk), out in zip(scheduled, outputs, strict=True)]

    @contextmanager
    def _clocks(self, scheduled: Scheduled) -> Iterator[None]:
        """Add what a forward takes to the clock of each of its requests."""
        sequences = dict.fromkeys(sequence for sequence, _ in scheduled)
        began, before = time.perf_counter(), self.residency.stream_clock
        for sequence in sequences:
            sequence.clock.prefill_started = sequence.clock.prefill_started or began
        yield
        clock = self.residency.stream_clock
        wait_s = clock.wait_s - before.wait_s
        split = StepSplit(
            compute_s=time.perf_counter() - began - wait_s,
            wait_s=wait_s,
            copy_s=clock.reading_s - before.reading_s + clock.sending_s - before.sending_s,
            copied_bytes=clock.bytes_read - before.bytes_read + clock.bytes_sent - before.bytes_sent,
        )
        for sequence in sequences:
            sequence.clock.split += split
            sequence.clock.ran_alone &= len(scheduled) == 1

    # Postprocess

    def _postprocess(self, computed: SequenceOf[Computed]) -> list[Event]:
        """Make what was computed part of its sequences; return what came of it."""
        events: list[Event] = []
        for sequence, chunk, output in self._with_followers(computed):
            if sequence.finish_reason is not None:  # another beam of it has failed
                continue
            try:
                for event in self._take(sequence, chunk, output):
                    events.append(event)  # one by one: what was sampled before a failure was reported
            except Exception as error:  # one request's failure ends that request, not the others and not the engine
                self._require_no_fault(error)
                events.append(self._fail(sequence, error))
        if self.speculation.is_on:
            self.speculation.learn(time.perf_counter() - self._forward_began)
        return events

    def _with_followers(self, computed: SequenceOf[Computed]) -> Iterator[Computed]:
        """Yield what was computed, and behind a prompt the followers that waited for all of it: its logits are theirs
        as well. They branch off before anything is sampled, which may end it."""
        for sequence, chunk, output in computed:
            length = chunk.kv.length
            followers: list[Sequence] = []
            if self.scheduler.waiting and chunk.kv is sequence.kv and output.logits is not None:
                is_prefilled = length == sequence.num_prompt_tokens == len(sequence.token_ids)
                followers = self.scheduler.follow(sequence) if is_prefilled and output.are_finite[0] else []
            yield sequence, chunk, output
            for follower in followers:
                assert follower.kv is not None
                yield follower, replace(chunk, token_ids=follower.token_ids, kv=follower.kv), output

    def _take(self, sequence: Sequence, chunk: Chunk, output: StepOutput) -> Iterator[Event]:
        """Yield how far a prompt is, or the next tokens; and the end, where it ends.

        Keys and values are those of its tokens afterwards, and cached for later prompts. Raises NonFiniteError where a
        token would have to be sampled from what is not a number, and what a mask raises.
        """
        num_before = len(sequence.token_ids)
        begin, length = chunk.kv.length - chunk.num_tokens, chunk.kv.length - chunk.num_drafted
        if not output.are_finite[0]:
            raise self.residency.runner.locate_non_finite(chunk.without_drafts(begin, length))
        search = self._searches.get(sequence.request_id)
        if search is not None and search.has_begun:
            yield from search.take(output)
        else:
            yield from self._taken(sequence, chunk, output, search)
        if sequence.finish_reason is not None:
            yield self._finished(sequence, search)
        elif chunk.kv.length == self.residency.config.rope_switch_length and len(sequence.token_ids) > num_before:
            # LongRoPE rotates all keys differently past its trained length: the old ones are computed anew.
            chunk.kv.trim(0)

    def _taken(
        self, sequence: Sequence, chunk: Chunk, output: StepOutput, search: BeamSearch | None
    ) -> Iterator[PrefillEvent | TokenEvent]:
        kv = chunk.kv  # has advanced over all of the chunk
        begin, length = kv.length - chunk.num_tokens, kv.length - chunk.num_drafted
        if not chunk.num_drafted:
            self._seal(sequence)
        is_prefill = sequence.num_completion_tokens == 0
        if is_prefill:
            logprobs = self._prompt_logprobs(sequence, begin, output.all_logits) if sequence.reads_logits else ()
            yield PrefillEvent(sequence.request_id, length, sequence.num_prompt_tokens, logprobs)
        if sequence.pool is not None:
            assert output.states is not None
            sequence.pool.take(output.states, begin)
            sequence.finish_reason = "stop" if length == len(sequence.token_ids) else None
        elif length < len(sequence.token_ids):
            return
        elif length >= sequence.max_length:
            sequence.end_prefill()
        elif search is not None:
            yield from search.take(output)
        else:
            yield from self._accepted(sequence, chunk, output, counts=not is_prefill)

    def _accepted(self, sequence: Sequence, chunk: Chunk, output: StepOutput, *, counts: bool) -> Iterator[TokenEvent]:
        """Sample behind the chunk and behind each drafted token, up to the first draft that is rejected."""
        kv, num_accepted = chunk.kv, 0
        begin, length = kv.length - chunk.num_tokens, kv.length - chunk.num_drafted
        for end in range(length, kv.length + 1):
            row = end - length
            if not output.are_finite[row]:
                raise self.residency.runner.locate_non_finite(chunk.without_drafts(begin, end))
            token_id, logprob = self._sampled(sequence, output, row)
            event = sequence.append(token_id, logprob, self.eos_ids)
            if event is not None:
                yield event
            is_accepted = row < chunk.num_drafted and chunk.token_ids[end] == token_id
            num_accepted += is_accepted
            if not is_accepted or sequence.finish_reason is not None:
                break
        if counts:
            sequence.draft_count.count(chunk.num_drafted, num_accepted, end + 1 - length)
        if chunk.num_drafted:
            kv.trim(end)
            self._seal(sequence)

    def _sampled(self, sequence: Sequence, output: StepOutput, row: int) -> tuple[int, TokenLogprob | None]:
        """Return the next token of a sequence that has taken in those of the rows before, with its logprob if
        wanted."""
        if output.logits is None:
            return output.token_ids[row], None
        sampling, began = sequence.request.sampling, time.perf_counter()
        token_id = _with_room(lambda logits: next_token(logits, sequence, sequence.token_ids), output.logits[row])
        sequence.clock.split += StepSplit(sample_s=time.perf_counter() - began)
        if sequence.likelihood is not None:
            sequence.likelihood.add(float(output.logits[row].log_softmax(-1)[token_id]))
        if sampling.logprobs is None:
            return token_id, None
        return token_id, token_logprob(output.logits[row], token_id, sampling.logprobs, self._text_of)

    def _prompt_logprobs(
        self, sequence: Sequence, begin: int, logits: Tensor | None
    ) -> tuple[TokenLogprob | None, ...]:
        """Return those of the prompt's tokens behind each from `begin` on, by the fp32 logits [T, V] in front of them;
        the first token has none. What was returned before a prompt was begun anew is left out."""
        most, ids = sequence.request.prompt_logprobs or 0, sequence.token_ids[begin + 1 :]
        rows = () if logits is None else zip(logits, ids, strict=False)
        logprobs = (token_logprob(row, token_id, most, self._text_of) for row, token_id in rows)
        found = (*([None] if begin == 0 else []), *logprobs)
        first = begin + 1 if begin else 0
        fresh = found[max(0, sequence.num_scored - first) :]
        sequence.num_scored += len(fresh)
        return fresh

    def _seal(self, sequence: Sequence) -> None:
        if sequence.kv is not None and sequence.kv.num_sealable != sequence.kv.num_sealed:
            self.kv_allocator.seal(sequence)

    # Ends

    def _finished(self, sequence: Sequence, search: BeamSearch | None) -> FinishedEvent:
        self._remove([sequence])
        finished = sequence.finished(self.load_s)
        if sequence.clock.ran_alone and sequence.request.prompt_logprobs is None:  # which take time of their own
            self._scores.take(finished, self.residency.plan, self.speculation.plain_s)
        return finished if search is None else replace(finished, others=search.others(self.load_s))

    def _fail(self, sequence: Sequence, error: Exception) -> FinishedEvent:
        sequence.finish_reason = "error"
        self._remove([sequence])
        if is_out_of_memory(error):
            error = out_of_memory(self.residency.device, error)
        return sequence.finished(self.load_s, error)

    def _drop_aborted(self) -> list[Event]:
        aborted = self.scheduler.take_in()
        if aborted:
            self._remove(aborted)
        for sequence in aborted:
            sequence.finish_reason = "cancelled"
        return [sequence.finished(self.load_s) for sequence in aborted]

    def _remove(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:  # first: a branch ends before what it is a branch of
            self.speculation.forget(sequence)
            if (search := self._searches.pop(sequence.request_id, None)) is not None:
                search.close()
        self.scheduler.remove(sequences)


def _recover(scheduled: Scheduled) -> None:
    """Let sequences begin anew whose states a forward has changed that came to nothing."""
    for _, chunk in scheduled:
        chunk.kv.recover()


def _prefill_reports(scheduled: Scheduled, report: Callable[[Event], None]) -> Progress:
    """Return what reports how far a forward is through its prompts, by its share of the blocks."""
    prompts = [
        (sequence, chunk)
        for sequence, chunk in scheduled
        if not sequence.num_completion_tokens and chunk.kv is sequence.kv  # a beam has one of its own
    ]
    reported_at = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal reported_at
        now = time.perf_counter()
        if done == total or now - reported_at < _REPORT_S:
            return
        reported_at = now
        for sequence, chunk in prompts:
            so_far = chunk.kv.length + chunk.num_tokens * done // total
            report(PrefillEvent(sequence.request_id, so_far, sequence.num_prompt_tokens))

    return progress


def _computed(
    runner: ModelRunner, scheduled: Scheduled, is_cancelled: Callable[[], bool], progress: Progress
) -> list[StepOutput]:
    """Return the logits behind each chunk; caches have advanced. Raises as `ModelRunner.forward`; nothing has advanced
    then, so that the step can be tried again."""
    chunks = [chunk for _, chunk in scheduled]
    if all(sequence.pool is None for sequence, _ in scheduled):
        logits = runner.forward(chunks, cancelled=is_cancelled, progress=progress, advances=False)
        outputs = _outputs(logits, chunks)
    else:
        logits, states = runner.forward_with_states(chunks, cancelled=is_cancelled, progress=progress)
        parts = torch.split(states, [chunk.num_tokens for chunk in chunks])
        outputs = [replace(output, states=part) for output, part in zip(_outputs(logits, chunks), parts, strict=True)]
    for chunk in chunks:
        chunk.kv.advance(chunk.num_tokens)
    return outputs


def _with_room(sample: Callable[[Tensor], int], logits: Tensor) -> int:
    """Sample from logits where they are; on the host where a full GPU has no room even for that: a few MB for a large
    vocabulary, of a step that is computed already."""
    try:
        return sample(logits)
    except RuntimeError as error:
        if not is_device_out_of_memory(error):
            raise
        return sample(logits.cpu())


def _outputs(logits: Tensor, chunks: SequenceOf[Chunk]) -> list[StepOutput]:
    """Split fp32 logits [R, V] by chunks. Waits for them."""
    are_finite = [math.isfinite(total) for total in logits.sum(dim=-1).tolist()]  # a sum with a NaN is none
    ends = itertools.accumulate((chunk.num_logits for chunk in chunks), initial=0)
    outputs = []
    for chunk, (a, b) in zip(chunks, itertools.pairwise(ends), strict=True):
        if chunk.all_logits:
            outputs.append(StepOutput(logits[b - 1 : b], (), [all(are_finite[a:b])], all_logits=logits[a:b]))
        else:
            outputs.append(StepOutput(logits[a:b], (), are_finite[a:b]))
    return outputs


def _sampled_on_device(runner: ModelRunner, scheduled: Scheduled, *, goes_on: bool) -> list[StepOutput] | None:
    """Return the tokens that a GPU's kernel sampled; None where it cannot sample all of them.

    goes_on: the next step is very likely one of a token for each of the same sequences. Raises as `ModelRunner.draw`.
    """
    draws = [PlainDraw.of_sequence(sequence) for sequence, _ in scheduled]
    plain, chunks = [draw for draw in draws if draw is not None], [chunk for _, chunk in scheduled]
    reach_ends = all(chunk.end == len(chunk.token_ids) for chunk in chunks)
    if len(plain) < len(draws) or not reach_ends or not runner.draws(chunks):
        return None
    goes_on = goes_on and all(len(sequence.token_ids) + 1 < sequence.max_length for sequence, _ in scheduled)
    tokens = runner.draw(chunks, plain, goes_on=goes_on and runner.model.config.rope_switch_length is None)
    if tokens is None:
        return None
    return [StepOutput(None, row, [token >= 0 for token in row]) for row in tokens]
