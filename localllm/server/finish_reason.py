"""Why an answer ended and how long it took, in the words that several dialects have for it."""

from __future__ import annotations

from typing import Literal

from localllm.engine.events import FinishedEvent
from localllm.server.bodies import Absent, ReplyBody

FinishReason = Literal["stop", "length"]


class TimingsReply(ReplyBody):
    """Timings as llama.cpp has them: milliseconds, and rates, which are null where nothing was measured.

    draft_n: draft tokens, where there were any; draft_n_accepted: those that were accepted
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: Absent[int] = None
    draft_n_accepted: Absent[int] = None


def finish_reason(finished: FinishedEvent) -> FinishReason:
    return "length" if finished.finish_reason == "length" else "stop"


def timings_of(finished: FinishedEvent) -> TimingsReply:
    usage, timings, drafts = finished.usage, finished.timings, finished.speculation
    num_prefilled = usage.prompt_tokens - usage.cached_tokens
    prefill_ms, step_ms = _ms(timings.prefill_tok_s), _ms(timings.decode_tok_s)
    has_drafts = drafts is not None and drafts.drafted > 0
    return TimingsReply(
        cache_n=usage.cached_tokens,
        prompt_n=num_prefilled,
        prompt_ms=num_prefilled * (prefill_ms or 0.0),
        prompt_per_token_ms=prefill_ms,
        prompt_per_second=timings.prefill_tok_s or None,
        predicted_n=usage.completion_tokens,
        predicted_ms=max(0, usage.completion_tokens - 1) * (step_ms or 0.0),
        predicted_per_token_ms=step_ms,
        predicted_per_second=timings.decode_tok_s or None,
        draft_n=drafts.drafted if drafts is not None and has_drafts else None,
        draft_n_accepted=drafts.accepted if drafts is not None and has_drafts else None,
    )


def _ms(rate: float | None) -> float | None:
    """Return milliseconds of one token; None where nothing was measured."""
    return 1000 / rate if rate else None
