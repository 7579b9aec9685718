"""An answer: its text so far, its figures in words and in JSON, the best of several. Knows events, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from localllm.chat.thoughts import CLOSES, NO_THOUGHTS, OPENS, Thinking, told_apart
from localllm.config import format_figure
from localllm.engine.events import (
    Event,
    FinishedEvent,
    GrownEvent,
    PrefillEvent,
    SpeculationStats,
    StepSplit,
    TokenEvent,
    TokenLogprob,
)
from localllm.engine.request import SamplingParams

T = TypeVar("T")

MAX_ANSWERS = 16  # to one request


class Stream(Protocol):
    """The stream of an answer's events, as `EngineThread.submit` returns it."""

    def __iter__(self) -> Iterator[Event]: ...

    def abort(self) -> None: ...


class Piece(NamedTuple):
    """The next piece of an answer. text: as it is saved, with the marks of thoughts; said, thought: its parts."""

    text: str = ""
    said: str = ""
    thought: str = ""


@dataclass
class Answer:
    """The answer so far; complete once `finished` is set.

    parts: its pieces; at first the beginning that is continued.
    thinking: how thoughts are told apart.
    """

    num_prompt_tokens: int
    seed: int | None = None
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: FinishedEvent | None = None
    thinking: Thinking = NO_THOUGHTS

    def __post_init__(self) -> None:
        self._splitter = self.thinking.splitter()
        self._is_in_thought = self.thinking.is_thinking
        self._said: list[str] = []
        self._thought: list[str] = []
        if self.parts and self._splitter is not None:
            thought, said, _ = told_apart(self.text, is_thinking=self.begins_in_thought)
            self._thought, self._said = [thought], [said]
            if not self.thinking.is_harmony:
                self._splitter.feed(self.text)

    @property
    def text(self) -> str:
        """The whole text as it is saved: with the marks of thoughts."""
        return "".join(self.parts)

    @property
    def said(self) -> str:
        """The answer alone."""
        return "".join(self._said)

    @property
    def thought(self) -> str:
        """The thought before the answer."""
        return "".join(self._thought)

    @property
    def is_thinking(self) -> bool:
        """True where the answer is, or ended, in a thought."""
        return self._splitter is not None and self._splitter.is_thinking

    @property
    def begins_in_thought(self) -> bool:
        """True where the answer begins in a thought, which the template has opened."""
        return self.thinking.is_thinking and not self.thinking.is_harmony

    def take(self, event: Event) -> Piece:
        """Add an event to the answer, and return its piece."""
        if isinstance(event, GrownEvent | PrefillEvent):
            return Piece()
        if isinstance(event, TokenEvent):
            self.token_ids.append(event.token_id)
            if event.logprob is not None:
                self.logprobs.append(event.logprob)
        else:
            self.finished = event
        piece = Piece(event.text, event.text)
        if self._splitter is not None:
            found = self._splitter.feed(event.text)
            found += self._splitter.end() if isinstance(event, FinishedEvent) else []
            said, thought = ("".join(part for is_thought, part in found if is_thought is it) for it in (False, True))
            piece = Piece(self._marked(found) if self.thinking.is_harmony else event.text, said, thought)
        self.parts.append(piece.text)
        self._said.append(piece.said)
        self._thought.append(piece.thought)
        return piece

    def _marked(self, found: Iterable[tuple[bool, str]]) -> str:
        """Return the saved form of a harmony answer, whose own marks no text may have: thoughts as other models
        write them."""
        saved = ""
        for is_thought, text in found:
            if is_thought is not self._is_in_thought:
                saved += f"{OPENS}\n" if is_thought else f"\n{CLOSES}\n\n"
                self._is_in_thought = is_thought
            saved += text
        return saved


def silence(answer: Answer) -> str | None:
    """Return the notice about an answer that says nothing, as it ended in its thought; None for any other."""
    finished = answer.finished
    if finished is None or finished.finish_reason in ("cancelled", "error") or answer.said.strip():
        return None
    if not (answer.thought or answer.is_thinking or answer.thinking.is_harmony):
        return None
    if finished.finish_reason == "stop":
        return "the answer is empty: the model said nothing behind what it thought"
    num_tokens = finished.usage.completion_tokens
    after = f"after {num_tokens} token{'s' * (num_tokens != 1)}"
    return f"the answer is empty: it was cut in its thought, {after}; a larger max_tokens or context leaves it room"


