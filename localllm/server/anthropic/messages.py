"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from starlette.responses import Response

from localllm.engine.events import FinishedEvent, Usage
from localllm.server.anthropic.body import AnthropicPromptBody, MessagesBody, request_of
from localllm.server.bodies import ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import Failure, body_of
from localllm.server.fields import overlaid
from localllm.server.generation_request import prompt_ids
from localllm.server.replies import EVENT_STREAM, JsonReply, collected, event, evicted_header, new_id, streamed, whole
from localllm.server.tools.deltas import Delta, ToolCallDelta
from localllm.server.tools.tool_parser import partial_object

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(ReplyBody):
    """input_tokens: of the prompt, those that were computed; the others were in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
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


class MessageStart(ReplyBody):
    type: Literal["message_start"] = "message_start"
    message: MessageReply


class BlockStart(ReplyBody):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ReplyBlock


class TextDelta(ReplyBody):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(ReplyBody):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(ReplyBody):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str = ""


class InputDelta(ReplyBody):
    """More of a call's input, as JSON."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


BlockDeltaPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(ReplyBody):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockDeltaPart


class BlockStop(ReplyBody):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageDelta(ReplyBody):
    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(ReplyBody):
    type: Literal["message_stop"] = "message_stop"


class Ping(ReplyBody):
    type: Literal["ping"] = "ping"


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class TokenCount(ReplyBody):
    input_tokens: int


async def messages(call: ApiCall, body: MessagesBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was emitted."""
    served = await call.model(body.model, body.keep_alive)
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    sampling = overlaid(served.sampling(), {**given, "stop": body.stop_sequences or None})
    answers = await call.server.ask(served, replace(request_of(body), sampling=sampling, evicts=served.evicts))
    hides = body.thinking is not None and body.thinking.display == "omitted"
    head = _Head(new_id("msg_"), body.model or served.name, body.stop_sequences or (), hides)
    if body.stream:
        return await streamed(answers, MessageWriter(head, answers.num_prompt_tokens))
    [answer] = await collected(answers)
    return await whole(lambda: _message(head, answer), evicted_header(answers))


async def count_tokens(call: ApiCall, body: AnthropicPromptBody) -> JsonReply:
    """Count any prompt, also one that is too long. Raises what refuses it."""
    served = await call.model(body.model, body.keep_alive)
    engine, request = served.engine(), request_of(body)
    ids = await call.pool.off_loop(lambda: prompt_ids(request, engine))
    return JsonReply(TokenCount(input_tokens=len(ids)))


@dataclass(frozen=True)
class _Head:
    """The fields of a reply that are known before its answer.

    stops: texts that the client wants it to end at
    hides: thoughts are not shown
    """

    id: str
    model: str
    stops: Sequence[str]
    hides: bool

    def shown(self, thought: str) -> str:
        return "" if self.hides else thought

    def stop(self, finished: FinishedEvent, *, called: bool) -> StopDelta:
        """Return why it ended. At a stop text of the model's own it has ended its turn."""
        if finished.stop_text in self.stops:
            return StopDelta(stop_reason="stop_sequence", stop_sequence=finished.stop_text)
        if finished.finish_reason == "length":
            return StopDelta(stop_reason="max_tokens")
        return StopDelta(stop_reason="tool_use" if called else "end_turn")


def _usage(usage: Usage) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _tool_use(call: ToolCallDelta) -> ReplyToolUse:
    """Return a call with as much of its input as there is, where it was cut."""
    return ReplyToolUse(id=new_id("toolu_"), name=call.name or "", input=partial_object(call.arguments))


def _message(head: _Head, answer: Delta) -> MessageReply:
    """Return a message of at least one block, be it an empty text."""
    blocks: list[ReplyBlock] = [ReplyThinking(thinking=head.shown(answer.thought))] if answer.thought else []
    if answer.text or not answer.calls:
        blocks.append(ReplyText(text=answer.text))
    blocks += map(_tool_use, answer.calls)
    stop, usage = head.stop(answer.end, called=bool(answer.calls)), _usage(answer.end.usage)
    return MessageReply(id=head.id, model=head.model, content=blocks, usage=usage, **stop.written)


def _event(data: StreamEvent) -> bytes:
    return event(data, data.type)


class MessageWriter:
    """Writes an answer in blocks, one behind the other; the last is a text or a call, be it an empty text."""

    media_type = EVENT_STREAM
    ping = _event(Ping())

    def __init__(self, head: _Head, num_prompt_tokens: int) -> None:
        self._head = head
        self._num_prompt_tokens = num_prompt_tokens
        self._open: str | None = None  # the type of the block that is open
        self._index = -1
        self._has_called = False

    def begin(self) -> Iterator[bytes]:
        # How much of the prompt was cached is known at the end only.
        usage = _usage(Usage(self._num_prompt_tokens))
        message = MessageReply(id=self._head.id, model=self._head.model, content=[], usage=usage)
        yield _event(MessageStart(message=message))

    def write(self, _index: int, delta: Delta) -> Iterator[bytes]:
        return map(_event, self._events(delta))

    def end(self) -> tuple[bytes, ...]:
        return ()

    def fail(self, failure: Failure) -> bytes:
        return event(body_of(failure, "anthropic"), "error")

    def _events(self, delta: Delta) -> Iterator[StreamEvent]:
        if delta.thought:
            yield from self._begin_block(ReplyThinking())
            if shown := self._head.shown(delta.thought):
                yield self._block_delta(ThinkingDelta(thinking=shown))
        if delta.text:
            yield from self._begin_block(ReplyText())
            yield self._block_delta(TextDelta(text=delta.text))
        for call in delta.calls:
            self._has_called = True
            if call.name is not None:
                yield from self._end_block()
                yield from self._begin_block(_tool_use(ToolCallDelta(call.index, call.name)))
            yield self._block_delta(InputDelta(partial_json=call.arguments))
        if delta.finished is not None:
            if self._open != "tool_use":
                yield from self._begin_block(ReplyText())
            yield from self._end_block()
            stop = self._head.stop(delta.finished, called=self._has_called)
            yield MessageDelta(delta=stop, usage=_usage(delta.finished.usage))
            yield MessageStop()

    def _begin_block(self, block: ReplyBlock) -> Iterator[StreamEvent]:
        """Have a block of that type open."""
        if self._open == block.type:
            return
        yield from self._end_block()
        self._open = block.type
        self._index += 1
        yield BlockStart(index=self._index, content_block=block)

    def _block_delta(self, delta: BlockDeltaPart) -> BlockDelta:
        return BlockDelta(index=self._index, delta=delta)

    def _end_block(self) -> Iterator[StreamEvent]:
        if self._open == "thinking":
            yield self._block_delta(SignatureDelta())
        if self._open is not None:
            yield BlockStop(index=self._index)
        self._open = None


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("POST", "/v1/messages", messages, "Answer a conversation", MessagesBody, MessageReply, StreamEvent),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "Count a prompt's tokens", AnthropicPromptBody, TokenCount
    ),
)
