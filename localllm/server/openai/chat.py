"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SkipValidation
from starlette.responses import Response

from localllm.engine.events import FinishedEvent
from localllm.server import fields
from localllm.server.bodies import Absent, NullOrAbsent, ReplyBody
from localllm.server.compression import CompressBody, CompressionReply, compressed
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import RequestError
from localllm.server.fields import BestOf, optional, requested_best_of
from localllm.server.generation_request import GenerationRequest
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.openai import common
from localllm.server.openai.prompt import (
    OpenAIMessage,
    ResponseFormat,
    ToolChoice,
    Tools,
    chat_messages,
    chosen,
    form_of,
    joined_text,
)
from localllm.server.replies import FinishReason, TimingsReply, finish_reason, new_id, replied, timings_of
from localllm.server.stream import GenerationStream
from localllm.server.tools.deltas import Delta, ToolCallDelta
from localllm.text.chat_template import ChatInput
from localllm.text.tokenizer import Tokenizer

_ONLY_TOOLS = "use 'tools' and 'tool_choice', as OpenAI does by now"


class OpenAIChatBody(common.OpenAIGenerationBody, CompressBody):
    elsewhere: ClassVar = {
        **common.OpenAIGenerationBody.elsewhere,
        "prompt": "send it as 'messages', or to /v1/completions",
    }
    why: ClassVar = {
        **dict.fromkeys(("functions", "function_call"), _ONLY_TOOLS),
        "modalities": "models generate only text",
        "audio": "models generate only text",
        "prediction": "the server drafts tokens by itself",
        "web_search_options": "requests fetch nothing from the network",
        "moderation": "there is no moderation here",
        "verbosity": "the verbosity cannot be changed; 'medium' is the model's default",
    }

    messages: Annotated[list[OpenAIMessage], Field(min_length=1, max_length=fields.MAX_MESSAGES)]
    max_completion_tokens: fields.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=fields.MAX_TOP_LOGPROBS)] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = optional("Variables of the model's chat template.", max_length=32)
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = optional(
        "false: the prompt ends with the last message, without the beginning of an answer."
    )
    continue_final_message: bool | None = optional(
        "true: the answer continues the last message, which is the assistant's."
    )
    parallel_tool_calls: bool | None = optional("false: at most one call in an answer.")
    functions: fields.Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    moderation: None = None


class ChatFunction(ReplyBody):
    name: str
    arguments: str


class ChatToolCall(ReplyBody):
    id: str
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatFunctionDelta(ReplyBody):
    name: Absent[str] = None
    arguments: str


class ChatToolCallDelta(ReplyBody):
    """The next part of the call `index`. The first part has id, type and name."""

    index: int
    id: Absent[str] = None
    type: Absent[Literal["function"]] = None
    function: ChatFunctionDelta


class ChatMessage(ReplyBody):
    """content: null if there are calls and no text."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: Absent[str] = None
    tool_calls: Absent[list[ChatToolCall]] = None


class ChatDelta(ReplyBody):
    role: Absent[Literal["assistant"]] = None
    content: Absent[str] = None
    reasoning_content: Absent[str] = None
    tool_calls: Absent[list[ChatToolCallDelta]] = None


class ChatLogprobs(ReplyBody):
    content: SkipValidation[list[ContentLogprob]]
    refusal: None = None


ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(ReplyBody):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatChunkChoice(ReplyBody):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class _ChatHead(ReplyBody):
    id: str
    created: int
    model: str
    system_fingerprint: str = common.FINGERPRINT


class ChatCompletion(_ChatHead):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: common.OpenAIUsage
    service_tier: Absent[str] = None
    timings: Absent[TimingsReply] = None
    compression: Absent[CompressionReply] = None


class ChatChunk(_ChatHead):
    """compression: in the first chunk"""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: NullOrAbsent[common.OpenAIUsage] = None
    timings: Absent[TimingsReply] = None
    compression: Absent[CompressionReply] = None


async def chat(call: ApiCall, body: OpenAIChatBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was emitted."""
    common.refuse_stream_options(body)
    fields.refuse_top_logprobs(body.top_logprobs, wanted=body.logprobs)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        what, why = "'max_tokens' and 'max_completion_tokens' differ", "the first is the older name of the second"
        raise RequestError(400, what, why=why, param="max_tokens", name="invalid_value")
    before, said = _begun(body)
    opens_turn = body.add_generation_prompt is not False or bool(said)
    prompt = ChatInput(chat_messages(before), None, opens_turn, body.chat_template_kwargs or {})
    request, told = await compressed(call, body, body.model, GenerationRequest(prompt, said=said))
    most_logprobs = body.top_logprobs or 0 if body.logprobs else None
    asked = await call.asked(body.model, body.keep_alive)
    limit = body.max_completion_tokens or body.max_tokens
    best_of, sampling = requested_best_of(
        body, common.sampling_of(body, asked, max_tokens=limit, logprobs=most_logprobs)
    )
    grammar, grammar_field = fields.one_grammar(
        response_format=form_of(body.response_format),
        structured_outputs=fields.grammar_of(body.structured_outputs),
        grammar=body.text_grammar,
    )
    tokenizer = asked.engine().tokenizer
    answers = await call.server.ask(
        asked,
        replace(
            request,
            sampling=sampling,
            n=body.n or 1,
            best_of=best_of,
            num_ctx=body.num_ctx,
            priority=body.priority,
            reuse=body.reuse,
            effort=body.reasoning_effort,
            evicts=asked.evicts,
            grammar=grammar,
            tools=chosen(body.tools, body.tool_choice, body.parallel_tool_calls),
            grammar_field=grammar_field,
        ),
    )
    head: dict[str, Any] = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": asked.shown(body.model)}
    writer = ChatWriter(head, answers, body, best_of, tokenizer, most_logprobs, told)
    return await replied(answers, writer, is_streamed=body.stream)