def statistics(answer: Answer) -> str:
    """Return a line with tokens, rates, waiting times, the seed, and the reason of the end."""
    finished = answer.finished
    assert finished is not None
    usage, timings = finished.usage, finished.timings
    moved = f", {usage.reused_tokens} of them elsewhere" if usage.reused_tokens else ""
    cached = f" ({usage.cached_tokens} cached{moved})" if usage.cached_tokens else ""
    parts = [
        f"prompt {usage.prompt_tokens} tokens{cached}{_rate(timings.prefill_tok_s)}",
        f"answer {usage.completion_tokens} tokens{_rate(timings.decode_tok_s)}",
    ]
    if usage.evicted_tokens:
        parts.append(evicted_tokens_text(usage.evicted_tokens))
    if timings.ttft_s is not None:
        parts.append(f"first token after {timings.ttft_s:.2f} s")
    if timings.load_s:
        parts.append(f"load {timings.load_s:.2f} s")
    if finished.ctx is not None:
        parts.append(f"context {filled(context_used(finished), finished.ctx)}")
    if spent := _spent(timings.split):
        parts.append(spent)
    if finished.speculation is not None:
        parts.append(_drafted(finished.speculation))
    if answer.seed is not None:
        parts.append(f"seed {answer.seed}")
    cancelled = finished.finish_reason == "cancelled"
    return ", ".join([*parts, "cancelled" if cancelled else f"ended by {finished.finish_reason}"])


def context_used(finished: FinishedEvent) -> int:
    """The tokens of the context that prompt and answer have."""
    return finished.usage.prompt_tokens + finished.usage.completion_tokens


def evicted_tokens_text(count: int) -> str:
    """Return what `--kv-evict` has given back: "keys and values of 24,576 tokens left memory"."""
    return f"keys and values of {count:,} tokens left memory"


def filled(used: int, limit: int) -> str:
    """Return how full a context is: "83% full (6,800 of 8,192 tokens)"."""
    return f"{used / limit:.0%} full ({used:,} of {limit:,} tokens)"


def _spent(split: StepSplit) -> str:
    """Return how the time of the steps was spent; "" where there were none."""
    total_s = split.compute_s + split.wait_s + split.sample_s
    if not total_s:
        return ""
    shares = {"computing": split.compute_s, "sampling": split.sample_s, "waiting for blocks": split.wait_s}
    parts = [f"{share / total_s:.0%} {name}" for name, share in shares.items() if share >= 0.005 * total_s]
    if split.copied_bytes:
        rate = f"{split.copied_bytes / 1e9:.1f} GB at {split.copied_bytes / max(split.copy_s, 1e-9) / 1e9:.1f} GB/s"
        parts.append(f"meanwhile {split.copy_s / total_s:.0%} reading and copying ({rate})")
    return ", ".join(parts)


def _drafted(speculation: SpeculationStats) -> str:
    if not speculation.drafted:
        return f"nothing drafted ({speculation.drafter})"
    share = f"{speculation.accepted} of {speculation.drafted} drafted tokens accepted ({speculation.drafter})"
    per_pass = speculation.tokens_per_pass
    if per_pass is None:
        return share
    figure = format_figure(per_pass)
    return f"{share}, {figure} token{'' if figure == '1' else 's'} a pass"


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f" at {format_figure(tokens_per_s)}/s"


def finished_fields(finished: FinishedEvent) -> dict[str, Any]:
    """Return the figures of an answer for the JSON forms."""
    return {
        "finish_reason": finished.finish_reason,
        "complete": finished.meets_grammar,
        "context": {"used": context_used(finished), "limit": finished.ctx},
        "usage": asdict(finished.usage),
        "timings": asdict(finished.timings),
        "speculation": None if finished.speculation is None else asdict(finished.speculation),
    }


def logprob_fields(logprob: TokenLogprob) -> dict[str, Any]:
    """Return a token's logprob for the JSON forms; alternatives have no alternatives of their own."""
    fields = {"token_id": logprob.token_id, "token": logprob.token, "logprob": logprob.logprob}
    top = [{"token_id": t.token_id, "token": t.token, "logprob": t.logprob} for t in logprob.top]
    return {**fields, "top": top}


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of one of several answers to a prompt: each has its own noise."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**63)


def best(answers: Sequence[T], count: int, ending: Callable[[T], FinishedEvent]) -> list[T]:
    """Return the answers with the highest log-probability per token, the best first; of equals, the first.

    An answer that meets its grammar comes before one that was cut.
    """

    def rank(answer: T) -> tuple[bool, float]:
        finished = ending(answer)
        mean = float("-inf") if finished.mean_logprob is None else finished.mean_logprob
        return finished.meets_grammar is not False, mean

    return sorted(answers, key=rank, reverse=True)[:count]
