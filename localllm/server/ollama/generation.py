"""POST /api/chat and POST /api/generate."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, ValidationInfo, field_validator
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.engine.chat_template import ChatInput
from localllm.engine.tokenizer import Tokenizer
from localllm.server.answering import Piece
from localllm.server.asking import Ask
from localllm.server.bodies import Body
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import RequestError, body_of
from localllm.server.fields import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    NOT_YET,
    TEXT_ONLY,
    KeepAlive,
    Nothing,
    keep_seconds,
    refuse_top_logprobs,
)
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.ollama.options import Options, sampling_of
from localllm.server.ollama.shapes import Ending, ending_of, line, time_text
from localllm.server.replying import NDJSON, Json, News, collected, evicted_header, streamed, whole
from localllm.server.served import Served


class Message(Body):
    role: Literal["system", "user", "assistant"]
    content: str | None = None
    thinking: str | None = None
    images: Nothing = None
    tool_calls: Nothing = None
    tool_name: None = None

    @field_validator("images", "tool_calls", "tool_name", mode="before")
    @classmethod
    def _is_text(cls, value: object, field: ValidationInfo) -> object:
        if value not in (None, []):
            raise ValueError(TEXT_ONLY if field.field_name == "images" else NOT_YET)
        return value

    @property
    def fields(self) -> dict[str, Any]:
        """As templates want them."""
        thought = {} if self.thinking is None else {"reasoning_content": self.thinking}
        return {"role": self.role, "content": self.content or "", **thought}


class GenerationBody(Body):
    """Fields that both have."""

    why: ClassVar = {
        "format": NOT_YET,
        "think": 'it is true, false, "low", "medium" or "high"',
        "shift": "the context is not shifted: an answer ends where it does",
    }
    elsewhere: ClassVar = dict.fromkeys(Options.model_fields, "put it into 'options'")

    model: Annotated[str | None, Field(description="Without one, the model that is served.")] = None
    stream: Annotated[bool | None, Field(description="Default: true.")] = None
    options: Options | None = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        Field(description="How much is thought, where the model's chat template knows it."),
    ] = None
    keep_alive: KeepAlive = None
    format: Literal[""] | None = None
    shift: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None


class ChatBody(GenerationBody):
    why: ClassVar = {**GenerationBody.why, "tools": NOT_YET}

    messages: Annotated[
        list[Message] | None, Field(max_length=MAX_MESSAGES, description="Without any, the model is loaded.")
    ] = None
    tools: Nothing = None
    truncate: Annotated[
        bool | None, Field(description="true: the oldest turns leave a conversation that is too long.")
    ] = None


class GenerateBody(GenerationBody):
    why: ClassVar = {
        **GenerationBody.why,
        "template": "the model's own chat template is used; with raw, none is",
        "suffix": "models here go on with a text; they fill no gaps",
        "images": TEXT_ONLY,
        "context": "an earlier conversation goes to /api/chat, as its messages",
        "truncate": "a prompt is one turn, of which nothing can leave",
    }

    prompt: Annotated[str | None, Field(description="Without one, the model is loaded.")] = None
    system: str | None = None
    raw: Annotated[bool | None, Field(description="true: the prompt goes on as it is, without a chat template.")] = None
    template: Literal[""] | None = None
    suffix: Literal[""] | None = None
    images: Nothing = None
    context: Nothing = None
    truncate: Literal[False] | None = None


class ReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]


class Said(Ending):
    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[ContentLogprob]]


class ChatReply(Said):
    message: ReplyMessage


class GenerateReply(Said):
    response: str
    thinking: NotRequired[str]


Shape = Callable[[str, str], Mapping[str, Any]]


def _as_message(text: str, thought: str) -> Mapping[str, Any]:
    thinking = {"thinking": thought} if thought else {}
    return {"message": {"role": "assistant", "content": text, **thinking}}


def _as_response(text: str, thought: str) -> Mapping[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": time_text()}


@dataclass(frozen=True)
class _Teller:
    """Says an answer in lines or as one. shape: of text and thought. most_logprobs: of the likeliest tokens that are
    told; None: no log-probabilities at all."""

    model: str
    shape: Shape
    tokenizer: Tokenizer
    most_logprobs: int | None
    started_ns: int
    load_ns: int

    def whole(self, piece: Piece) -> dict[str, Any]:
        assert piece.finished is not None
        said = {**self._head(), **self.shape(piece.text, piece.thought), "done": True, **self._logprobs(piece)}
        return {**said, **ending_of(piece.finished, self.started_ns, self.load_ns)}

    async def lines(self, news: News) -> AsyncIterator[bytes]:
        async for each in news:
            if each is None:
                continue  # there is no line that says nothing
            _, piece = each
            if piece.thought:
                yield line({**self._head(), **self.shape("", piece.thought), "done": False})
            if piece.text or piece.logprobs:
                yield line({**self._head(), **self.shape(piece.text, ""), "done": False, **self._logprobs(piece)})
            if piece.finished is not None:
                end = ending_of(piece.finished, self.started_ns, self.load_ns)
                yield line({**self._head(), **self.shape("", ""), "done": True, **end})

    def _head(self) -> dict[str, Any]:
        return _head(self.model)

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self.most_logprobs is None:
            return {}
        return {"logprobs": content_logprobs(piece.logprobs, self.tokenizer, self.most_logprobs)}


async def chat(call: Call, body: ChatBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was said."""
    if not body.messages:
        return await _only_loaded(call, body, _as_message)
    served, teller = await _teller(call, body, _as_message)
    evicts = served.evicts if body.truncate is None else body.truncate
    *before, last = body.messages
    said = (last.content or "") if last.role == "assistant" and before else ""  # the answer is gone on with
    prompt = ChatInput([message.fields for message in (before if said else body.messages)])
    return await _answered(served, body, teller, prompt, said=said, evicts=evicts)


