"""Beam search: the likeliest few of all answers that are begun are followed at once; the best is reported at the end.

The search is above the step: its request is one sequence for the scheduler, whose chunk becomes one of each beam. A
beam is a branch of the prompt's cache: full pages are shared, the open one is copied where a beam has two heirs, and a
beam without any gives its pages back at once. Which are followed, which are whole and when it ends is as in
transformers' `generate(num_beams=N, do_sample=False)` (Wu et al., arXiv:1609.08144, for the length penalty); beside the
end-of-sequence token and the length, a stop string makes an answer whole.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.engine.events import FinishedEvent, TokenEvent, TokenLogprob
from localllm.engine.kv_allocator import tokens_needed
from localllm.engine.request import Request
from localllm.engine.sampler import log_probabilities, token_logprob
from localllm.engine.sequence import Sequence as Running
from localllm.engine.step_types import Chunk, Limits, StepOutput
from localllm.errors import LocalLLMError, UsageError
from localllm.text.detokenizer import Detokenizer
from localllm.text.stop_strings import StopMatcher


@dataclass(frozen=True)
class Ends:
    """What ends an answer beside its length."""

    eos_ids: frozenset[int]
    rope_switch_length: int | None
    text_of: Callable[[int], str]  # of a token, for its log-probability


@dataclass(frozen=True)
class _StopText:
    """The text of a beam, as far as stop strings need it."""

    detokenizer: Detokenizer
    matcher: StopMatcher

    def then(self, token_id: int) -> tuple[_StopText, bool]:
        """Return it with one token more, and whether a stop string is in it now."""
        other = _StopText(self.detokenizer.copy(), copy.deepcopy(self.matcher))
        _, is_stopped = other.matcher.push(other.detokenizer.push(token_id))
        return other, is_stopped


@dataclass(frozen=True)
class _Hypothesis:
    """An answer that is begun, or whole."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0  # the sum of its tokens' log-probabilities as they are searched by
    logprobs: tuple[TokenLogprob, ...] = ()  # the plain ones, where they are asked for
    stop_text: _StopText | None = None
    parent: int = 0  # the beam that it continues
    is_whole: bool = False
    is_cut: bool = False  # it has ended, and does not meet its grammar


@dataclass(frozen=True)
class _Beam:
    """A hypothesis that is followed."""

    text: _Hypothesis
    token_ids: list[int]  # prompt and answer
    kv: PagedKV  # of all tokens but the last


