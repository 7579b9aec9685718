"""What a front end asks of the engine. Plain data: no torch, no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Protocol

from localllm.errors import UsageError
from localllm.settings import MAX_ADAPTER_SCALE
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from torch import Tensor

MAX_BIAS = 1e6  # beyond every logit, and far from where adding one more overflows
MAX_BEAMS = 16
MAX_ALTERNATIVES = 100  # that are reported with a token
MAX_LENGTH_PENALTY = 10.0
WHOLE_NUMBERS = frozenset({"top_k", "repeat_last_n", "dry_allowed_length", "seed", "logprobs", "max_tokens"})


@dataclass(frozen=True)
class SamplingParams:
    """How a token is sampled, and when to stop.

    The transforms apply in this order: logit_bias, penalties (repetition, frequency, presence), DRY, temperature,
    top_k, typical_p, top_p, min_p. temperature 0 is greedy. The three penalties look at the last `repeat_last_n` tokens
    of prompt and answer: repetition at all of these, frequency and presence at those of the answer. Raises UsageError
    for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1  # 0: no penalties; -1: all tokens
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a fresh one for each request
    logprobs: int | None = None  # alternatives reported with each token; None: no logprobs at all
    max_tokens: int | None = None  # None: to the end of the context
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # benchmarks: always max_tokens long

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "temperature": (0, 100),
            "top_k": (0, 2**31),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "typical_p": (0, 1),
            "repetition_penalty": (0.01, 100),
            "frequency_penalty": (-100, 100),
            "presence_penalty": (-100, 100),
            "repeat_last_n": (-1, 2**31),
            "dry_multiplier": (0, 100),
            "dry_base": (1, 100),
            "dry_allowed_length": (1, 2**31),
            "seed": (0, 2**63 - 1),
            "logprobs": (0, MAX_ALTERNATIVES),
            "max_tokens": (1, 2**31),
        }
        for entry in fields(self):
            value = getattr(self, entry.name)
            low, high = ranges.get(entry.name, (0, 0))
            if entry.name in ranges and value is not None and not (math.isfinite(value) and low <= value <= high):
                raise UsageError(f"{entry.name} is {value}", why=f"it must lie between {low} and {high}")
            if entry.name in WHOLE_NUMBERS and value is not None and not isinstance(value, int):
                raise UsageError(f"{entry.name} is {value}", why="it must be a whole number")
        stop: object = self.stop  # a caller without type checks may pass one text: its letters are no stop strings
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {self.stop!r}", why="it must be a list of texts, none of them empty")
        for token_id, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:  # false for NaN too
                raise UsageError(f"logit_bias of token {token_id} is {bias}", why=f"it must lie within {MAX_BIAS:g}")


class TokenMask(Protocol):
    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        """Return bool [V]: which tokens may follow these of an answer. For the same tokens it is always the same, in
        whatever order it is asked: a draft may be followed and rejected."""
        ...


@dataclass(frozen=True)
class AdapterRef:
    """An adapter that a request is computed with. path: its folder or file. scale: multiplies what it adds. name: for
    people. Raises UsageError for a scale that is none."""

    path: str
    scale: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if not -MAX_ADAPTER_SCALE <= self.scale <= MAX_ADAPTER_SCALE:  # false for NaN too
            why = f"it must lie within {MAX_ADAPTER_SCALE:g}"
            raise UsageError(f"the scale of the adapter {self.name or self.path} is {self.scale}", why=why)


