"""POST /v1/responses, without state: what was said before comes with the request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from starlette.responses import Response as HTTPResponse

from localllm.engine.chat_template import ChatInput
from localllm.server.asking import Ask
from localllm.server.bodies import Body
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import Failure
from localllm.server.fields import (
    MAX_MESSAGES,
    NOT_YET,
    Count,
    IgnoredCount,
    IgnoredFlag,
    IgnoredList,
    IgnoredText,
    KeepAlive,
    Nothing,
    Penalty,
    Seed,
    Share,
    Temperature,
    overlaid,
)
from localllm.server.openai.messages import refuse_other_parts
from localllm.server.openai.response_object import Response, ResponseEvent, Said, Speech
from localllm.server.openai.shapes import TIERS, PromptCacheOptions
from localllm.server.replying import EVENT_STREAM, collected, event, evicted_header, streamed, whole

_STATELESS = "nothing is kept of a response; send what was said before as input"


class InputText(Body):
    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(refuse_other_parts)]
    text: str
    annotations: IgnoredList = None
    logprobs: IgnoredList = None


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    id: IgnoredText = None
    status: IgnoredText = None
    phase: IgnoredText = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Nothing = None
    id: IgnoredText = None
    status: IgnoredText = None
    encrypted_content: None = None


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    why: ClassVar = {
        **dict.fromkeys(("tools", "tool_choice", "text.format"), NOT_YET),
        "text": "how much is said cannot be turned up or down; 'medium' is as the model does",
        "moderation": "nothing is judged here",
        "image": "models here write text",
        "access_programs": "there are no programs of a provider here",
        "background_options": _STATELESS,
        **dict.fromkeys(("previous_response_id", "conversation", "background", "prompt"), _STATELESS),
        "include": "log-probabilities alone can be included",
        "reasoning": "an effort may be asked for, and no summary is made",
    }

    model: str | None = None
    input: str | Annotated[list[InputMessage | InputReasoning], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=1)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    tools: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: IgnoredCount = None
    background: Literal[False] | None = None
    store: IgnoredFlag = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=16, description="Given back.")] = None
    user: IgnoredText = None
    keep_alive: KeepAlive = None
    safety_identifier: IgnoredText = None
    prompt_cache_key: IgnoredText = None
    prompt_cache_retention: IgnoredText = None
    prompt_cache_options: PromptCacheOptions | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    image: None = None
    access_programs: None = None
    background_options: None = None
    context_management: Nothing = None


async def responses(call: Call, body: ResponsesBody) -> HTTPResponse:
    """Raises what refuses the request, or ends its answer before anything was said."""
    served = await call.model(body.model, body.keep_alive)
    model = body.model or served.name
    most = body.top_logprobs if body.top_logprobs is not None else (0 if body.include else None)
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
    given = {name: getattr(body, name) for name in names}
    sampling = overlaid(served.sampling(), {**given, "max_tokens": body.max_output_tokens, "logprobs": most})
    tokenizer = served.engine().tokenizer
    truncation = body.truncation or ("auto" if served.evicts else "disabled")
    answers = await served.ask(
        Ask(
            ChatInput(_messages(body)),
            sampling,
            priority=TIERS.get(body.service_tier or "", 0),
            effort=None if body.reasoning is None else body.reasoning.effort,
            evicts=truncation == "auto",
            prompt_field="input",
            effort_field="reasoning.effort",
        )
    )
    head = {**_head(body, model, sampling.temperature, sampling.top_p), "truncation": truncation}
    said = Said(head, tokenizer, most)
    if not body.stream:
        (piece,) = await collected(answers)
        said.take(piece)
        return await whole(said.response, evicted_header(answers))
    speech = Speech(said)

    def failed(failure: Failure) -> bytes:
        told = {"code": failure.name, "message": failure.message, "param": failure.param}
        return event({"type": "error", "sequence_number": speech.next_number(), **told}, "error")

    return await streamed(answers, speech.events, failed, EVENT_STREAM)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """As a chat template wants them; what was thought goes with the message behind it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought = ""
    for item in body.input:
        if isinstance(item, InputReasoning):
            thought = "".join(part.text for part in item.content or ())
            continue
        message = {"role": item.role, "content": _text(item.content)}
        if thought and item.role == "assistant":
            message["reasoning_content"] = thought
        thought = ""
        messages.append(message)
    return messages


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _head(body: ResponsesBody, model: str, temperature: float, top_p: float) -> Mapping[str, Any]:
    """What of the request is said again in the response."""
    return {
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
        "store": False,
        "temperature": temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
    }


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        responses,
        "Answer, in items",
        ResponsesBody,
        Response,
        (EVENT_STREAM, ResponseEvent),
    ),
)
