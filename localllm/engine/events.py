"""What the engine tells a front end while it works on a request. Plain data: no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from localllm.cache.miss_reason import CacheMiss

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
    evicted_tokens: int = 0  # whose keys and values left before the end
    reused_tokens: int = 0  # of the cached ones, those that stood at another position


@dataclass(frozen=True)
class StepSplit:
    """The seconds that the steps of a request spent."""

    compute_s: float = 0.0
    wait_s: float = 0.0  # of `copy_s`, in which nothing else could be done
    sample_s: float = 0.0
    copy_s: float = 0.0  # in which blocks were on their way, beside the rest
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
    """How tokens were drafted."""

    drafter: str  # who may draft: "ngram", "ngram+skip"
    drafted: int = 0  # tokens
    accepted: int = 0
    rounds: int = 0  # passes of the model that verified some
    tokens_per_pass: float | None = None  # of all passes behind the prompt; None where there were none


@dataclass(frozen=True)
class PrefillEvent:
    """Progress of the prompt: `done` of `total` tokens are in the KV cache. Of a forward that is under way, its share
    of the blocks counts for as large a share of its tokens."""

    request_id: int
    done: int
    total: int
    logprobs: tuple[TokenLogprob | None, ...] = ()  # if wanted, of the tokens since the last event; None for the first


@dataclass(frozen=True)
class GrownEvent:
    """The context became longer for this request, before its prompt is computed."""

    request_id: int
    ctx_before: int
    ctx: int
    num_from_disk: int = 0  # blocks that made room for it and now come from there at every step
    num_from_memory: int = 0
    decode_tok_s: float | None = None  # predicted


@dataclass(frozen=True)
class TokenEvent:
    """A token was sampled. `text` is what became certain with it: it may be empty, and never ends within a
    character."""

    request_id: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class FinishedEvent:
    """The last event of a request."""

    request_id: int
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    text: str = ""  # that was still held back
    error: Exception | None = field(default=None, compare=False)  # where the reason is "error"
    miss: CacheMiss | None = None  # if wanted, and something was cached that the request could not use
    ctx: int | None = None  # tokens of context that it had, if known
    speculation: SpeculationStats | None = None  # None where nobody drafts
    embedding: array[float] | None = field(default=None, repr=False)  # of the prompt: fp32 [hidden], of length 1
    stop_text: str | None = None  # the stop string before which the answer ends
    end_logprob: TokenLogprob | None = None  # of the end-of-sequence token that ended the answer, if wanted
    # Per token, before any sampling transform, the token that ended the text among them; if the request is scored.
    mean_logprob: float | None = None
    meets_grammar: bool | None = None  # whether it is whole as the request's grammar has it; None without one
    others: tuple[tuple[TokenEvent | FinishedEvent, ...], ...] = ()  # of a search, the next best answers


Event = GrownEvent | PrefillEvent | TokenEvent | FinishedEvent