class BeamSearch:
    """The search for one request's answer."""

    def __init__(self, sequence: Running, ends: Ends, new_sequence: Callable[[], Running], text: Detokenizer) -> None:
        """new_sequence: makes another sequence of the request, for a further answer. text: of an empty answer."""
        self._sequence, self._ends, self._new_sequence = sequence, ends, new_sequence
        stops = sequence.request.sampling.stop
        self._no_text = _StopText(text, StopMatcher(stops)) if stops else None
        self._others: list[tuple[Running, list[TokenEvent]]] = []
        self._width = sequence.request.beams
        self._beams: list[_Beam] = []
        self._logits: list[Tensor] = []  # of this step's beams, as they come
        # The best that have ended, the best first, each behind the score by which those of other lengths are compared.
        self._whole: list[tuple[float, _Hypothesis]] = []

    @property
    def has_begun(self) -> bool:
        return bool(self._beams)

    @property
    def chunks(self) -> list[Chunk]:
        """What the next step computes, once the search has begun."""
        return [Chunk(beam.token_ids, beam.kv, len(beam.token_ids) - beam.kv.length) for beam in self._beams]

    def take(self, output: StepOutput) -> Iterator[TokenEvent]:
        """Take the logits of the prompt, then those of each beam in turn: with the last of a step the search goes on.
        Yield the best answer when it ends.

        Raises what torch does where there is no memory for a branch, and LocalLLMError where no token is allowed.
        """
        assert output.logits is not None
        self._logits.append(output.logits[0])
        if len(self._logits) < max(1, len(self._beams)):
            return
        self._sequence.clock.ran_alone = False  # a step of several rows is not a measure of one of a single one
        texts = [beam.text for beam in self._beams] or [_Hypothesis(stop_text=self._no_text)]
        if not self.has_begun:
            self._sequence.clock.first_token = time.perf_counter()
        length = 1 + len(texts[0].token_ids)
        candidates = self._candidates(texts)
        self._logits = []
        best = [each for each in candidates if not each.is_whole][: self._width]
        penalty = length**self._sequence.request.length_penalty
        ended = ((each.score / penalty, each) for each in candidates[: self._width] if each.is_whole)
        self._whole = sorted([*self._whole, *ended], key=lambda each: (each[1].is_cut, -each[0]))[: self._width]
        if best and self._may_improve(best[0].score, length):
            self._follow(best)
            return
        self.close()
        yield from self._reported()

    def others(self, load_s: float) -> tuple[tuple[TokenEvent | FinishedEvent, ...], ...]:
        """Return the next best answers, each as its events."""
        return tuple((*events, other.finished(load_s)) for other, events in self._others)

    def close(self) -> None:
        """Give the beams' pages back; once or more often."""
        for beam in self._beams:
            self._sequence.num_evicted_tokens = max(self._sequence.num_evicted_tokens, beam.kv.num_evicted)
            beam.kv.close()
        self._beams = []

    def _candidates(self, texts: Sequence[_Hypothesis]) -> list[_Hypothesis]:
        """Return the best continuations of all beams, those that are cut last: with each end-of-sequence token once for
        each beam, there are still as many that go on."""
        rows, refusal = [], None
        for text, logits in zip(texts, self._logits, strict=True):
            try:
                token_ids = [*self._sequence.request.prompt_ids, *text.token_ids]
                rows.append(log_probabilities(logits, self._sequence, token_ids) + text.score)
            except LocalLLMError as error:  # this beam has come to a dead end
                refusal = error
                rows.append(torch.full_like(logits, -torch.inf))
        vocab_size = rows[0].shape[0]
        num_candidates = min(max(2, 1 + len(self._ends.eos_ids)) * self._width, len(rows) * vocab_size)
        scores, indices = torch.stack(rows).view(-1).topk(num_candidates)
        found = [
            self._candidate(texts, index // vocab_size, index % vocab_size, score)
            for score, index in zip(scores.tolist(), indices.tolist(), strict=True)
            if score > -torch.inf
        ]
        if not found and not self._whole:
            raise refusal or LocalLLMError("the answer cannot go on", why="no token has a likelihood above 0")
        return sorted(found, key=lambda each: each.is_cut)

    def _candidate(self, texts: Sequence[_Hypothesis], parent: int, token_id: int, score: float) -> _Hypothesis:
        before, sampling = texts[parent], self._sequence.request.sampling
        logprobs, stop_text, is_stopped = before.logprobs, before.stop_text, False
        is_whole = token_id in self._ends.eos_ids and not sampling.ignore_eos
        if stop_text is not None and not is_whole:
            stop_text, is_stopped = stop_text.then(token_id)
        if self._sequence.likelihood is not None or sampling.logprobs is not None:
            logprobs += (token_logprob(self._logits[parent], token_id, sampling.logprobs or 0, self._ends.text_of),)
        token_ids = (*before.token_ids, token_id)
        is_full = self._sequence.num_prompt_tokens + len(token_ids) >= self._sequence.max_length
        constraint = self._sequence.constraint
        is_whole = is_whole or is_stopped or is_full
        is_whole = is_whole or (constraint is not None and constraint.has_ended(token_ids))
        is_cut = is_whole and constraint is not None and (is_stopped or not constraint.is_met(token_ids))
        return _Hypothesis(token_ids, score, logprobs, stop_text, parent, is_whole, is_cut)

    def _may_improve(self, score: float, length: int) -> bool:
        """Return whether an answer may come that is better than the worst whole one. score: of the best beam."""
        request = self._sequence.request
        if len(self._whole) < self._width:
            return True
        if request.early_stopping is True:
            return False
        worst, text = self._whole[-1]
        if text.is_cut:
            return True
        if request.early_stopping == "never" and request.length_penalty > 0:
            length = self._sequence.max_length - self._sequence.num_prompt_tokens
        return bool(score / length**request.length_penalty > worst)

    def _follow(self, best: Sequence[_Hypothesis]) -> None:
        kvs = self._heirs([each.parent for each in best])
        prompt = self._sequence.request.prompt_ids
        self._beams = [_Beam(each, [*prompt, *each.token_ids], kv) for each, kv in zip(best, kvs, strict=True)]
        for kv in kvs:
            if kv.length == self._ends.rope_switch_length:  # as the engine does for an answer that is sampled
                kv.trim(0)

    def _heirs(self, parents: Sequence[int]) -> list[PagedKV]:
        """Return a cache for each that goes on: its parent's own for the first heir, a branch of that for any other.
        The prompt's stays the sequence's."""
        assert self._sequence.kv is not None
        owners, unclaimed = [beam.kv for beam in self._beams] or [self._sequence.kv], set(range(len(self._beams)))
        for index in unclaimed - set(parents):  # first: what they give back is enough for those that branch
            self._beams[index].kv.close()
        heirs: list[PagedKV] = []
        try:
            for parent in parents:
                kv = owners[parent]
                heirs.append(kv if parent in unclaimed else kv.branch(self._sequence.max_length))
                unclaimed.discard(parent)
        except BaseException:
            for kv in heirs:
                kv.close()
            raise
        return heirs

    def _reported(self) -> Iterator[TokenEvent]:
        """Yield the best answer, token by token, as if it had been sampled; the next best ones come with its end."""
        own, others = self._sequence, list[tuple[Running, list[TokenEvent]]]()
        (_, best), *rest = self._whole[: own.request.num_answers]
        for _, text in rest:
            other = self._new_sequence()
            other.fit(own.ctx)
            other.clock, other.num_cached_tokens, other.miss = copy.copy(own.clock), own.num_cached_tokens, own.miss
            other.num_evicted_tokens = own.num_evicted_tokens
            others.append((other, list(self._appended(other, text))))
        yield from self._appended(own, best)
        self._others = others

    def _appended(self, sequence: Running, text: _Hypothesis) -> Iterator[TokenEvent]:
        with_logprobs = sequence.request.sampling.logprobs is not None
        for place, token_id in enumerate(text.token_ids):
            logprob = text.logprobs[place] if text.logprobs else None
            if sequence.likelihood is not None and logprob is not None:
                sequence.likelihood.add(logprob.logprob)
            event = sequence.append(token_id, logprob if with_logprobs else None, self._ends.eos_ids)
            if event is not None:
                yield event
            assert (sequence.finish_reason is None) == (place + 1 < len(text.token_ids))


def with_beams(
    scheduled: Sequence[tuple[Running, Chunk]], searches: Mapping[int, BeamSearch]
) -> list[tuple[Running, Chunk]]:
    """Return the chunks of a step, with those of each beam in the place of a search's own."""
    beams: list[tuple[Running, Chunk]] = []
    for sequence, chunk in scheduled:
        search = searches.get(sequence.request_id)
        chunks = [chunk] if search is None or not search.has_begun else search.chunks
        beams += [(sequence, each) for each in chunks]
    return beams


def require_room(request: Request, ctx: int, limits: Limits) -> None:
    """Raise UsageError for beams that have no room beside each other, however long they wait."""
    num_prompt, beams = len(request.prompt_ids), request.beams
    answer = min(ctx - num_prompt, request.sampling.max_tokens or ctx)
    needed = tokens_needed(request, num_prompt + answer, limits)
    if needed <= limits.kv_tokens:
        return
    room = limits.kv_tokens - tokens_needed(request, num_prompt, limits)
    raise UsageError(
        f"{beams} beams of an answer of up to {answer} tokens have no room beside each other",
        why=f"they need the keys and values of {needed} tokens, and there is memory for {limits.kv_tokens}",
        fix=f"at most {room // beams} tokens of answer (max_tokens)" if room >= beams else "fewer beams",
    )
