"""The shared parts of Ollama's requests and replies: the model's name, times, and how long an answer took."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field, SkipValidation

from localllm.server.bodies import Absent, Body, ReplyBody
from localllm.server.compression import CompressionReply
from localllm.server.errors import RequestError
from localllm.server.logprobs import ContentLogprob
from localllm.server.replies import FinishReason, encoded

_TAG = ":latest"


OllamaModelName = Annotated[str | None, Field(description="Without one, the model that is served.")]


class NamedBody(Body):
    """name: the older name of `model`."""

    model: str | None = None
    name: str | None = None

    @property
    def bare_name(self) -> str:
        """The name without Ollama's tag. Raises RequestError where there is no name."""
        name = bare(self.model or self.name or "")
        if not name:
            raise RequestError(400, "model: field required", param="model", name="missing_required_parameter")
        return name


class StatusLine(ReplyBody):
    """What is being done to a model. digest: identifies a file. total, completed: its bytes."""

    status: str
    digest: Absent[str] = None
    total: Absent[int] = None
    completed: Absent[int] = None


SUCCESS = StatusLine(status="success")


class OllamaHead(ReplyBody):
    model: str
    created_at: str


class OllamaEnd(ReplyBody):
    """The fields after an answer's text. Durations are in nanoseconds; only the last line of a stream has them."""

    done: bool
    logprobs: SkipValidation[Absent[list[ContentLogprob]]] = None
    compression: Absent[CompressionReply] = None
    done_reason: Absent[FinishReason | Literal["load", "unload"]] = None
    total_duration: Absent[int] = None
    load_duration: Absent[int] = None
    prompt_eval_count: Absent[int] = None
    reused_count: Absent[int] = None  # tokens of the prompt that were taken from another position
    evicted_count: Absent[int] = None  # tokens whose keys and values left before the end, where some did
    prompt_eval_duration: Absent[int] = None
    eval_count: Absent[int] = None
    eval_duration: Absent[int] = None


def bare(name: str) -> str:
    """Return a name without Ollama's tag."""
    return name.removesuffix(_TAG)


def tagged(name: str) -> str:
    """Return a name with Ollama's tag."""
    return name if ":" in name else name + _TAG


def time_text(seconds: float | None = None) -> str:
    """Return a time as RFC 3339 has it; now where none is given."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def line(value: object) -> bytes:
    """Return a line of a stream. None is ever blank: libraries parse each."""
    return encoded(value) + b"\n"
