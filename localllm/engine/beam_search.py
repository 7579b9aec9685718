"""Beam search: of all answers that are begun, the likeliest few are followed at once, and the best is told at the end.

A beam is a branch of the prompt's cache: full pages are shared, the open one is copied where a beam has two heirs, and
a beam without any gives its pages back at once. Which are followed, which are whole and when it ends is as in
transformers' `generate(num_beams=N, do_sample=False)` (Wu et al., arXiv:1609.08144, for the length penalty); beside the
end-of-sequence token and the length, a stop string makes an answer whole.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.engine.drawing import Outcome, log_probabilities
from localllm.engine.events import TokenEvent, TokenLogprob
from localllm.engine.request import Request
from localllm.engine.runner import Chunk
from localllm.engine.sampler import token_logprob
from localllm.engine.scheduler import Limits, tokens_needed
from localllm.engine.sequence import Sequence as Running
from localllm.errors import LocalLLMError, UsageError
from localllm.text.detokenizer import Detokenizer
from localllm.text.stop_strings import StopMatcher


@dataclass(frozen=True)
class Ends:
    """What ends an answer beside its length. text_of: of a token, for its log-probability."""

    eos_ids: frozenset[int]
    rope_switch_length: int | None
    text_of: Callable[[int], str]


@dataclass(frozen=True)
class _Said:
    """The text of a beam, as far as stop strings need it."""

    detokenizer: Detokenizer
    matcher: StopMatcher

    def then(self, token_id: int) -> tuple[_Said, bool]:
        """With one token more, and whether a stop string is in it now."""
        other = _Said(self.detokenizer.copy(), copy.deepcopy(self.matcher))
        _, is_stopped = other.matcher.push(other.detokenizer.push(token_id))
        return other, is_stopped


@dataclass(frozen=True)
class _Text:
    """What a beam says. score: the sum of its tokens' log-probabilities as they are searched by. told: the plain ones,
    where they are asked for."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    told: tuple[TokenLogprob, ...] = ()
    said: _Said | None = None


@dataclass(frozen=True)
class _Beam:
    """One that is followed. token_ids: prompt and answer; its cache has all but the last."""

    text: _Text
    token_ids: list[int]
    kv: PagedKV


@dataclass(frozen=True)
class _Candidate:
    """A beam with one token more. is_cut: it has ended, and does not meet its grammar."""

    parent: int
    text: _Text
    is_whole: bool
    is_cut: bool


@dataclass(frozen=True)
class _Whole:
    """An answer that has ended. score: what answers of different lengths are compared by."""

    score: float
    text: _Text
    is_cut: bool


