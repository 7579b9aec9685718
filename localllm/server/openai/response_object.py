"""The replies of /v1/responses: a response of items, and the events by which one is streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import SkipValidation

from localllm.engine.events import FinishedEvent, TokenLogprob, Usage
from localllm.server.bodies import Absent, ReplyBody
from localllm.server.errors import Failure
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.replies import EVENT_STREAM, PING, event, new_id
from localllm.server.tools.deltas import Delta
from localllm.text.tokenizer import Tokenizer

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ReplyBody):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: SkipValidation[list[ContentLogprob]]


class OutputReasoningText(ReplyBody):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(ReplyBody):
    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(ReplyBody):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: tuple[()] = ()
    content: list[OutputReasoningText]


class FunctionCallItem(ReplyBody):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(ReplyBody):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(ReplyBody):
    reasoning_tokens: int


class ResponseUsage(ReplyBody):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(ReplyBody):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(ReplyBody):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    completed_at: int | None
    status: Status
    error: None = None
    incomplete_details: Incomplete | None
    output: list[OutputItem]
    usage: Absent[ResponseUsage] = None


class ResponseEvent(ReplyBody):
    """type: "response.created" first, "response.completed" or "response.incomplete" last."""

    type: str
    sequence_number: int
    response: Absent[ResponseObject] = None
    delta: Absent[str] = None


ItemKind = Literal["reasoning", "message", "function_call"]
_PREFIXES: dict[ItemKind, str] = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
_EVENTS: dict[ItemKind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass
class ResponseItem:
    """One item of a response: a thought, a message, or a call. text: of a call, its arguments."""

    kind: ItemKind
    id: str
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


ItemDelta = tuple[ResponseItem, str, list[TokenLogprob]]  # the item, its new text and log-probabilities


class ResponseBuilder:
    """Builds a response out of an answer's deltas. head: the fields of the response that are known before."""

    def __init__(self, head: Mapping[str, Any], tokenizer: Tokenizer, most_logprobs: int | None) -> None:
        self._head = {"id": new_id("resp_"), **head}
        self._tokenizer = tokenizer
        self._most = most_logprobs
        self._num_thought_tokens = 0
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is still to come, or is of a call
        self._finished: FinishedEvent | None = None
        self.items: list[ResponseItem] = []

    def add(self, delta: Delta) -> Iterator[ItemDelta]:
        """Take a delta; a response that has ended has a message or a call, be it an empty message."""
        self._num_thought_tokens += delta.num_thought_tokens
        self._waiting += delta.logprobs
        if delta.thought:
            yield self._extend("reasoning", delta.thought)
        if delta.text:
            yield self._extend("message", delta.text)
        for call in delta.calls:
            yield self._extend("function_call", call.arguments, call.name)
        if delta.finished is not None:
            self._finished = delta.finished
            if not self.items or self.items[-1].kind != "function_call":
                yield self._extend("message", "")

    def _extend(self, kind: ItemKind, text: str, name: str | None = None) -> ItemDelta:
        if not self.items or self.items[-1].kind != kind or name is not None:
            call_id = new_id("call_") if kind == "function_call" else ""
            self.items.append(ResponseItem(kind, new_id(_PREFIXES[kind]), name=name or "", call_id=call_id))
        item, logprobs = self.items[-1], self._waiting if kind == "message" else []
        if kind != "reasoning":
            self._waiting = []
        item.text += text
        item.logprobs += logprobs
        return item, text, logprobs

    def logprobs(self, found: Sequence[TokenLogprob]) -> list[ContentLogprob]:
        return [] if self._most is None else content_logprobs(found, self._tokenizer, self._most)

    @property
    def status(self) -> Status:
        if self._finished is None:
            return "in_progress"
        return "incomplete" if self._finished.finish_reason == "length" else "completed"

    def item(self, item: ResponseItem, *, is_begun_only: bool = False) -> OutputItem:
        """Return an item as it is, or as it was when it began."""
        is_cut = self.status == "incomplete" and item is self.items[-1]
        status: Status = "in_progress" if is_begun_only else "incomplete" if is_cut else "completed"
        if item.kind == "function_call":
            arguments = "" if is_begun_only else item.text
            return FunctionCallItem(
                id=item.id, status=status, call_id=item.call_id, name=item.name, arguments=arguments
            )
        kind = OutputMessage if item.kind == "message" else ReasoningItem
        content: list[Any] = [] if is_begun_only else [self.part(item)]
        return kind(id=item.id, status=status, content=content)

    def part(self, item: ResponseItem, *, is_begun_only: bool = False) -> OutputText | OutputReasoningText:
        """Return the content of a message, or of a thought."""
        text, logprobs = ("", []) if is_begun_only else (item.text, item.logprobs)
        if item.kind == "reasoning":
            return OutputReasoningText(text=text)
        return OutputText(text=text, logprobs=self.logprobs(logprobs))

    def response(self) -> ResponseObject:
        """Return the response so far; it has its output once it has ended."""
        status, finished = self.status, self._finished
        return ResponseObject(
            **self._head,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            output=[] if finished is None else list(map(self.item, self.items)),
            usage=None if finished is None else self._usage(finished.usage),
        )

    def _usage(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self._num_thought_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class ResponseWriter:
    """Writes a response in numbered events; an item's begin when there is something of it."""

    media_type = EVENT_STREAM
    ping = PING

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._number = -1
        self._index = -1  # of the item that is open
        self._open: ResponseItem | None = None

    def begin(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._builder.response())

    def write(self, _index: int, delta: Delta) -> Iterator[bytes]:
        for item, text, logprobs in self._builder.add(delta):
            if item is not self._open:
                yield from self._close_item()
                yield from self._open_item(item)
            if text or logprobs:
                more = {"logprobs": self._builder.logprobs(logprobs)} if item.kind == "message" else {}
                yield self._item_event(item, f"{_EVENTS[item.kind]}.delta", delta=text, **more)
        if delta.finished is not None:
            yield from self._close_item()

    def end(self) -> Iterator[bytes]:
        yield self._event(f"response.{self._builder.status}", response=self._builder.response())

    def fail(self, failure: Failure) -> bytes:
        return self._event("error", code=failure.name, message=failure.message, param=failure.param)

    def _open_item(self, item: ResponseItem) -> Iterator[bytes]:
        self._open = item
        self._index += 1
        begun = self._builder.item(item, is_begun_only=True)
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        if item.kind != "function_call":
            part = self._builder.part(item, is_begun_only=True)
            yield self._item_event(item, "response.content_part.added", part=part)

    def _close_item(self) -> Iterator[bytes]:
        """Write the open item's text once more, its part, and all of it."""
        if self._open is None:
            return
        item, self._open = self._open, None
        done = f"{_EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            yield self._item_event(item, done, name=item.name, arguments=item.text)
        else:
            more = {"logprobs": self._builder.logprobs(item.logprobs)} if item.kind == "message" else {}
            yield self._item_event(item, done, text=item.text, **more)
            yield self._item_event(item, "response.content_part.done", part=self._builder.part(item))
        yield self._event("response.output_item.done", output_index=self._index, item=self._builder.item(item))

    def _item_event(self, item: ResponseItem, kind: str, **fields: Any) -> bytes:
        place: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        if item.kind != "function_call":
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)
