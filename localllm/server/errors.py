"""Errors as clients receive them: a status, a sentence, and the shape that each dialect's libraries parse."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from localllm.errors import (
    AdapterError,
    BusyError,
    ContextOverflowError,
    DoesNotFitError,
    EngineClosedError,
    EngineGoneError,
    Fixes,
    GrammarError,
    LocalLLMError,
    ModelChangedError,
    ModelNotFoundError,
    ModelUnusableError,
    TemplateError,
    TokenizerError,
    UsageError,
)

Dialect = Literal["openai", "anthropic", "ollama"]

RETRY_S = 2  # after which a queue has moved on, as a rule
_NO_RETRY = MappingProxyType({"x-should-retry": "false"})  # openai's and anthropic's libraries repeat a 5xx twice

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 500: "server_error", 503: "server_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


class RequestError(LocalLLMError):
    """A request that is refused. param: the wrong field. name: the error's, as OpenAI calls it."""

    def __init__(
        self,
        status: int,
        what: str,
        *,
        why: str = "",
        fix: Fixes = (),
        param: str | None = None,
        name: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        numbers: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(what, why=why, fix=fix)
        self.status = status
        self.param = param
        self.name = name
        self.headers = headers
        self.numbers = numbers


def busy(what: str, why: str, name: str = "overloaded") -> RequestError:
    """Return the error of what will be possible in a moment."""
    return RequestError(503, what, why=why, name=name, headers={"retry-after": str(RETRY_S)})


@dataclass(frozen=True)
class Failure:
    """An error in no dialect yet. numbers: for clients to compute with. place: of a bug, for the log."""

    status: int
    message: str
    name: str | None = None
    param: str | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    place: str | None = None


def failure_of(error: BaseException) -> Failure:
    """Return the failure of anything that may be raised while a request is served."""
    match error:
        case RequestError():
            return Failure(
                error.status, _sentence(error), error.name, error.param, numbers=error.numbers, headers=error.headers
            )
        case ModelNotFoundError():
            return Failure(404, _sentence(error), "model_not_found", "model")
        case GrammarError():
            return Failure(400, _sentence(error), "invalid_grammar")
        case AdapterError():
            return Failure(400, _sentence(error), "invalid_adapter", "model")
        case TemplateError() | TokenizerError() | UsageError() | ContextOverflowError():
            return Failure(400, _sentence(error), "invalid_value")
        case EngineClosedError():
            return Failure(503, "the server is shutting down", "shutting_down")
        case BusyError():
            return Failure(503, _sentence(error), error.reason, headers={"retry-after": str(RETRY_S)})
        case EngineGoneError():
            return Failure(503, _sentence(error), "engine_gone", headers={"retry-after": str(RETRY_S)})
        case ModelChangedError():
            return Failure(503, _sentence(error), "model_changed", headers={"retry-after": str(RETRY_S)})
        case ModelUnusableError():
            return Failure(503, _sentence(error), error.code, headers=_NO_RETRY)
        case DoesNotFitError():
            return Failure(503, _sentence(error), "does_not_fit", headers=_NO_RETRY)
        case LocalLLMError():
            return Failure(500, _sentence(error), error.code, headers=_NO_RETRY)
        case MemoryError():
            return Failure(503, "the memory ran out", "does_not_fit", headers=_NO_RETRY)
    kind = type(error).__name__
    return Failure(500, f"this is a bug in localllm: {kind}", "bug", headers=_NO_RETRY, place=f"{kind} {_place(error)}")


def _place(error: BaseException) -> str:
    """Return where it was raised, file and line, without any values."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _sentence(error: LocalLLMError) -> str:
    """Return what, why and fix in one line."""
    text = f"{error.what}: {error.why}" if error.why else error.what
    end = "" if text.endswith("?") else "."
    return " ".join((f"{text}{end} To fix it: {error.fix}" if error.fix else text).split())


def too_long(error: ContextOverflowError, param: str, ratio: float | None = None) -> RequestError:
    """Return it in the words by which LiteLLM, LangChain and clients of llama.cpp recognise it. param: which field.
    ratio: the value of `compress` with which it fits."""
    fixes = [f"restart the server with {fix}" for fix in error.fixes if fix.kind == "flag"]
    fixes += [] if ratio is None else [f"send 'compress': {ratio:g}"]
    message = (
        f"This model's maximum context length is {error.ctx} tokens; the request has {error.num_tokens}, which exceeds "
        f"the available context size: the prompt is too long. {'; '.join([*fixes, 'shorten the prompt']).capitalize()}."
    )
    numbers = {"n_prompt_tokens": error.num_tokens or 0, "n_ctx": error.ctx or 0}
    return RequestError(400, message, param=param, name="context_length_exceeded", numbers=numbers)


def dialect_of(path: str) -> Dialect:
    """Return the dialect that a path belongs to."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def body_of(failure: Failure, dialect: Dialect) -> dict[str, Any]:
    """Return the error object of that dialect."""
    if dialect == "ollama":
        return {"error": failure.message}
    if dialect == "anthropic":
        kind, message = _ANTHROPIC_TYPES.get(failure.status, "invalid_request_error"), failure.message
        if failure.name == "context_length_exceeded":
            numbers = failure.numbers
            message = f"prompt is too long: {numbers['n_prompt_tokens']} tokens > {numbers['n_ctx']} maximum"
        error: dict[str, Any] = {"type": kind, "message": message}
        if failure.param == "thread":  # upon which its library goes on without one
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error}
    kind = _OPENAI_TYPES.get(failure.status, "invalid_request_error")
    fields = {"message": failure.message, "type": kind, "param": failure.param, "code": failure.name}
    return {"error": {**fields, **failure.numbers}}
