"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from starlette.responses import Response

from localllm.engine.events import FinishedEvent
from localllm.engine.events import Usage as Tokens
from localllm.server.answering import Answers, CallPiece, Piece
from localllm.server.anthropic.body import MessagesBody, PromptBody, ask_of
from localllm.server.anthropic.shapes import (
    BlockDeltaPart,
    Ending,
    MessageReply,
    ReplyBlock,
    SignatureDelta,
    StreamEvent,
    TokenCount,
    Usage,
)
from localllm.server.asking import prompt_ids
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import Failure, body_of
from localllm.server.fields import overlaid
from localllm.server.replying import (
    EVENT_STREAM,
    Json,
    News,
    collected,
    event,
    evicted_header,
    new_id,
    streamed,
    whole,
)
from localllm.server.tools.json_text import partial_object


@dataclass(frozen=True)
class _Head:
    """What is known of a reply before it is said. stops: the texts that the client wants it to end at. hides: what
    was thought is not shown."""

    id: str
    model: str
    stops: Sequence[str]
    hides: bool

    def message(self, content: list[ReplyBlock], end: Ending, usage: Usage) -> MessageReply:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "usage": usage,
            **end,
        }

    def shown(self, thought: str) -> str:
        return "" if self.hides else thought

    def ending(self, finished: FinishedEvent, *, called: bool) -> Ending:
        """A model may have stop texts of its own: at these it has ended its turn."""
        if finished.stop_text in self.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_text}
        if finished.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


async def messages(call: Call, body: MessagesBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was said."""
    served = await call.model(body.model, body.keep_alive)
    model = body.model or served.name
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    sampling = overlaid(served.sampling(), {**given, "stop": body.stop_sequences or None})
    answers = await served.ask(replace(ask_of(body), sampling=sampling, evicts=served.evicts))
    hides = body.thinking is not None and body.thinking.display == "omitted"
    head = _Head(new_id("msg_"), model, body.stop_sequences or (), hides)
    if body.stream:
        return await streamed(answers, _Speech(answers, head).events, _failed, EVENT_STREAM)
    [piece] = await collected(answers)
    return await whole(lambda: _message(head, piece), evicted_header(answers))


async def count_tokens(call: Call, body: PromptBody) -> Json:
    """Of any prompt, also one that is too long. Raises what refuses it."""
    served = await call.model(body.model, body.keep_alive)
    engine, ask = served.engine(), ask_of(body)
    reply: TokenCount = {"input_tokens": len(await served.off_loop(lambda: prompt_ids(ask, engine)))}
    return Json(reply)


def _usage(tokens: Tokens) -> Usage:
    return {
        "input_tokens": tokens.prompt_tokens - tokens.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached_tokens,
        "output_tokens": tokens.completion_tokens,
        "service_tier": "standard",
    }


def _thinking(thought: str) -> ReplyBlock:
    return {"type": "thinking", "thinking": thought, "signature": ""}


def _text(text: str) -> ReplyBlock:
    return {"type": "text", "text": text}


def _tool_use(call: CallPiece) -> ReplyBlock:
    """With what there is of its input, where it was cut."""
    return {
        "type": "tool_use",
        "id": new_id("toolu_"),
        "name": call.name or "",
        "input": partial_object(call.arguments),
    }


def _message(head: _Head, piece: Piece) -> MessageReply:
    """A message has a block, be it an empty text."""
    blocks = [_thinking(head.shown(piece.thought))] if piece.thought else []
    if piece.text or not piece.calls:
        blocks.append(_text(piece.text))
    blocks += map(_tool_use, piece.calls)
    finished = piece.ending
    return head.message(blocks, head.ending(finished, called=bool(piece.calls)), _usage(finished.usage))


def _event(data: StreamEvent) -> bytes:
    return event(data, data["type"])


def _failed(failure: Failure) -> bytes:
    return event(body_of(failure, "anthropic"), "error")


class _Speech:
    """Says the answer in events: blocks one behind the other, the last one of text or a call, be it an empty text."""

    def __init__(self, answers: Answers, head: _Head) -> None:
        self._answers = answers
        self._head = head
        self._open: str | None = None  # the type of the block that is being said
        self._index = -1
        self._has_called = False

    async def events(self, news: News) -> AsyncIterator[bytes]:
        # What of the prompt was cached is known at the end only.
        usage = _usage(Tokens(self._answers.num_prompt_tokens))
        nothing: Ending = {"stop_reason": None, "stop_sequence": None}
        yield _event({"type": "message_start", "message": self._head.message([], nothing, usage)})
        async for each in news:
            if each is None:
                yield _event({"type": "ping"})
                continue
            for data in self._said(each[1]):
                yield _event(data)

    def _said(self, piece: Piece) -> Iterator[StreamEvent]:
        if piece.thought:
            yield from self._begun(_thinking(""))
            if shown := self._head.shown(piece.thought):
                yield self._more({"type": "thinking_delta", "thinking": shown})
        if piece.text:
            yield from self._begun(_text(""))
            yield self._more({"type": "text_delta", "text": piece.text})
        for call in piece.calls:
            self._has_called = True
            if call.name is not None:
                yield from self._closed()
                yield from self._begun(_tool_use(CallPiece(call.index, call.name)))
            yield self._more({"type": "input_json_delta", "partial_json": call.arguments})
        if piece.finished is not None:
            if self._open != "tool_use":
                yield from self._begun(_text(""))
            yield from self._closed()
            end = self._head.ending(piece.finished, called=self._has_called)
            yield {"type": "message_delta", "delta": end, "usage": _usage(piece.finished.usage)}
            yield {"type": "message_stop"}

    def _begun(self, block: ReplyBlock) -> Iterator[StreamEvent]:
        """A block of that type is open afterwards."""
        if self._open == block["type"]:
            return
        yield from self._closed()
        self._open = block["type"]
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _more(self, delta: BlockDeltaPart) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> Iterator[StreamEvent]:
        if self._open == "thinking":
            signature: SignatureDelta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": self._index, "delta": signature}
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


_STREAM = (EVENT_STREAM, StreamEvent)

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("POST", "/v1/messages", messages, "Answer a conversation", MessagesBody, MessageReply, _STREAM),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, "Count a prompt's tokens", PromptBody, TokenCount),
)
