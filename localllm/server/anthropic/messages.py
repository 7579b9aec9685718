"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from starlette.responses import Response

from localllm.engine.events import FinishedEvent, Usage
from localllm.server.anthropic.body import AnthropicPromptBody, MessagesBody, request_of
from localllm.server.bodies import Absent, ReplyBody
from localllm.server.compression import CompressionReply, compressed
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import Failure, body_of
from localllm.server.fields import overlaid
from localllm.server.generation_request import prompt_ids, under_preset
from localllm.server.replies import AnswerWriter, JsonReply, event, new_id, replied
from localllm.server.tools.deltas import Delta, ToolCallDelta
from localllm.server.tools.tool_parser import partial_object

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(ReplyBody):
    """input_tokens: the prompt tokens that were computed; the others were in the prefix cache. reused_tokens: of those,
    the ones that stood at another position before. evicted_tokens: those whose keys and values left before the end,
    where some did (--kv-evict)."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    reused_tokens: Absent[int] = None
    output_tokens: int
    evicted_tokens: Absent[int] = None
    service_tier: Literal["standard"] = "standard"


class ReplyText(ReplyBody):
    type: Literal["text"] = "text"
    text: str = ""


class ReplyThinking(ReplyBody):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ReplyToolUse(ReplyBody):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = ReplyText | ReplyThinking | ReplyToolUse


class StopDelta(ReplyBody):
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageReply(ReplyBody):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    usage: AnthropicUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    compression: Absent[CompressionReply] = None


class BlockDelta(ReplyBody):
    """The next part of a block. partial_json: of a call's input."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: Absent[str] = None
    thinking: Absent[str] = None
    signature: Absent[str] = None
    partial_json: Absent[str] = None


class StreamEvent(ReplyBody):
    """index: of the event's block, if it has one. delta, usage: at the end, those of the message."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping",
    ]  # fmt: skip
    index: Absent[int] = None
    message: Absent[MessageReply] = None
    content_block: Absent[ReplyBlock] = None
    delta: Absent[BlockDelta | StopDelta] = None
    usage: Absent[AnthropicUsage] = None


class TokenCount(ReplyBody):
    input_tokens: int


async def messages(call: ApiCall, body: MessagesBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was emitted."""
    request, told = await compressed(call, body, body.model, request_of(body))
    asked = await call.asked(body.model, body.keep_alive)
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    sampling = overlaid(asked.sampling(), {**given, "stop": body.stop_sequences or None})
    request = replace(request, sampling=sampling, evicts=asked.evicts, reuse=body.reuse)
    answers = await call.server.ask(asked, request)
    hides = body.thinking is not None and body.thinking.display == "omitted"
    name, num_prompt_tokens = asked.shown(body.model), answers.num_prompt_tokens
    writer = MessageWriter(name, body.stop_sequences or (), num_prompt_tokens, told, hides_thoughts=hides)
    return await replied(answers, writer, is_streamed=body.stream)


async def count_tokens(call: ApiCall, body: AnthropicPromptBody) -> JsonReply:
    """Count any prompt, also one that is too long. Raises what refuses it."""
    asked = await call.asked(body.model, body.keep_alive)
    engine, request = asked.engine(), under_preset(request_of(body), asked.selection.preset)
    ids = await call.pool.off_loop(lambda: prompt_ids(request, engine))
    return JsonReply(TokenCount(input_tokens=len(ids)))


def _usage(usage: Usage) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        reused_tokens=usage.reused_tokens or None,
        output_tokens=usage.completion_tokens,
        evicted_tokens=usage.evicted_tokens or None,
    )


def _tool_use(call: ToolCallDelta) -> ReplyToolUse:
    """Return a call with as much of its input as there is, where it was cut."""
    return ReplyToolUse(id=new_id("toolu_"), name=call.name or "", input=partial_object(call.arguments))


class MessageWriter(AnswerWriter):
    """Writes an answer in blocks, one behind the other; the last is a text, perhaps an empty one, or a call."""

    ping = event({"type": "ping"}, "ping")

    def __init__(
        self,
        model: str,
        stops: Sequence[str],
        num_prompt_tokens: int,
        compression: CompressionReply | None = None,
        *,
        hides_thoughts: bool,
    ) -> None:
        """stops: texts that the client wants the answer to end at."""
        self._head: dict[str, Any] = {"id": new_id("msg_"), "model": model, "compression": compression}
        self._stops = stops
        self._num_prompt_tokens = num_prompt_tokens
        self._hides_thoughts = hides_thoughts
        self._open: str | None = None  # the type of the block that is open
        self._index = -1
        self._has_called = False

    def whole(self, answers: list[Delta]) -> MessageReply:
        [answer] = answers
        blocks: list[ReplyBlock] = []
        if answer.thought:
            blocks.append(ReplyThinking(thinking="" if self._hides_thoughts else answer.thought))
        if answer.text or not answer.calls:
            blocks.append(ReplyText(text=answer.text))
        blocks += map(_tool_use, answer.calls)
        stop, usage = self._stop(answer.end, called=bool(answer.calls)), _usage(answer.end.usage)
        return MessageReply(**self._head, content=blocks, usage=usage, **stop.written)

    def _stop(self, finished: FinishedEvent, *, called: bool) -> StopDelta:
        """Return why it ended. At a stop text of the model's own it has ended its turn."""
        if finished.stop_text in self._stops:
            return StopDelta(stop_reason="stop_sequence", stop_sequence=finished.stop_text)
        if finished.finish_reason == "length":
            return StopDelta(stop_reason="max_tokens")
        return StopDelta(stop_reason="tool_use" if called else "end_turn")

    def begin(self) -> Iterator[bytes]:
        # How much of the prompt was cached is known at the end only.
        usage = _usage(Usage(self._num_prompt_tokens))
        yield _event("message_start", message=MessageReply(**self._head, content=[], usage=usage))

    def fail(self, failure: Failure) -> bytes:
        return event(body_of(failure, "anthropic"), "error")

    def write(self, _index: int, delta: Delta) -> Iterator[bytes]:
        if delta.thought:
            yield from self._begin_block(ReplyThinking())
            if not self._hides_thoughts:
                yield self._block_delta("thinking_delta", thinking=delta.thought)
        if delta.text:
            yield from self._begin_block(ReplyText())
            yield self._block_delta("text_delta", text=delta.text)
        for call in delta.calls:
            self._has_called = True
            if call.name is not None:
                yield from self._end_block()
                yield from self._begin_block(_tool_use(ToolCallDelta(call.index, call.name)))
            yield self._block_delta("input_json_delta", partial_json=call.arguments)
        if delta.finished is not None:
            if self._open != "tool_use":
                yield from self._begin_block(ReplyText())
            yield from self._end_block()
            stop = self._stop(delta.finished, called=self._has_called)
            yield _event("message_delta", delta=stop, usage=_usage(delta.finished.usage))
            yield _event("message_stop")

    def _begin_block(self, block: ReplyBlock) -> Iterator[bytes]:
        """Have a block of that type open."""
        if self._open == block.type:
            return
        yield from self._end_block()
        self._open = block.type
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _block_delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _end_block(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._block_delta("signature_delta", signature="")
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("POST", "/v1/messages", messages, "Chat completion", MessagesBody, MessageReply, StreamEvent),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "Count a prompt's tokens", AnthropicPromptBody, TokenCount
    ),
)
