"""Why an answer ended and how long it took, in the words that several dialects have for it."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from localllm.engine.events import FinishedEvent

FinishReason = Literal["stop", "length"]


class Timings(TypedDict):
    """As llama.cpp has them: milliseconds, and rates, which are null where nothing was measured. draft_n: tokens that
    were guessed ahead, where any were; draft_n_accepted: of these, those that were right."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]


def finish_reason(finished: FinishedEvent) -> FinishReason:
    return "length" if finished.finish_reason == "length" else "stop"


def timings_of(finished: FinishedEvent) -> Timings:
    usage, timings = finished.usage, finished.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    read_ms, step_ms = _ms(timings.prefill_tok_s), _ms(timings.decode_tok_s)
    told: Timings = {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": computed * (read_ms or 0.0),
        "prompt_per_token_ms": read_ms,
        "prompt_per_second": timings.prefill_tok_s or None,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": max(0, usage.completion_tokens - 1) * (step_ms or 0.0),
        "predicted_per_token_ms": step_ms,
        "predicted_per_second": timings.decode_tok_s or None,
    }
    guesses = finished.speculation
    if guesses is not None and guesses.drafted:
        told |= {"draft_n": guesses.drafted, "draft_n_accepted": guesses.accepted}
    return told


def _ms(rate: float | None) -> float | None:
    """Of one token; None where none was measured."""
    return 1000 / rate if rate else None