class BeamSearch:
    """The search for one request's answer. `chunks`: what its next step computes, once it has begun."""

    def __init__(self, sequence: Running, ends: Ends) -> None:
        self._sequence, self._ends = sequence, ends
        self._width = sequence.request.beams
        self._beams: list[_Beam] = []
        self._logits: list[Tensor] = []  # of this step's beams, as they come
        self._whole: list[_Whole] = []  # the best of those, the best first

    @property
    def has_begun(self) -> bool:
        return bool(self._beams)

    @property
    def chunks(self) -> list[Chunk]:
        return [Chunk(beam.token_ids, beam.kv, len(beam.token_ids) - beam.kv.length) for beam in self._beams]

    def take(self, outcome: Outcome) -> Iterator[TokenEvent]:
        """Of the prompt, then of each beam in turn: with the last one of a step the search goes on. Says the best
        answer when it ends. Raises what torch does where there is no memory for a branch, and LocalLLMError where
        nothing may be said that is allowed."""
        assert outcome.logits is not None
        self._logits.append(outcome.logits[0])
        if len(self._logits) < max(1, len(self._beams)):
            return
        self._sequence.clock.ran_alone = False  # a step of several rows is no measure of one of a single one
        texts = [beam.text for beam in self._beams] or [_Text(said=self._nothing_said())]
        if not self.has_begun:
            self._sequence.clock.first_token = time.perf_counter()
        length = 1 + len(texts[0].token_ids)
        candidates = self._candidates(texts)
        self._logits = []
        best = [each for each in candidates if not each.is_whole][: self._width]
        self._keep_whole([each for each in candidates[: self._width] if each.is_whole], length)
        if best and self._may_improve(best[0].text.score, length):
            self._follow(best)
            return
        self.close()
        yield from self._told()

    def close(self) -> None:
        """Its beams give their pages back; once or more often."""
        for beam in self._beams:
            beam.kv.close()
        self._beams = []

    def _nothing_said(self) -> _Said | None:
        stops = self._sequence.request.sampling.stop
        return _Said(*self._sequence.text_so_far()) if stops else None

    def _candidates(self, texts: Sequence[_Text]) -> list[_Candidate]:
        """The best continuations of all beams, those that are cut behind all others: with each end-of-sequence token
        once for each beam, there are still as many that go on."""
        rows, refusal = [], None
        for text, logits in zip(texts, self._logits, strict=True):
            try:
                token_ids = [*self._sequence.request.prompt_ids, *text.token_ids]
                rows.append(log_probabilities(logits, self._sequence, token_ids) + text.score)
            except LocalLLMError as error:  # this beam has come to a dead end
                refusal = error
                rows.append(torch.full_like(logits, -torch.inf))
        scores, indices = torch.stack(rows).view(-1).topk(min(self._num_candidates, len(rows) * rows[0].shape[0]))
        vocab_size = rows[0].shape[0]
        found = [
            self._candidate(texts, index // vocab_size, index % vocab_size, score)
            for score, index in zip(scores.tolist(), indices.tolist(), strict=True)
            if score > -torch.inf
        ]
        if not found and not self._whole:
            raise refusal or LocalLLMError("the answer cannot go on", why="no token has a likelihood above 0")
        return sorted(found, key=lambda each: each.is_cut)

    @property
    def _num_candidates(self) -> int:
        return max(2, 1 + len(self._ends.eos_ids)) * self._width

    def _candidate(self, texts: Sequence[_Text], parent: int, token_id: int, score: float) -> _Candidate:
        before, sampling = texts[parent], self._sequence.request.sampling
        told, said, is_stopped = before.told, before.said, False
        is_whole = token_id in self._ends.eos_ids and not sampling.ignore_eos
        if said is not None and not is_whole:
            said, is_stopped = said.then(token_id)
        if self._sequence.score is not None or sampling.logprobs is not None:
            told += (token_logprob(self._logits[parent], token_id, sampling.logprobs or 0, self._ends.text_of),)
        text = _Text((*before.token_ids, token_id), score, told, said)
        is_full = self._sequence.num_prompt_tokens + len(text.token_ids) >= self._sequence.max_length
        constraint = self._sequence.constraint
        is_whole = is_whole or is_stopped or is_full
        is_whole = is_whole or (constraint is not None and constraint.has_ended(text.token_ids))
        is_cut = is_whole and constraint is not None and (is_stopped or not constraint.is_met(text.token_ids))
        return _Candidate(parent, text, is_whole, is_cut)

    def _keep_whole(self, ended: Sequence[_Candidate], length: int) -> None:
        """length: of these answers, in tokens."""
        penalty = length**self._sequence.request.length_penalty
        whole = [*self._whole, *(_Whole(each.text.score / penalty, each.text, each.is_cut) for each in ended)]
        self._whole = sorted(whole, key=lambda each: (each.is_cut, -each.score))[: self._width]

    def _may_improve(self, score: float, length: int) -> bool:
        """Whether a whole answer is to be waited for that is better than the worst of those that there are. score: of
        the best beam."""
        request = self._sequence.request
        if len(self._whole) < self._width:
            return True
        if request.early_stopping is True:
            return False
        if self._whole[-1].is_cut:
            return True
        if request.early_stopping == "never" and request.length_penalty > 0:
            length = self._sequence.max_length - self._sequence.num_prompt_tokens
        return bool(score / length**request.length_penalty > self._whole[-1].score)

    def _follow(self, best: Sequence[_Candidate]) -> None:
        kvs = self._heirs([each.parent for each in best])
        prompt = self._sequence.request.prompt_ids
        self._beams = [
            _Beam(each.text, [*prompt, *each.text.token_ids], kv) for each, kv in zip(best, kvs, strict=True)
        ]
        for kv in kvs:
            if kv.length == self._ends.rope_switch_length:  # as the engine does for an answer that is drawn
                kv.trim(0)

    def _heirs(self, parents: Sequence[int]) -> list[PagedKV]:
        """A cache for each that goes on: its parent's own for the first heir, a branch of that for any other. The
        prompt's stays the sequence's."""
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

    def _told(self) -> Iterator[TokenEvent]:
        """The best answer, token by token, as if it had been drawn; the next best ones come with its end."""
        sequence, (best, *rest) = self._sequence, self._whole[: self._sequence.request.num_answers]
        twins = [sequence.twin() for _ in rest]
        others = [list(self._drawn(twin, each.text)) for twin, each in zip(twins, rest, strict=True)]
        yield from self._drawn(sequence, best.text)
        sequence.others = list(zip(twins, others, strict=True))

    def _drawn(self, sequence: Running, text: _Text) -> Iterator[TokenEvent]:
        with_logprobs = sequence.request.sampling.logprobs is not None
        for place, token_id in enumerate(text.token_ids):
            told = text.told[place] if text.told else None
            if sequence.score is not None and told is not None:
                sequence.score.take(told.logprob)
            event = sequence.append(token_id, told if with_logprobs else None, self._ends.eos_ids)
            if event is not None:
                yield event
            assert (sequence.finish_reason is None) == (place + 1 < len(text.token_ids))


def require_room(request: Request, ctx: int, limits: Limits) -> None:
    """Raises UsageError for beams that have no room beside each other, however long they wait."""
    num_prompt, beams = len(request.prompt_ids), request.beams
    answer = min(ctx - num_prompt, request.sampling.max_tokens or ctx)
    needed = tokens_needed(num_prompt, num_prompt + answer, beams, limits)
    if beams == 1 or needed <= limits.kv_tokens:
        return
    room = limits.kv_tokens - tokens_needed(num_prompt, num_prompt, beams, limits)
    raise UsageError(
        f"{beams} beams of an answer of up to {answer} tokens have no room beside each other",
        why=f"they need the keys and values of {needed} tokens, and there is memory for {limits.kv_tokens}",
        fix=f"at most {room // beams} tokens of answer (max_tokens)" if room >= beams else "fewer beams",
    )