async def generate(call: Call, body: GenerateBody) -> Response:
    """Raises as `chat`."""
    if not body.prompt:
        return await _only_loaded(call, body, _as_response)
    served, teller = await _teller(call, body, _as_response)
    if body.raw:
        for name, given in (("system", body.system), ("think", body.think)):
            if given:
                why = "a raw prompt goes on as it is, without a chat template"
                raise RequestError(400, f"{name!r} cannot be honoured", why=why, param=name, name="unsupported_value")
        return await _answered(served, body, teller, body.prompt)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return await _answered(served, body, teller, ChatInput([*system, {"role": "user", "content": body.prompt}]))


async def _only_loaded(call: Call, body: GenerationBody, shape: Shape) -> Json:
    """The reply to who asks nothing but that the model be loaded, or unloaded."""
    if keep_seconds(body.keep_alive) == 0:
        served = await call.pool.find(body.model)
        await call.pool.leave(served)
        return Json({**_head(body.model or served.name), **shape("", ""), "done": True, "done_reason": "unload"})
    served = await call.model(body.model, body.keep_alive)
    return Json({**_head(body.model or served.name), **shape("", ""), "done": True, "done_reason": "load"})


async def _teller(call: Call, body: GenerationBody, shape: Shape) -> tuple[Served, _Teller]:
    """Raises RequestError for a model that there is not, or that cannot be loaded."""
    refuse_top_logprobs(body.top_logprobs, wanted=body.logprobs)
    started_ns = time.perf_counter_ns()
    served = await call.model(body.model, body.keep_alive)
    load_ns = time.perf_counter_ns() - started_ns
    most = body.top_logprobs or 0 if body.logprobs else None
    model = body.model or served.name
    return served, _Teller(model, shape, served.engine().tokenizer, most, started_ns, load_ns)


async def _answered(
    served: Served,
    body: GenerationBody,
    teller: _Teller,
    prompt: ChatInput | str,
    *,
    said: str = "",
    evicts: bool = False,
) -> Response:
    sampling = sampling_of(body.options, served, logprobs=teller.most_logprobs)
    num_ctx = None if body.options is None else body.options.num_ctx
    effort = None if isinstance(prompt, str) else _effort(body.think)
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    ask = Ask(prompt, sampling, num_ctx=num_ctx, effort=effort, evicts=evicts, said=said)
    answers = await served.ask(replace(ask, prompt_field=field, effort_field="think"))
    if body.stream is not False:
        return await streamed(answers, teller.lines, lambda failure: line(body_of(failure, "ollama")), NDJSON)
    [piece] = await collected(answers)
    return await whole(lambda: teller.whole(piece), evicted_header(answers))


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, bool):
        return "on" if think else "none"
    return think


ENDPOINTS = (
    Endpoint("POST", "/api/chat", chat, "Answer a conversation", ChatBody, ChatReply, (NDJSON, ChatReply)),
    Endpoint(
        "POST", "/api/generate", generate, "Answer a prompt", GenerateBody, GenerateReply, (NDJSON, GenerateReply)
    ),
)
