"""What /v1/responses gives back: a response of items, and the events by which one is streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from localllm.engine.events import FinishedEvent, TokenLogprob, Usage
from localllm.server.answering import Piece
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.replying import PING, News, event, new_id
from localllm.text.tokenizer import Tokenizer


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


class FunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall


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
    output: list[OutputItem]
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
    tool_choice: str | dict[str, Any]
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


Kind = Literal["reasoning", "message", "function_call"]
_PREFIXES: dict[Kind, str] = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


@dataclass
class Item:
    """One of a response's: what was thought, what was said, or a call. text: of a call, its arguments."""

    kind: Kind
    id: str
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


Told = tuple[Item, str, list[TokenLogprob]]  # what is new of which item


class Said:
    """What has been said of one response."""

    def __init__(self, head: Mapping[str, Any], tokenizer: Tokenizer, most_logprobs: int | None) -> None:
        self._head = {"id": new_id("resp_"), "object": "response", **head}
        self._tokenizer = tokenizer
        self._most = most_logprobs
        self._num_thought_tokens = 0
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is still to come, or is of a call
        self._finished: FinishedEvent | None = None
        self.items: list[Item] = []

    def take(self, piece: Piece) -> list[Told]:
        """A response that has ended has an item that says something, be it nothing."""
        self._num_thought_tokens += piece.num_thought_tokens
        self._waiting += piece.logprobs
        told: list[Told] = []
        if piece.thought:
            told.append(self._add("reasoning", piece.thought))
        if piece.text:
            told.append(self._add("message", piece.text))
        for call in piece.calls:
            told.append(self._add("function_call", call.arguments, call.name))
        if piece.finished is not None:
            self._finished = piece.finished
            if not self.items or self.items[-1].kind != "function_call":
                told.append(self._add("message", ""))
        return told

    def _add(self, kind: Kind, text: str, name: str | None = None) -> Told:
        if not self.items or self.items[-1].kind != kind or name is not None:
            call_id = new_id("call_") if kind == "function_call" else ""
            self.items.append(Item(kind, new_id(_PREFIXES[kind]), name=name or "", call_id=call_id))
        item, logprobs = self.items[-1], self._waiting if kind == "message" else []
        if kind != "reasoning":
            self._waiting = []
        item.text += text
        item.logprobs += logprobs
        return item, text, logprobs

    def logprobs(self, found: Sequence[TokenLogprob]) -> list[ContentLogprob]:
        return [] if self._most is None else content_logprobs(found, self._tokenizer, self._most)

    @property
    def is_cut(self) -> bool:
        return self._finished is not None and self._finished.finish_reason == "length"

    def shown(self, item: Item, *, is_begun_only: bool = False) -> OutputItem:
        """As it is there; as it is when it has just begun."""
        cut = self.is_cut and item is self.items[-1]
        status = "in_progress" if is_begun_only else "incomplete" if cut else "completed"
        told: dict[str, Any] = {"id": item.id, "type": item.kind, "status": status}
        if item.kind == "function_call":
            text = "" if is_begun_only else item.text
            return {**told, "call_id": item.call_id, "name": item.name, "arguments": text}  # type: ignore[return-value]
        more: dict[str, Any] = {"role": "assistant"} if item.kind == "message" else {"summary": []}
        return {**told, **more, "content": [] if is_begun_only else [self.part(item)]}  # type: ignore[return-value]

    def part(self, item: Item, *, is_begun_only: bool = False) -> OutputText | ReasoningText:
        """What is in a message, or in a thought."""
        text = "" if is_begun_only else item.text
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if is_begun_only else self.logprobs(item.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def response(self) -> Response:
        """As far as it is said: with its output once it has ended."""
        status = "in_progress" if self._finished is None else "incomplete" if self.is_cut else "completed"
        response: dict[str, Any] = {
            **self._head,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.is_cut else None,
            "output": [] if self._finished is None else list(map(self.shown, self.items)),
        }
        if self._finished is not None:
            response["usage"] = self._usage(self._finished.usage)
        return response  # type: ignore[return-value]

    def _usage(self, usage: Usage) -> ResponseUsage:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_thought_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


_DELTAS: dict[Kind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class Speech:
    """Says a response in numbered events; an item's begin when there is something of it."""

    def __init__(self, said: Said) -> None:
        self._said = said
        self._number = -1
        self._index = -1  # of the item that is being said
        self._open: Item | None = None

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

    def _told(self, piece: Piece) -> Iterator[bytes]:
        for item, text, logprobs in self._said.take(piece):
            if item is not self._open:
                yield from self._ended()
                yield from self._begun(item)
            if text or logprobs:
                more = {"logprobs": self._said.logprobs(logprobs)} if item.kind == "message" else {}
                yield self._item_event(item, f"{_DELTAS[item.kind]}.delta", delta=text, **more)
        if piece.finished is not None:
            yield from self._ended()

    def _begun(self, item: Item) -> Iterator[bytes]:
        self._open = item
        self._index += 1
        shown = self._said.shown(item, is_begun_only=True)
        yield self._event("response.output_item.added", output_index=self._index, item=shown)
        if item.kind != "function_call":
            part = self._said.part(item, is_begun_only=True)
            yield self._item_event(item, "response.content_part.added", part=part)

    def _ended(self) -> Iterator[bytes]:
        """Of the item that is open: its text once more, its part, and all of it."""
        if self._open is None:
            return
        item, self._open = self._open, None
        done = f"{_DELTAS[item.kind]}.done"
        if item.kind == "function_call":
            yield self._item_event(item, done, name=item.name, arguments=item.text)
        else:
            part = self._said.part(item)
            more = {"logprobs": self._said.logprobs(item.logprobs)} if item.kind == "message" else {}
            yield self._item_event(item, done, text=item.text, **more)
            yield self._item_event(item, "response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=self._said.shown(item))

    def _item_event(self, item: Item, kind: str, **fields: Any) -> bytes:
        place: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        if item.kind != "function_call":
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": self.next_number(), **fields}, kind)
