"""POST /api/chat and POST /api/generate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from localllm.engine.events import FinishedEvent
from localllm.server import fields
from localllm.server.bodies import Absent, OnlyFalse, ReplyBody
from localllm.server.compression import CompressBody, CompressionReply, compressed
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import Failure, RequestError, body_of
from localllm.server.fields import optional
from localllm.server.generation_request import GenerationRequest
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.ollama.common import OllamaEnd, OllamaHead, OllamaModelName, line, time_text
from localllm.server.ollama.prompt import OllamaMessage, Options, Tools, chat_messages, sampling_of, tools_of
from localllm.server.replies import NDJSON, AnswerWriter, JsonReply, finish_reason, new_id, replied, timings_of
from localllm.server.tools.deltas import Delta, ToolCallDelta
from localllm.server.tools.tool_parser import partial_object
from localllm.text.chat_template import ChatInput
from localllm.text.tokenizer import Tokenizer


class OllamaGenerationBody(CompressBody):
    """Fields that chats and prompts share."""

    why: ClassVar = {
        "format": 'it must be "json" or a JSON Schema',
        "think": 'it must be true, false, "low", "medium" or "high"',
        "shift": "the context does not shift: an answer ends when it is full",
    }
    elsewhere: ClassVar = {
        **dict.fromkeys(Options.model_fields, "put it into 'options'"),
        **dict.fromkeys(("options.reuse", "options.compress", "options.structured_outputs"), "put it beside 'options'"),
    }

    model: OllamaModelName = None
    stream: bool | None = optional("Default: true.")
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = optional(
        "How much the model thinks, if its chat template supports it."
    )
    keep_alive: fields.KeepAlive = None
    format: Literal["", "json"] | dict[str, Any] | None = optional(
        "The form of the answer: any object, or a JSON Schema."
    )
    structured_outputs: fields.StructuredField = None
    reuse: fields.ReuseField = None
    shift: OnlyFalse | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=fields.MAX_TOP_LOGPROBS)] = None


class OllamaChatBody(OllamaGenerationBody):
    messages: list[OllamaMessage] | None = optional(
        "Without any, the request only loads the model.", max_length=fields.MAX_MESSAGES
    )
    tools: Tools | None = None
    truncate: bool | None = optional("true: evicts the oldest turns if the conversation is too long.")


class OllamaGenerateBody(OllamaGenerationBody):
    why: ClassVar = {
        **OllamaGenerationBody.why,
        "template": "the server uses the model's own chat template, and none with raw",
        "suffix": "models continue a text; they cannot fill a gap",
        "images": fields.TEXT_ONLY,
        "context": "send an earlier conversation to /api/chat, as messages",
        "truncate": "the prompt is one turn, of which nothing can be evicted",
    }

    prompt: str | None = optional("Without one, the request only loads the model.")
    system: str | None = None
    raw: bool | None = optional("true: the model continues the prompt as it is, without a chat template.")
    template: Literal[""] | None = None
    suffix: Literal[""] | None = None
    images: fields.Nothing = None
    context: fields.Nothing = None
    truncate: OnlyFalse | None = None


class OllamaReplyFunction(ReplyBody):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaReplyCall(ReplyBody):
    id: str
    function: OllamaReplyFunction


class OllamaReplyMessage(ReplyBody):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: Absent[str] = None
    tool_calls: Absent[list[OllamaReplyCall]] = None


class _MessageHead(OllamaHead):
    message: OllamaReplyMessage


class OllamaChatReply(OllamaEnd, _MessageHead):
    pass


class _ResponseHead(OllamaHead):
    response: str
    thinking: Absent[str] = None


class OllamaGenerateReply(OllamaEnd, _ResponseHead):
    pass


@dataclass(frozen=True)
class OllamaWriter(AnswerWriter):
    """Writes an answer in lines, or as one.

    is_chat: replies have a message, not a response
    most_logprobs: how many of the likeliest tokens each token has; None: no log-probabilities at all
    started_ns: `time.perf_counter_ns` when the request came; load_ns: how long it waited for its model
    """

    model: str
    is_chat: bool
    tokenizer: Tokenizer
    most_logprobs: int | None = None
    started_ns: int = 0
    load_ns: int = 0
    compression: CompressionReply | None = None
    open_calls: Delta = field(default_factory=Delta)  # calls that are not whole yet

    media_type = NDJSON
    ping = b""

    def reply(
        self, text: str = "", thought: str = "", calls: Sequence[ToolCallDelta] = (), *, done: bool = False, **more: Any
    ) -> OllamaChatReply | OllamaGenerateReply:
        head: dict[str, Any] = {"model": self.model, "created_at": time_text(), "done": done}
        if not self.is_chat:
            return OllamaGenerateReply(**head, response=text, thinking=thought or None, **more)
        made = []
        for call in calls:
            name, arguments = call.name or "", partial_object(call.arguments)
            function = OllamaReplyFunction(index=call.index, name=name, arguments=arguments)
            made.append(OllamaReplyCall(id=new_id("call_"), function=function))
        message = OllamaReplyMessage(content=text, thinking=thought or None, tool_calls=made or None)
        return OllamaChatReply(**head, message=message, **more)

    def whole(self, answers: list[Delta]) -> OllamaChatReply | OllamaGenerateReply:
        [answer] = answers
        more = {"logprobs": self._logprobs(answer), **self._timings(answer.end)}
        return self.reply(answer.text, answer.thought, answer.calls, done=True, **more)

    def write(self, _index: int, delta: Delta) -> Iterator[bytes]:
        """Write calls whole, each once the next one begins or the answer ends."""
        if delta.thought:
            yield line(self.reply(thought=delta.thought))
        if delta.text or delta.logprobs:
            yield line(self.reply(delta.text, logprobs=self._logprobs(delta)))
        is_end, calls = delta.finished is not None, self.open_calls.calls
        self.open_calls.add(Delta(calls=delta.calls))
        if whole_calls := calls[:] if is_end else calls[:-1]:
            yield line(self.reply(calls=whole_calls))
            del calls[: len(whole_calls)]
        if delta.finished is not None:
            yield line(self.reply(done=True, **self._timings(delta.finished)))

    def fail(self, failure: Failure) -> bytes:
        return line(body_of(failure, "ollama"))

    def _timings(self, finished: FinishedEvent) -> dict[str, Any]:
        timings = timings_of(finished)
        return {
            "compression": self.compression,
            "done_reason": finish_reason(finished),
            "total_duration": time.perf_counter_ns() - self.started_ns,
            "load_duration": self.load_ns,
            "prompt_eval_count": finished.usage.prompt_tokens,
            "prompt_eval_duration": round(timings.prompt_ms * 1e6),
            "reused_count": finished.usage.reused_tokens or None,
            "evicted_count": finished.usage.evicted_tokens or None,
            "eval_count": finished.usage.completion_tokens,
            "eval_duration": round(timings.predicted_ms * 1e6),
        }

    def _logprobs(self, delta: Delta) -> list[ContentLogprob] | None:
        most = self.most_logprobs
        return None if most is None else content_logprobs(delta.logprobs, self.tokenizer, most)


async def chat(call: ApiCall, body: OllamaChatBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was emitted."""
    if not body.messages:
        return await _load_only(call, body)
    *before, last = body.messages
    # An answer that was begun is gone on with.
    said = (last.content or "") if last.role == "assistant" and before and not last.tool_calls else ""
    messages = chat_messages(before if said else body.messages)
    return await _answer(call, body, ChatInput(messages), said=said, tools=tools_of(body.tools))


