"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.engine.events import FinishedEvent
from localllm.server.answering import Answers, CallPiece, Piece
from localllm.server.asking import Ask
from localllm.server.choosing import choosing_of
from localllm.server.endings import FinishReason, finish_reason, timings_of
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import RequestError, body_of
from localllm.server.fields import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    Count,
    Nothing,
    refuse_top_logprobs,
)
from localllm.server.logprobs import content_logprobs
from localllm.server.openai.messages import Message, chat_messages, joined_text
from localllm.server.openai.shapes import (
    FINGERPRINT,
    TIERS,
    ChoiceLogprobs,
    GenerationBody,
    ShownUsage,
    TimingsField,
    Usage,
    refuse_stream_options,
    sampling_of,
    usage_of,
)
from localllm.server.openai.tools import ResponseFormat, ToolChoice, Tools, chosen, form_of
from localllm.server.replying import EVENT_STREAM, PING, News, collected, event, evicted_header, new_id, streamed, whole
from localllm.server.structured import grammar_of, one_grammar
from localllm.text.chat_template import ChatInput
from localllm.text.tokenizer import Tokenizer

_ONLY_TOOLS = "it is 'tools' and 'tool_choice' here, as it is there by now"


class ChatBody(GenerationBody):
    elsewhere: ClassVar = {**GenerationBody.elsewhere, "prompt": "send it as 'messages', or to /v1/completions"}
    why: ClassVar = {
        **dict.fromkeys(("functions", "function_call"), _ONLY_TOOLS),
        "modalities": "models here write text",
        "audio": "models here write text",
        "prediction": "guesses are made here without being told what to guess",
        "web_search_options": "nothing is fetched from the network",
        "moderation": "nothing is judged here",
        "verbosity": "how much is said cannot be turned up or down; 'medium' is as the model does",
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(max_length=32, description="Variables of the model's chat template.")
    ] = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="false: the prompt ends with the last message, not where an answer begins.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="true: the last message, the assistant's, is gone on with.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: an answer has one call at most.")] = None
    functions: Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    moderation: None = None


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ReplyCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ReplyMessage(TypedDict):
    """content: null where there are calls and nothing else was said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ReplyCall]]


ChatFinishReason = FinishReason | Literal["tool_calls"]


class Choice(TypedDict):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TimingsField):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    service_tier: NotRequired[str]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """The first one of a call has its id and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[CallDelta]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(TimingsField):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


