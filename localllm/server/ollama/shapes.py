"""What several of Ollama's requests and replies have: the model's name, times, and how long an answer took."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Literal

from typing_extensions import TypedDict

from localllm.engine.events import FinishedEvent
from localllm.server.bodies import Body
from localllm.server.endings import FinishReason, finish_reason, timings_of
from localllm.server.failures import RequestError
from localllm.server.replying import encoded

_TAG = ":latest"


class NamedBody(Body):
    """name: as older clients call it."""

    model: str | None = None
    name: str | None = None

    @property
    def bare_name(self) -> str:
        """Without the tag that names have there. Raises RequestError where there is none."""
        name = (self.model or self.name or "").removesuffix(_TAG)
        if not name:
            raise RequestError(400, "model: field required", param="model", name="missing_required_parameter")
        return name


class Ending(TypedDict, total=False):
    """What the last line of a reply has, and no other. Durations are nanoseconds."""

    done_reason: FinishReason | Literal["load", "unload"]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


def ending_of(finished: FinishedEvent, started_ns: int, load_ns: int) -> Ending:
    """started_ns: of `time.perf_counter_ns`, when the request came. load_ns: for which it waited for its model."""
    timings = timings_of(finished)
    return {
        "done_reason": finish_reason(finished),
        "total_duration": time.perf_counter_ns() - started_ns,
        "load_duration": load_ns,
        "prompt_eval_count": finished.usage.prompt_tokens,
        "prompt_eval_duration": round(timings["prompt_ms"] * 1e6),
        "eval_count": finished.usage.completion_tokens,
        "eval_duration": round(timings["predicted_ms"] * 1e6),
    }


def tagged(name: str) -> str:
    """As names are there."""
    return name if ":" in name else name + _TAG


def time_text(seconds: float | None = None) -> str:
    """As RFC 3339 has it; now where none is given."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def line(value: object) -> bytes:
    """One of a stream's: libraries parse each, so that none is ever blank."""
    return encoded(value) + b"\n"