def _begun(body: OpenAIChatBody) -> tuple[Sequence[OpenAIMessage], str]:
    """Return (messages to answer, beginning of the answer). Raises RequestError where there is none to go on with."""
    if not body.continue_final_message:
        return body.messages, ""
    *before, last = body.messages
    why = ""
    if body.add_generation_prompt:
        why = "'add_generation_prompt' would begin a new answer after the last message"
    elif last.role != "assistant" or not before:
        why = "the last of several messages must be the assistant's"
    elif last.tool_calls or last.thought:
        why = "an answer with calls or thinking cannot be continued"
    if why:
        what, param = "'continue_final_message' cannot be honoured", "continue_final_message"
        raise RequestError(400, what, why=why, param=param, name="invalid_value")
    return before, joined_text(last.content)


def _logprobs(delta: Delta, tokenizer: Tokenizer, most: int | None) -> ChatLogprobs | None:
    return None if most is None else ChatLogprobs(content=content_logprobs(delta.logprobs, tokenizer, most))


def _choice(index: int, answer: Delta, tokenizer: Tokenizer, most_logprobs: int | None) -> ChatChoice:
    text = answer.text if answer.text or not answer.calls else None
    calls = [_call(each) for each in answer.calls]
    return ChatChoice(
        index=index,
        message=ChatMessage(content=text, reasoning_content=answer.thought or None, tool_calls=calls or None),
        logprobs=_logprobs(answer, tokenizer, most_logprobs),
        finish_reason=_reason(answer.end, called=bool(calls)),
    )


def _call(call: ToolCallDelta) -> ChatToolCall:
    return ChatToolCall(id=new_id("call_"), function=ChatFunction(name=call.name or "", arguments=call.arguments))


def _call_delta(more: ToolCallDelta) -> ChatToolCallDelta:
    function = ChatFunctionDelta(name=more.name, arguments=more.arguments)
    if more.name is None:
        return ChatToolCallDelta(index=more.index, function=function)
    return ChatToolCallDelta(index=more.index, id=new_id("call_"), type="function", function=function)


def _reason(finished: FinishedEvent, *, called: bool) -> ChatFinishReason:
    reason = finish_reason(finished)
    return "tool_calls" if called and reason == "stop" else reason


class ChatWriter(common.ChunkWriter):
    """Streamed, it writes the role, the answer, why it ended with nothing else, and usage if it is wanted."""

    def __init__(
        self,
        head: Mapping[str, Any],
        answers: GenerationStream,
        body: OpenAIChatBody,
        best_of: BestOf,
        tokenizer: Tokenizer,
        most_logprobs: int | None,
        compression: CompressionReply | None,
    ) -> None:
        super().__init__(ChatChunk(**head, choices=[]), answers, body.stream_options, len(answers.prepared.requests))
        self._common = head
        self._body = body
        self._best_of = best_of
        self._tokenizer = tokenizer
        self._most_logprobs = most_logprobs
        self._compression = compression
        self._called = set[int]()

    def whole(self, answers: list[Delta]) -> ChatCompletion:
        (found,) = self._best_of.chosen(answers, self._body.n or 1)
        tier = self._body.service_tier
        return ChatCompletion(
            **self._common,
            choices=[_choice(index, each, self._tokenizer, self._most_logprobs) for index, each in enumerate(found)],
            usage=common.usage_of([each.end for each in answers], len(answers)),
            service_tier="default" if tier == "auto" else tier,
            timings=timings_of(found[0].end) if len(found) == 1 else None,
            compression=self._compression,
        )

    def begin(self) -> Iterator[bytes]:
        more = {} if self._compression is None else {"compression": self._compression}
        for index in range(len(self._requests)):
            delta = ChatDelta(role="assistant", content="")
            yield self.chunk(index, ChatChunkChoice(index=index, delta=delta), more=more)
            more = {}

    def write(self, index: int, delta: Delta) -> Iterator[bytes]:
        self.count(index, delta.num_tokens)
        if delta.thought:
            yield self._delta(index, reasoning_content=delta.thought)
        if delta.text or delta.logprobs:
            logprobs = _logprobs(delta, self._tokenizer, self._most_logprobs)
            yield self._delta(index, logprobs, content=delta.text)
        if delta.calls:
            self._called.add(index)
            yield self._delta(index, tool_calls=[_call_delta(more) for more in delta.calls])
        if delta.finished is not None:
            reason = _reason(delta.finished, called=index in self._called)
            choice = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)
            yield self.chunk(index, choice, delta.finished)

    def _delta(self, index: int, logprobs: ChatLogprobs | None = None, **fields: Any) -> bytes:
        return self.chunk(index, ChatChunkChoice(index=index, delta=ChatDelta(**fields), logprobs=logprobs))


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat, "Chat completion", OpenAIChatBody, ChatCompletion, ChatChunk),
)
