"""Why an answer ended and how long it took, in the words that several dialects have for it."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from localllm.engine.events import FinishedEvent

FinishReason = Literal["stop", "length"]


class Timings(TypedDict):
    """As llama.cpp has them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_second: float | None


def finish_reason(finished: FinishedEvent) -> FinishReason:
    return "length" if finished.finish_reason == "length" else "stop"


def timings_of(finished: FinishedEvent) -> Timings:
    usage, timings = finished.usage, finished.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    rate, steps = timings.decode_tok_s, usage.completion_tokens - 1
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": 1000 * computed / timings.prefill_tok_s if timings.prefill_tok_s else 0.0,
        "prompt_per_second": timings.prefill_tok_s,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": 1000 * steps / rate if rate else None,
        "predicted_per_second": rate,
    }
