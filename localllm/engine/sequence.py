"""One request on its way: its tokens, its KV cache, the text that has become certain, and why it ended."""

from __future__ import annotations

import time
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localllm.cache.miss import CacheMiss
from localllm.cache.paged_kv import PagedKV
from localllm.engine.embedding_request import Pool
from localllm.engine.events import (
    FinishedEvent,
    FinishReason,
    SpeculationStats,
    StepSplit,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from localllm.engine.request import Request
from localllm.text.detokenizer import Detokenizer
from localllm.text.eviction import wanted_room
from localllm.text.grammar.constraint import Constraint
from localllm.text.stop_strings import StopMatcher

if TYPE_CHECKING:
    from localllm.engine.beam_search import BeamSearch


@dataclass
class Clock:
    """When things happened, in seconds of `time.perf_counter`. last_token: of the answer, of which an end-of-sequence
    token is no part."""

    submitted: float = field(default_factory=time.perf_counter)
    prefill_started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    split: StepSplit = field(default_factory=StepSplit)
    ran_alone: bool = True  # no step served another request as well

    def timings(self, load_s: float, num_computed_tokens: int, num_completion_tokens: int) -> Timings:
        if self.first_token is None or self.prefill_started is None:
            return Timings(load_s=load_s, split=self.split)
        return Timings(
            load_s=load_s,
            ttft_s=self.first_token - self.submitted,
            prefill_tok_s=_rate(num_computed_tokens, self.first_token - self.prefill_started),
            decode_tok_s=_rate(num_completion_tokens - 1, (self.last_token or self.first_token) - self.first_token),
            split=self.split,
        )


def _rate(count: int, seconds: float) -> float | None:
    """None where nothing was measured: of an answer of one token nothing is behind the first."""
    return count / seconds if count > 0 and seconds > 0 else None


@dataclass
class Tally:
    """Of an answer: tokens that were guessed, those of them that were right, passes of the model that verified some,
    all of its passes behind the prompt, and the tokens that they gave, one that ends the text among them."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    passes: int = 0
    tokens: int = 0

    def take(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        self.passes += 1
        self.tokens += num_tokens
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.rounds += num_drafted > 0


@dataclass
class Score:
    """The natural-log probabilities of the tokens that were drawn, before any sampling transform."""

    total: float = 0.0
    tokens: int = 0

    def take(self, logprob: float) -> None:
        self.total += logprob
        self.tokens += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None


class Sequence:
    """The state of one request. `token_ids` is prompt and answer; the KV cache holds its first `kv.length` tokens."""

    def __init__(
        self,
        request_id: int,
        request: Request,
        *,
        seed: int,
        ctx: int,
        detokenizer: Detokenizer,
        breaker_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        """constraint: of the request's grammar."""
        self.request_id = request_id
        self.request = request
        self.seed = seed
        self.breaker_ids = breaker_ids  # tokens that no DRY repetition spans
        self.constraint = constraint
        self.may_grow = request.grows  # the context, for this request
        self.fit(ctx)
        self.token_ids = list(request.prompt_ids)
        self.kv: PagedKV | None = None  # reserved at admission
        self.owns_kv = True
        self.num_cached_tokens = 0  # of the prompt, that were not computed
        self.miss: CacheMiss | None = None
        self.clock = Clock()
        self.tally = Tally()
        self.drafter: str | None = None  # who guesses its tokens, if somebody may
        self.pool = None if request.pooling is None else Pool(request.pooling)
        self.score = Score() if request.is_scored else None
        self.search: BeamSearch | None = None  # where its answer is not drawn
        self.others: list[tuple[Sequence, list[TokenEvent]]] = []  # that a search has found beside it
        self.due = 0  # as the scheduler counts
        self.end_logprob: TokenLogprob | None = None
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stop = StopMatcher(request.sampling.stop)
        self._stopped = False

    def fit(self, ctx: int) -> None:
        """It has the room of a context of so many tokens."""
        self.ctx = ctx
        most = 0 if self.request.reads_only else self.request.sampling.max_tokens or ctx
        self.max_length = min(ctx, self.num_prompt_tokens + most)

    @property
    def wants_growth(self) -> bool:
        """Whether a longer context is to be tried for before it runs."""
        room = wanted_room(self.ctx, self.request.sampling.max_tokens)
        return self.may_grow and self.num_prompt_tokens + room > self.ctx

    @property
    def kv_capacity(self) -> int:
        """Tokens that its own pages hold at most: those of a searched answer are the beams'."""
        return self.max_length if self.request.beams == 1 else self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_logits(self) -> bool:
        """Whether what is computed of it next has logits behind every token, not the last alone."""
        return self.request.prompt_logprobs is not None and not self.num_completion_tokens

    @property
    def answer_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def text_so_far(self) -> tuple[Detokenizer, StopMatcher]:
        """Copies of what makes text of its tokens, for an answer that may go on from here."""
        return self._detokenizer.copy(), deepcopy(self._stop)

    def twin(self) -> Sequence:
        """Another that has said what this one has by now, and may go on differently; it has no cache."""
        other = copy(self)
        other.token_ids, other.kv, other.search = list(self.token_ids), None, None
        other._detokenizer, other._stop = self.text_so_far()
        other.score, other.clock = deepcopy(self.score), copy(self.clock)
        return other

    def append(self, token_id: int, logprob: TokenLogprob | None, eos_ids: frozenset[int]) -> TokenEvent | None:
        """Take a drawn token in; None for an end-of-sequence token, which is no part of the answer."""
        now = time.perf_counter()
        self.clock.first_token = self.clock.first_token or now
        if token_id in eos_ids and not self.request.sampling.ignore_eos:
            self.finish_reason, self.end_logprob = "stop", logprob
            return None
        self.clock.last_token = now
        self.token_ids.append(token_id)
        text = self._release(self._detokenizer.push(token_id))
        if self.finish_reason is None and self.constraint is not None:
            self._end_with(self.constraint)
        if self.finish_reason is None and len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"
        return TokenEvent(self.request_id, token_id, text, logprob)

    def end_reading(self) -> None:
        """Its prompt has been read, and nothing is to be said."""
        self.clock.first_token = self.clock.last_token = time.perf_counter()
        self.finish_reason = "length"

    def _end_with(self, constraint: Constraint) -> None:
        """It ends where its grammar does; else what may follow is found out meanwhile."""
        said = self.answer_ids
        if constraint.has_ended(said):
            self.finish_reason = "stop"
        elif len(self.token_ids) < self.max_length:
            constraint.look_ahead(said)

    def finished(self, load_s: float, error: Exception | None = None) -> FinishedEvent:
        """The last event; text that was held back in case a stop string or a character would complete comes with it."""
        text = "" if self._stopped else self._release(self._detokenizer.finish())
        if not self._stopped:
            text += self._stop.finish()
        assert self.finish_reason is not None
        return FinishedEvent(
            self.request_id,
            self.finish_reason,
            Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens),
            self.clock.timings(load_s, self.num_prompt_tokens - self.num_cached_tokens, self.num_completion_tokens),
            text=text,
            error=error,
            miss=self.miss,
            ctx=self.ctx,
            speculation=self._speculation,
            embedding=self.pool.vector() if self.pool is not None and self.finish_reason == "stop" else None,
            stop_text=self._stop.found,
            mean_logprob=None if self.score is None else self.score.mean,
            end_logprob=self.end_logprob,
            meets_grammar=self._meets_grammar,
            others=tuple((*events, other.finished(load_s)) for other, events in self.others),
        )

    @property
    def _meets_grammar(self) -> bool | None:
        if self.constraint is None:
            return None
        return self._stop.found is None and self.constraint.is_met(self.answer_ids)

    @property
    def _speculation(self) -> SpeculationStats | None:
        if self.drafter is None:
            return None
        tally = self.tally
        tokens_per_pass = tally.tokens / tally.passes if tally.passes else None
        return SpeculationStats(self.drafter, tally.drafted, tally.accepted, tally.rounds, tokens_per_pass)

    def _release(self, text: str) -> str:
        """What of the text cannot be part of a stop string any more."""
        released, self._stopped = self._stop.push(text)
        if self._stopped and self.finish_reason not in ("cancelled", "error"):
            self.finish_reason = "stop"
        return released
