"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from starlette.responses import Response

from localllm.engine.events import FinishedEvent
from localllm.engine.events import Usage as Tokens
from localllm.server.answering import Answers, Piece
from localllm.server.anthropic.body import MessagesBody, PromptBody, ask_of
from localllm.server.anthropic.shapes import (
    BlockDeltaPart,
    BlockKind,
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

    def ending(self, finished: FinishedEvent) -> Ending:
        """A model may have stop texts of its own: at these it has ended its turn."""
        if finished.stop_text in self.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_text}
        is_cut = finished.finish_reason == "length"
        return {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}


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


def _block(kind: BlockKind, text: str) -> ReplyBlock:
    if kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _delta(kind: BlockKind, text: str) -> BlockDeltaPart:
    if kind == "thinking":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _message(head: _Head, piece: Piece) -> MessageReply:
    thoughts = [_block("thinking", head.shown(piece.thought))] if piece.thought else []
    finished = piece.ending
    return head.message([*thoughts, _block("text", piece.text)], head.ending(finished), _usage(finished.usage))


def _event(data: StreamEvent) -> bytes:
    return event(data, data["type"])


def _failed(failure: Failure) -> bytes:
    return event(body_of(failure, "anthropic"), "error")


class _Speech:
    """Says the answer in events: blocks one behind the other, a block of text the last, be it an empty one."""

    def __init__(self, answers: Answers, head: _Head) -> None:
        self._answers = answers
        self._head = head
        self._open: BlockKind | None = None
        self._index = -1

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
            yield from self._say("thinking", self._head.shown(piece.thought))
        if piece.text or piece.finished is not None:
            yield from self._say("text", piece.text)
        if piece.finished is not None:
            yield from self._closed()
            end = self._head.ending(piece.finished)
            yield {"type": "message_delta", "delta": end, "usage": _usage(piece.finished.usage)}
            yield {"type": "message_stop"}

    def _say(self, kind: BlockKind, text: str) -> Iterator[StreamEvent]:
        if self._open != kind:
            yield from self._closed()
            self._open = kind
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": _block(kind, "")}
        if text:
            yield {"type": "content_block_delta", "index": self._index, "delta": _delta(kind, text)}

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
