"""What /v1/responses gives back: a response of items, and the events by which one is streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from localllm.engine.tokenizer import Tokenizer
from localllm.server.answering import Piece
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.replying import PING, News, event, new_id


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ContentLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputMessage | ReasoningItem]
    usage: NotRequired[ResponseUsage]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str


class ResponseEvent(TypedDict):
    """type: "response.created" first, "response.completed" or "response.incomplete" last."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    delta: NotRequired[str]


class Said:
    """What has been said of one response."""

    def __init__(self, head: Mapping[str, Any], tokenizer: Tokenizer, most_logprobs: int | None) -> None:
        self._head = {"id": new_id("resp_"), "object": "response", **head}
        self._tokenizer = tokenizer
        self._most = most_logprobs
        self.ids = {"reasoning": new_id("rs_"), "message": new_id("msg_")}
        self.piece = Piece()

    def take(self, piece: Piece) -> None:
        self.piece.add(piece)

    def logprobs(self, piece: Piece) -> list[ContentLogprob]:
        return [] if self._most is None else content_logprobs(piece.logprobs, self._tokenizer, self._most)

    @property
    def is_cut(self) -> bool:
        return self.piece.finished is not None and self.piece.finished.finish_reason == "length"

    def message(self, *, is_begun_only: bool = False) -> OutputMessage:
        """The item; as it is when it has just begun."""
        return {
            "id": self.ids["message"],
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if is_begun_only else "incomplete" if self.is_cut else "completed",
            "content": [] if is_begun_only else [self._text()],
        }

    def _text(self) -> OutputText:
        logprobs = self.logprobs(self.piece)
        return {"type": "output_text", "text": self.piece.text, "annotations": [], "logprobs": logprobs}

    def reasoning(self, *, is_begun_only: bool = False) -> ReasoningItem:
        """As `message`, of what was thought."""
        return {
            "id": self.ids["reasoning"],
            "type": "reasoning",
            "status": "in_progress" if is_begun_only else "completed",
            "summary": [],
            "content": [] if is_begun_only else [{"type": "reasoning_text", "text": self.piece.thought}],
        }

    def response(self) -> Response:
        """As far as it is said: with its output once it has ended."""
        finished = self.piece.finished
        status = "in_progress" if finished is None else "incomplete" if self.is_cut else "completed"
        items: list[OutputMessage | ReasoningItem] = []
        if finished is not None:
            items = [*([self.reasoning()] if self.piece.thought else []), self.message()]
        response: dict[str, Any] = {
            **self._head,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.is_cut else None,
            "output": items,
        }
        if finished is not None:
            response["usage"] = self._usage()
        return response  # type: ignore[return-value]

    def _usage(self) -> ResponseUsage:
        usage = self.piece.ending.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.piece.num_thought_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class Speech:
    """Says a response in numbered events; an item's begin when there is something of it."""

    def __init__(self, said: Said) -> None:
        self._said = said
        self._number = -1
        self._index = -1  # of the item that is being said
        self._open: Literal["reasoning", "message"] | None = None

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def events(self, news: News) -> AsyncIterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._said.response())
        async for each in news:
            if each is None:
                yield PING
                continue
            for part in self._told(each[1]):
                yield part
        last = "incomplete" if self._said.is_cut else "completed"
        yield self._event(f"response.{last}", response=self._said.response())

    def _told(self, piece: Piece) -> list[bytes]:
        said: list[bytes] = []
        self._said.take(Piece(thought=piece.thought, num_thought_tokens=piece.num_thought_tokens))
        if piece.thought:
            said += self._begun("reasoning")
            said.append(self._part_event("response.reasoning_text.delta", delta=piece.thought))
        if piece.text or piece.logprobs or piece.finished is not None:
            said += self._begun("message")
            self._said.take(replace(piece, thought="", num_thought_tokens=0))
            if piece.text or piece.logprobs:
                logprobs = self._said.logprobs(piece)
                said.append(self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs))
        if piece.finished is not None:
            said += self._ended()
        return said

    def _begun(self, kind: Literal["reasoning", "message"]) -> list[bytes]:
        """An item of that kind is open afterwards."""
        if self._open == kind:
            return []
        said = self._ended() if self._open is not None else []
        self._open = kind
        self._index += 1
        item = getattr(self._said, kind)(is_begun_only=True)
        said.append(self._event("response.output_item.added", output_index=self._index, item=item))
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        said.append(self._part_event("response.content_part.added", part=part))
        return said

    def _ended(self) -> list[bytes]:
        """Of the item that is open: its text once more, its part, and all of it."""
        assert self._open is not None
        item = getattr(self._said, self._open)()
        (part,) = item["content"]
        if self._open == "message":
            told = self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        else:
            told = self._part_event("response.reasoning_text.done", text=part["text"])
        done = self._part_event("response.content_part.done", part=part)
        self._open = None
        return [told, done, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._said.ids[self._open], "output_index": self._index}
        return self._event(kind, **place, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": self.next_number(), **fields}, kind)