async def generate(call: ApiCall, body: OllamaGenerateBody) -> Response:
    """Raises as `chat`."""
    if not body.prompt:
        return await _load_only(call, body)
    if body.raw:
        no_template, no_question = "a raw prompt gets no chat template", "a raw prompt has no question that stays"
        for name, given, why in (
            ("system", body.system, no_template),
            ("think", body.think, no_template),
            ("compress", body.compress, no_question),
        ):
            if given:
                raise RequestError(400, f"{name!r} cannot be honoured", why=why, param=name, name="unsupported_value")
        return await _answer(call, body, body.prompt)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return await _answer(call, body, ChatInput([*system, {"role": "user", "content": body.prompt}]))


async def _load_only(call: ApiCall, body: OllamaGenerationBody) -> JsonReply:
    """Load the model, or unload it where it is to stay for no time."""
    if fields.keep_seconds(body.keep_alive) == 0:
        asked, reason = await call.pool.asked(body.model), "unload"
        await call.pool.residents.leave(asked.served)
    else:
        asked, reason = await call.asked(body.model, body.keep_alive), "load"
    name, created_at, is_chat = asked.shown(body.model), time_text(), isinstance(body, OllamaChatBody)
    text = {"message": OllamaReplyMessage()} if is_chat else {"response": ""}
    return JsonReply({"model": name, "created_at": created_at, **text, "done": True, "done_reason": reason})


async def _answer(call: ApiCall, body: OllamaGenerationBody, prompt: ChatInput | str, **more: Any) -> Response:
    """more: fields of the request."""
    fields.refuse_top_logprobs(body.top_logprobs, wanted=body.logprobs)
    started_ns = time.perf_counter_ns()
    request, told = await compressed(call, body, body.model, GenerationRequest(prompt))
    asked_ns = time.perf_counter_ns()
    asked = await call.asked(body.model, body.keep_alive)
    load_ns = time.perf_counter_ns() - asked_ns
    most_logprobs, think, form = body.top_logprobs or 0 if body.logprobs else None, body.think, None
    if body.format or isinstance(body.format, dict):
        form = fields.ANY_OBJECT if isinstance(body.format, str) else fields.json_grammar(body.format)
    grammar, grammar_field = fields.one_grammar(
        format=form, structured_outputs=fields.grammar_of(body.structured_outputs)
    )
    effort = ("on" if think else "none") if isinstance(think, bool) else think
    is_chat = isinstance(body, OllamaChatBody)
    request = replace(
        request,
        sampling=sampling_of(body.options, asked, logprobs=most_logprobs),
        num_ctx=None if body.options is None else body.options.num_ctx,
        reuse=body.reuse,
        effort=None if isinstance(prompt, str) else effort,
        evicts=isinstance(body, OllamaChatBody) and (asked.evicts if body.truncate is None else body.truncate),
        grammar=grammar,
        prompt_field="messages" if is_chat else "prompt",
        effort_field="think",
        grammar_field=grammar_field,
        **more,
    )
    tokenizer = asked.engine().tokenizer  # an engine that breaks has none
    answers = await call.server.ask(asked, request)
    writer = OllamaWriter(asked.shown(body.model), is_chat, tokenizer, most_logprobs, started_ns, load_ns, told)
    return await replied(answers, writer, is_streamed=body.stream is not False)


ENDPOINTS = (
    Endpoint("POST", "/api/chat", chat, "Chat completion", OllamaChatBody, OllamaChatReply, OllamaChatReply),
    Endpoint(
        "POST",
        "/api/generate",
        generate,
        "Answer a prompt",
        OllamaGenerateBody,
        OllamaGenerateReply,
        OllamaGenerateReply,
    ),
)