async def chat(call: Call, body: ChatBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was said."""
    refuse_stream_options(body)
    refuse_top_logprobs(body.top_logprobs, wanted=body.logprobs)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        what, why = "'max_tokens' and 'max_completion_tokens' differ", "one is the other's older name"
        raise RequestError(400, what, why=why, param="max_tokens", name="invalid_value")
    messages, said = _begun(body)
    variables = body.chat_template_kwargs or {}
    served = await call.model(body.model, body.keep_alive)
    model = body.model or served.name
    sampling = sampling_of(
        body,
        served,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    choosing, sampling = choosing_of(body, sampling)
    grammar, grammar_field = one_grammar(
        response_format=form_of(body.response_format),
        structured_outputs=grammar_of(body.structured_outputs),
        grammar=body.text_grammar,
    )
    told = _Logprobs(served.engine().tokenizer, body.top_logprobs or 0 if body.logprobs else None)
    answers = await served.ask(
        Ask(
            ChatInput(chat_messages(messages), None, body.add_generation_prompt is not False or bool(said), variables),
            sampling,
            said=said,
            n=body.n or 1,
            choosing=choosing,
            num_ctx=body.num_ctx,
            priority=TIERS.get(body.service_tier or "", 0),
            effort=body.reasoning_effort,
            evicts=served.evicts,
            grammar=grammar,
            tools=chosen(body.tools, body.tool_choice, body.parallel_tool_calls),
            grammar_field=grammar_field,
        )
    )
    head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}
    if body.stream:
        speech = _Speech(answers, head, told, ShownUsage(answers, body.stream_options))
        return await streamed(answers, speech.chunks, lambda failure: event(body_of(failure, "openai")), EVENT_STREAM)
    pieces = await collected(answers)
    usage = usage_of([piece.ending for piece in pieces], len(pieces))
    (pieces,) = choosing.chosen(pieces, body.n or 1)
    return await whole(lambda: _completion(pieces, head, told, usage, body.service_tier), evicted_header(answers))


def _begun(body: ChatBody) -> tuple[Sequence[Message], str]:
    """(what is answered, with what the answer begins). Raises RequestError where there is nothing to go on with."""
    if not body.continue_final_message:
        return body.messages, ""
    *before, last = body.messages
    why = ""
    if body.add_generation_prompt:
        why = "with 'add_generation_prompt' a new answer would begin behind the last message"
    elif last.role != "assistant" or not before:
        why = "the last message, behind others, has to be the assistant's"
    elif last.tool_calls or last.thought:
        why = "calls and thoughts of an answer that has begun cannot be taken up"
    if why:
        what, param = "'continue_final_message' cannot be honoured", "continue_final_message"
        raise RequestError(400, what, why=why, param=param, name="invalid_value")
    return before, joined_text(last.content)


class _Logprobs:
    """most: of the likeliest tokens that are told; None: no log-probabilities at all."""

    def __init__(self, tokenizer: Tokenizer, most: int | None) -> None:
        self._tokenizer = tokenizer
        self._most = most

    def of(self, piece: Piece) -> ChoiceLogprobs | None:
        if self._most is None:
            return None
        return {"content": content_logprobs(piece.logprobs, self._tokenizer, self._most), "refusal": None}


def _completion(
    pieces: Sequence[Piece], head: Mapping[str, Any], told: _Logprobs, usage: Usage, tier: str | None
) -> ChatCompletion:
    choices: list[Choice] = []
    for index, piece in enumerate(pieces):
        content = piece.text if piece.text or not piece.calls else None
        message: ReplyMessage = {"role": "assistant", "content": content, "refusal": None}
        if piece.thought:
            message["reasoning_content"] = piece.thought
        if piece.calls:
            message["tool_calls"] = [_call(call) for call in piece.calls]
        reason = _reason(piece.ending, called=bool(piece.calls))
        choices.append({"index": index, "message": message, "logprobs": told.of(piece), "finish_reason": reason})
    ends = [piece.ending for piece in pieces]
    reply: dict[str, Any] = {
        **head,
        "object": "chat.completion",
        "choices": choices,
        "usage": usage,
    }
    if tier is not None:
        reply["service_tier"] = "default" if tier == "auto" else tier
    if len(ends) == 1:
        reply["timings"] = timings_of(ends[0])
    return reply  # type: ignore[return-value]


def _call(call: CallPiece) -> ReplyCall:
    return {
        "id": new_id("call_"),
        "type": "function",
        "function": {"name": call.name or "", "arguments": call.arguments},
    }


def _call_delta(more: CallPiece) -> CallDelta:
    if more.name is None:
        return {"index": more.index, "function": {"arguments": more.arguments}}
    return {"index": more.index, **_call(more)}  # type: ignore[typeddict-item]


def _reason(finished: FinishedEvent, *, called: bool) -> ChatFinishReason:
    reason = finish_reason(finished)
    return "tool_calls" if called and reason == "stop" else reason


class _Speech:
    """Says the answers in chunks: the role, text, why it ended with nothing else, and usage if it is wanted."""

    def __init__(self, answers: Answers, head: Mapping[str, Any], told: _Logprobs, usage: ShownUsage) -> None:
        self._answers = answers
        self._head = {**head, "object": "chat.completion.chunk"}
        self._told = told
        self._usage = usage

    async def chunks(self, news: News) -> AsyncIterator[bytes]:
        for index in range(len(self._answers.asked.requests)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        ends = {}
        called = set()
        async for each in news:
            if each is None:
                yield PING
                continue
            index, piece = each
            self._usage.take(index, piece.num_tokens)
            if piece.thought:
                yield self._chunk(index, {"reasoning_content": piece.thought})
            if piece.text or piece.logprobs:
                yield self._chunk(index, {"content": piece.text}, self._told.of(piece))
            if piece.calls:
                called.add(index)
                yield self._chunk(index, {"tool_calls": [_call_delta(more) for more in piece.calls]})
            if piece.finished is not None:
                ends[index] = piece.finished
                timings = {"timings": timings_of(piece.finished)} if len(self._answers.asked.requests) == 1 else {}
                yield self._chunk(index, {}, None, _reason(piece.finished, called=index in called), **timings)
        if self._usage.comes_last:
            usage = usage_of([ends[index] for index in sorted(ends)], len(ends))
            yield event({**self._head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: ChoiceLogprobs | None = None,
        reason: ChatFinishReason | None = None,
        **more: Any,
    ) -> bytes:
        choice: ChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice], **self._usage.of(index), **more})


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat,
        "Answer a conversation",
        ChatBody,
        ChatCompletion,
        (EVENT_STREAM, ChatChunk),
    ),
)
