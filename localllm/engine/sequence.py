"""One request on its way: its tokens, its KV cache, the text that has become certain, and why it ended."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.cache.miss_reason import CacheMiss
from localllm.cache.paged_kv import PagedKV
from localllm.cache.spans import Span
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
from localllm.engine.request import Pooling, Request
from localllm.errors import NonFiniteError
from localllm.text.detokenizer import Detokenizer
from localllm.text.eviction import wanted_room
from localllm.text.grammar.constraint import Constraint
from localllm.text.stop_strings import StopMatcher


@dataclass
class Clock:
    """When things happened, in seconds of `time.perf_counter`."""

    submitted: float = field(default_factory=time.perf_counter)
    prefill_started: float | None = None
    first_token: float | None = None
    last_token: float | None = None  # of the answer, of which an end-of-sequence token is not part
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
    """Return None where nothing was measured: an answer of one token has no second."""
    return count / seconds if count > 0 and seconds > 0 else None


@dataclass
class DraftCount:
    """Drafts of an answer."""

    drafted: int = 0  # tokens
    accepted: int = 0
    rounds: int = 0  # passes of the model that verified some
    passes: int = 0  # behind the prompt
    tokens: int = 0  # that these gave, one that ends the text among them

    def count(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        self.passes += 1
        self.tokens += num_tokens
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.rounds += num_drafted > 0

    def stats(self, drafter: str) -> SpeculationStats:
        tokens_per_pass = self.tokens / self.passes if self.passes else None
        return SpeculationStats(drafter, self.drafted, self.accepted, self.rounds, tokens_per_pass)


@dataclass
class Likelihood:
    """Natural-log probabilities of the tokens that were sampled, before any sampling transform."""

    total: float = 0.0
    tokens: int = 0

    def add(self, logprob: float) -> None:
        self.total += logprob
        self.tokens += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None


class Pooler:
    """The embedding of a prompt: takes the hidden states of its tokens in order, chunk by chunk."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._state: Tensor | None = None  # the sum so far, or the last one

    def take(self, states: Tensor, position: int) -> None:
        """Take states [T, hidden] behind the final norm, of the tokens from `position` on; a recomputation begins at
        0."""
        if self.pooling == "last":
            self._state = states[-1].double()
            return
        total = states.double().sum(0)  # a mean of 8,192 tokens by fp32 sums would depend on how they are chunked
        self._state = total if self._state is None or position == 0 else self._state + total

    def vector(self) -> array[float]:
        """Return the vector, of length 1: whether a mean is divided by the number of tokens makes no difference then.

        Raises NonFiniteError for what is not a number.
        """
        assert self._state is not None
        if not bool(self._state.isfinite().all()):
            raise NonFiniteError("the embedding has a NaN or an infinity", why="a block gave one of these")
        return array("f", torch.nn.functional.normalize(self._state, dim=0).tolist())


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
        self.request_id = request_id
        self.request = request
        self.seed = seed
        self.breaker_ids = breaker_ids  # tokens that no DRY repetition spans
        self.constraint = constraint
        self.fit(ctx)
        self.token_ids = list(request.prompt_ids)
        self.kv: PagedKV | None = None  # reserved at admission
        self.owns_kv = True
        self.adapters: tuple[tuple[str, str], ...] = ()  # their versions, as `AdapterCache.check` has them
        self.num_cached_tokens = 0  # of the prompt, that were not computed
        self.num_moved_tokens = 0  # of these, those that were taken from another position
        self.num_evicted_tokens = 0  # whose keys and values had left when its pages were given back
        self.planned: dict[int, Span] = {}  # pages that are to be, by their number
        self.num_scored = 0  # tokens of the prompt whose logprobs were told
        self.miss: CacheMiss | None = None
        self.clock = Clock()
        self.draft_count = DraftCount()
        self.drafter: str | None = None  # who drafts its tokens, if somebody may
        self.pool = None if request.pooling is None else Pooler(request.pooling)
        self.likelihood = Likelihood() if request.is_scored else None
        self.due = 0  # as the scheduler counts
        self.end_logprob: TokenLogprob | None = None
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stop = StopMatcher(request.sampling.stop)
        self._stopped = False

    def fit(self, ctx: int) -> None:
        """Let it be as long as a context of so many tokens allows; it wants a longer one where its prompt leaves too
        little for its answer, and it may."""
        self.ctx, most = ctx, self.request.sampling.max_tokens
        self.max_length = min(ctx, self.num_prompt_tokens + (0 if self.request.reads_only else most or ctx))
        self.wants_growth = self.request.grows and self.num_prompt_tokens + wanted_room(ctx, most) > ctx

    @property
    def kv_capacity(self) -> int:
        """Tokens that its own pages hold at most: a searched answer is in the pages of its beams."""
        return self.max_length if self.request.beams == 1 else self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_logits(self) -> bool:
        """Whether its next chunk has logits behind every token, not the last alone."""
        return self.request.prompt_logprobs is not None and not self.num_completion_tokens

    @property
    def answer_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int, logprob: TokenLogprob | None, eos_ids: frozenset[int]) -> TokenEvent | None:
        """Add a sampled token; return None for an end-of-sequence token, which is not part of the answer."""
        now = time.perf_counter()
        self.clock.first_token = self.clock.first_token or now
        if token_id in eos_ids and not self.request.sampling.ignore_eos:
            self.finish_reason, self.end_logprob = "stop", logprob
            return None
        self.clock.last_token = now
        self.token_ids.append(token_id)
        text = self._release(self._detokenizer.push(token_id))
        if self.finish_reason is None and self.constraint is not None:
            answer = self.answer_ids
            if self.constraint.has_ended(answer):
                self.finish_reason = "stop"
            elif len(self.token_ids) < self.max_length:
                self.constraint.look_ahead(answer)  # what may follow is found out meanwhile
        if self.finish_reason is None and len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"
        return TokenEvent(self.request_id, token_id, text, logprob)

    def end_prefill(self) -> None:
        """End a request that wants no answer behind its prompt."""
        self.clock.first_token = self.clock.last_token = time.perf_counter()
        self.finish_reason = "length"

    def finished(self, load_s: float, error: Exception | None = None) -> FinishedEvent:
        """Return the last event, with text that was held back in case a stop string or a character would complete."""
        text = "" if self._stopped else self._release(self._detokenizer.finish())
        if not self._stopped:
            text += self._stop.finish()
        assert self.finish_reason is not None
        meets_grammar = None
        if self.constraint is not None:
            meets_grammar = self._stop.found is None and self.constraint.is_met(self.answer_ids)
        return FinishedEvent(
            self.request_id,
            self.finish_reason,
            Usage(
                self.num_prompt_tokens,
                self.num_cached_tokens,
                self.num_completion_tokens,
                self.num_evicted_tokens,
                self.num_moved_tokens,
            ),
            self.clock.timings(load_s, self.num_prompt_tokens - self.num_cached_tokens, self.num_completion_tokens),
            text=text,
            error=error,
            miss=self.miss,
            ctx=self.ctx,
            speculation=None if self.drafter is None else self.draft_count.stats(self.drafter),
            embedding=self.pool.vector() if self.pool is not None and self.finish_reason == "stop" else None,
            stop_text=self._stop.found,
            mean_logprob=None if self.likelihood is None else self.likelihood.mean,
            end_logprob=self.end_logprob,
            meets_grammar=meets_grammar,
        )

    def _release(self, text: str) -> str:
        """Return the part of the text that cannot belong to a stop string any more."""
        released, self._stopped = self._stop.push(text)
        if self._stopped and self.finish_reason not in ("cancelled", "error"):
            self.finish_reason = "stop"
        return released
