"""What the engine tells a front end while it works on a request. Plain data: no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from localllm.cache.miss import CacheMiss

FinishReason = Literal["stop", "length", "error", "cancelled"]


def ignore(*_news: object) -> None:
    """The callback for news that nobody asked for."""


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its natural-log probability before any sampling transform."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class StepSplit:
    """What the steps of a request spent their seconds on. copy_s: in which blocks were on their way, which goes on
    beside the rest; wait_s: what of it nothing else could be done in."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    sample_s: float = 0.0
    copy_s: float = 0.0
    copied_bytes: int = 0

    def __add__(self, other: StepSplit) -> StepSplit:
        return StepSplit(  # field by field: `astuple` copies deeply, 40 us of a step of 300
            self.compute_s + other.compute_s,
            self.wait_s + other.wait_s,
            self.sample_s + other.sample_s,
            self.copy_s + other.copy_s,
            self.copied_bytes + other.copied_bytes,
        )


@dataclass(frozen=True)
class Timings:
    """Seconds and rates of one request; a rate is None where nothing was measured."""

    load_s: float = 0.0
    ttft_s: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    split: StepSplit = field(default_factory=StepSplit)


@dataclass(frozen=True)
class SpeculationStats:
    """How tokens were guessed. drafter: who may: "ngram", "ngram+skip". drafted, accepted: guesses that were made, and
    that were right. rounds: passes of the model that verified some. tokens_per_pass: of all its passes behind the
    prompt; None where there were none."""

    drafter: str
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens_per_pass: float | None = None


@dataclass(frozen=True)
class PrefillEvent:
    """The prompt is being read: `done` of `total` tokens are in the KV cache. Of a forward that is under way, its share
    of the blocks counts for as large a share of its tokens. logprobs: where they are asked for, of the tokens behind
    those that earlier events told of; None of the first, as there is nothing in front of it."""

    request_id: int
    done: int
    total: int
    logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True)
class GrownEvent:
    """The context became longer for this request, before its prompt is read. num_from_disk, num_from_memory: blocks
    that made room for it and now come from there at every step. decode_tok_s: predicted, None where nothing is."""

    request_id: int
    ctx_before: int
    ctx: int
    num_from_disk: int = 0
    num_from_memory: int = 0
    decode_tok_s: float | None = None


@dataclass(frozen=True)
class TokenEvent:
    """A token was drawn. `text` is what became certain with it: it may be empty, and never ends within a character."""

    request_id: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class FinishedEvent:
    """The last event of a request. `text` is what was still held back; `error` is set when the reason is "error".
    miss: of a request that asked for it, where something was known that it could not use. ctx: the tokens of context
    that it had, None where that is not known. speculation: None where nobody guesses. embedding: of the prompt, where
    that was asked for: fp32 [hidden], of length 1. stop_text: the stop string before which the answer ends.
    end_logprob: of the end-of-sequence token that ended the answer, where log-probabilities are asked for.
    mean_logprob: natural-log probability per token before any sampling transform, the token that ended the text among
    them; where the request was to be scored, and any token was drawn.
    meets_grammar: whether it is whole as the request's grammar has it; None where there is none. others: the next best
    answers of a search, where several were asked for, each as its events."""

    request_id: int
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    text: str = ""
    error: Exception | None = field(default=None, compare=False)
    miss: CacheMiss | None = None
    ctx: int | None = None
    speculation: SpeculationStats | None = None
    embedding: array[float] | None = field(default=None, repr=False)
    stop_text: str | None = None
    end_logprob: TokenLogprob | None = None
    mean_logprob: float | None = None
    meets_grammar: bool | None = None
    others: tuple[tuple[TokenEvent | FinishedEvent, ...], ...] = ()


Event = GrownEvent | PrefillEvent | TokenEvent | FinishedEvent
