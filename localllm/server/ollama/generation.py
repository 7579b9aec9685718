"""POST /api/chat and POST /api/generate."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.server.answering import CallPiece, Piece
from localllm.server.asking import Ask
from localllm.server.bodies import Body, OnlyFalse
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import RequestError, body_of
from localllm.server.fields import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    TEXT_ONLY,
    KeepAlive,
    Nothing,
    keep_seconds,
    refuse_top_logprobs,
)
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.ollama.messages import Message, Tools, chat_messages, tools_of
from localllm.server.ollama.options import Options, sampling_of
from localllm.server.ollama.shapes import Ending, ending_of, line, time_text
from localllm.server.replying import NDJSON, Json, News, collected, evicted_header, new_id, streamed, whole
from localllm.server.served import Served
from localllm.server.structured import ANY_OBJECT, StructuredOutputs, grammar_of, json_grammar, one_grammar
from localllm.server.tools.calling import Toolset
from localllm.server.tools.json_text import partial_object
from localllm.text.chat_template import ChatInput
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer


class GenerationBody(Body):
    """Fields that both have."""

    why: ClassVar = {
        "format": 'it is "json", or a JSON Schema',
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
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None,
        Field(description="What the answer has to look like: any object, or a JSON Schema."),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(description="What the answer has to look like.")] = (
        None
    )
    shift: OnlyFalse | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None


class ChatBody(GenerationBody):
    messages: Annotated[
        list[Message] | None, Field(max_length=MAX_MESSAGES, description="Without any, the model is loaded.")
    ] = None
    tools: Tools | None = None
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
    truncate: OnlyFalse | None = None


class CalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class ReplyCall(TypedDict):
    id: str
    function: CalledFunction


class ReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ReplyCall]]


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


Shape = Callable[[str, str, Sequence[CallPiece]], Mapping[str, Any]]


def _as_message(text: str, thought: str, calls: Sequence[CallPiece]) -> Mapping[str, Any]:
    thinking = {"thinking": thought} if thought else {}
    called = {"tool_calls": list(map(_call, calls))} if calls else {}
    return {"message": {"role": "assistant", "content": text, **thinking, **called}}


def _as_response(text: str, thought: str, _calls: Sequence[CallPiece]) -> Mapping[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


def _call(call: CallPiece) -> ReplyCall:
    function: CalledFunction = {
        "index": call.index,
        "name": call.name or "",
        "arguments": partial_object(call.arguments),
    }
    return {"id": new_id("call_"), "function": function}


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
        said = {
            **self._head(),
            **self.shape(piece.text, piece.thought, piece.calls),
            "done": True,
            **self._logprobs(piece),
        }
        return {**said, **ending_of(piece.finished, self.started_ns, self.load_ns)}

    async def lines(self, news: News) -> AsyncIterator[bytes]:
        """Calls are told whole, each once the next one begins or the answer ends."""
        open_calls = Piece()
        async for each in news:
            if each is None:
                continue  # there is no line that says nothing
            _, piece = each
            if piece.thought:
                yield line({**self._head(), **self.shape("", piece.thought, ()), "done": False})
            if piece.text or piece.logprobs:
                yield line({**self._head(), **self.shape(piece.text, "", ()), "done": False, **self._logprobs(piece)})
            open_calls.add(Piece(calls=piece.calls))
            whole_calls = open_calls.calls if piece.finished is not None else open_calls.calls[:-1]
            if whole_calls:
                yield line({**self._head(), **self.shape("", "", whole_calls), "done": False})
                open_calls = Piece(calls=open_calls.calls[len(whole_calls) :])
            if piece.finished is not None:
                end = ending_of(piece.finished, self.started_ns, self.load_ns)
                yield line({**self._head(), **self.shape("", "", ()), "done": True, **end})

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
    # An answer that was begun is gone on with.
    said = (last.content or "") if last.role == "assistant" and before and not last.tool_calls else ""
    prompt = ChatInput(chat_messages(before if said else body.messages))
    return await _answered(served, body, teller, prompt, said=said, evicts=evicts, tools=tools_of(body.tools))


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
        return Json({**_head(body.model or served.name), **shape("", "", ()), "done": True, "done_reason": "unload"})
    served = await call.model(body.model, body.keep_alive)
    return Json({**_head(body.model or served.name), **shape("", "", ()), "done": True, "done_reason": "load"})


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
    tools: Toolset | None = None,
) -> Response:
    sampling = sampling_of(body.options, served, logprobs=teller.most_logprobs)
    num_ctx = None if body.options is None else body.options.num_ctx
    effort = None if isinstance(prompt, str) else _effort(body.think)
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    grammar, grammar_field = one_grammar(
        format=_form(body.format), structured_outputs=grammar_of(body.structured_outputs)
    )
    ask = Ask(prompt, sampling, num_ctx=num_ctx, effort=effort, evicts=evicts, said=said, grammar=grammar, tools=tools)
    asked = replace(ask, prompt_field=field, effort_field="think", grammar_field=grammar_field)
    answers = await served.ask(asked)
    if body.stream is not False:
        return await streamed(answers, teller.lines, lambda failure: line(body_of(failure, "ollama")), NDJSON)
    [piece] = await collected(answers)
    return await whole(lambda: teller.whole(piece), evicted_header(answers))


def _form(given: str | Mapping[str, Any] | None) -> Grammar | None:
    if not given and not isinstance(given, Mapping):
        return None
    return ANY_OBJECT if isinstance(given, str) else json_grammar(given)


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