Pooling = Literal["mean", "last"]
Reuse = Literal["prefix", "chunks"]
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Request:
    """One prompt to continue, or to embed. Ids, not text: templates and tokenizers have done their work.

    Raises UsageError for what no request can have.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    grows: bool = False  # the engine's context becomes longer, if it can, where the prompt leaves too little room
    # The answer is a turn of a chat, not the rest of the prompt's text: it loses the blank that some tokenizers drop at
    # the beginning of a text.
    opens_turn: bool = False
    explains_miss: bool = False  # the last event says where it leaves what was computed before
    mask: TokenMask | None = None  # which tokens the answer may have
    grammar: Grammar | None = None  # which form the answer has
    adapters: tuple[AdapterRef, ...] = ()  # what they add is added up
    priority: int = 0  # of requests that wait, those with a higher one are served sooner
    pooling: Pooling | None = None  # embed: the mean of the hidden states behind the last block, or the last, length 1
    shown_ids: frozenset[int] = frozenset()  # special tokens that are written out in the answer's text
    is_scored: bool = False  # the last event says how likely the model found the answer
    prompt_logprobs: int | None = None  # alternatives reported with each token of the prompt; None: no logprobs of it
    reads_only: bool = False  # no answer is wanted behind the prompt
    # More than 1: the answer is searched, not sampled. So many of all hypotheses are followed at once, and the
    # likeliest is reported when the search ends. Scored are log-probabilities after logit_bias and penalties, their sum
    # over tokens ** length_penalty.
    beams: int = 1
    num_answers: int = 1  # of a search, how many of the best are reported
    length_penalty: float = 1.0
    # True ends with the first `beams` whole answers, False where none that is begun is likely to become better than
    # those, "never" where none can: as in transformers' `generate(num_beams=...)`.
    early_stopping: EarlyStopping = False
    reuse: Reuse | None = None  # what of earlier prompts is not computed again; None: as the engine has it

    def __post_init__(self) -> None:
        if not (isinstance(self.beams, int) and 1 <= self.beams <= MAX_BEAMS):
            raise UsageError(f"beams is {self.beams}", why=f"it must be a whole number from 1 to {MAX_BEAMS}")
        if not (isinstance(self.num_answers, int) and 1 <= self.num_answers <= self.beams):
            why = f"of {self.beams} beams, as many can be whole answers; another request is another answer"
            raise UsageError(f"num_answers is {self.num_answers}", why=why)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:  # false for NaN too
            why = f"it must lie within {MAX_LENGTH_PENALTY:g}"
            raise UsageError(f"length_penalty is {self.length_penalty}", why=why)
        if self.early_stopping not in (True, False, "never"):
            raise UsageError(f"early_stopping is {self.early_stopping!r}", why='it must be true, false or "never"')
        if self.beams == 1 and (self.length_penalty != 1 or self.early_stopping):
            raise UsageError("length_penalty and early_stopping need beams", why="they say how beams are searched")
        if self.beams > 1 and self.sampling.temperature > 0:
            why = f"a search samples nothing, and temperature is {self.sampling.temperature:g}"
            raise UsageError("beams need temperature 0", why=why)
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_ALTERNATIVES:
            why = f"it must lie between 0 and {MAX_ALTERNATIVES}"
            raise UsageError(f"prompt_logprobs is {self.prompt_logprobs}", why=why)
        if self.pooling is not None and self.prompt_logprobs is not None:
            why = "an embedding is nothing but its vector"
            raise UsageError("prompt_logprobs and pooling cannot go together", why=why)
        if self.reuse == "chunks" and (self.prompt_logprobs is not None or self.pooling is not None):
            asked = "an embedding" if self.pooling is not None else "prompt_logprobs"
            raise UsageError(
                f"{asked} and reuse chunks cannot go together", why="every token of the prompt is computed"
            )
        if self.pooling is not None and self.beams > 1:
            raise UsageError("beams and pooling cannot go together", why="an embedding has no answer to search")


def require_grammar_alone(request: Request) -> None:
    """Raise UsageError for what contradicts the grammar of a request."""
    contradicts = {
        "mask": (request.mask is not None, "both say which tokens may follow"),
        "pooling": (request.pooling is not None, "an embedding has no answer"),
        "ignore_eos": (request.sampling.ignore_eos, "an answer ends where its grammar does"),
    }
    for name, (is_set, why) in contradicts.items():
        if is_set:
            raise UsageError(f"a grammar and {name} cannot go together", why=why)


def require_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise UsageError for an id that the model does not have: the kernels read the row of any number."""
    ids = tuple(token_ids)
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        outside = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise UsageError(f"token id {outside} does not exist", why=f"the model has ids 0 to {vocab_size - 1}")
